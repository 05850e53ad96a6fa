"""A recorded list of kernels, shortened to what a repetition of the call must run.

Left out are views that another tensor is already (`detach`, two transposes, a reshape to the same shape),
equal kernels on equal arguments, and kernels whose results nobody reads. Views of tensors that outlive the
call are made once. Casts and other small values that depend on such tensors alone are computed once for each
value of these. Kernels that write or draw keep their order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from psgrad.engine.transforms.operators import facts
from psgrad.engine.transforms.recorder import Kernel, Recording, Slot

# Bytes of a value that is kept from call to call even if it is larger than what it is made of.
_SMALL = 1 << 16


@dataclass
class Shortened:
    """A recorded list of kernels without what need not run.

    Attributes:
        once: kernels that only look at tensors from outside; they run once.
        hoisted: kernels that only depend on these; they run when one of them was written to.
        kernels: those that run in each call.
        results: the numbers of the tensors that the call returns.
    """

    once: list[Kernel]
    hoisted: list[Kernel]
    kernels: list[Kernel]
    results: list[int]


def shorten(recording: Recording, hoists: bool) -> Shortened:
    """The kernels that a repetition of the call must run. hoists: see `program_of`."""
    kernels, results = _without_repeats(recording)
    outside, once, hoisted, each = set(recording.outside), list[Kernel](), list[Kernel](), list[Kernel]()
    # What is made of numbers that lie elsewhere is not kept: they would lie here from then on.
    fixed = {n for n, x in recording.outside.items() if not hasattr(x, "memory_key")}
    changing = _written_memory(recording) | {recording.memory[n] for n in results}
    for kernel in kernels:
        reads, made = kernel.reads, list(numbers_of(kernel.results))
        if is_view(kernel, recording) and outside.issuperset(reads):
            once.append(kernel)
            outside.update(made)
            if not fixed.issuperset(reads):
                continue
        elif (
            hoists
            and fixed.issuperset(reads)
            and not (kernel.several or kernel.writes or kernel.draws or kernel.value is not None)
            and changing.isdisjoint(recording.memory[n] for n in made)
            and _may_stay(kernel, recording)
        ):
            hoisted.append(kernel)
        else:
            each.append(kernel)
            continue
        fixed.update(made)
    each = _needed(each, results, recording)
    used = [n for kernel in each for n in kernel.reads]
    return Shortened(once, _needed(hoisted, used, recording), each, results)


def is_view(kernel: Kernel, recording: Recording) -> bool:
    """Whether a kernel only looks at memory that it reads: what may be a view (`reshape`) may be a copy."""
    memory, read = recording.memory, {recording.memory[n] for n in kernel.reads}
    return facts(kernel.op).is_view and all(memory[n] in read for n in numbers_of(kernel.results))


def _may_stay(kernel: Kernel, recording: Recording) -> bool:
    """Whether a kernel's result may be kept from call to call: a view, or no larger than what it reads."""
    if is_view(kernel, recording):
        return True
    views = (recording.views[n] for n in (*numbers_of(kernel.results), *kernel.reads))
    made, *read = (shape.numel() * dtype.itemsize for _, shape, _, dtype, *_ in views)
    return made <= max([_SMALL, *read])


def _without_repeats(recording: Recording) -> tuple[list[Kernel], list[int]]:
    """Without kernels whose result there is already: the same view of the same memory; or the result of an
    equal kernel on equal arguments, if nothing writes into their memory and the first result is still in use,
    so that no more memory is in use than without.
    """
    memory, returned, written = recording.memory, set(recording.results), _written_memory(recording)
    last = last_uses(recording.kernels, recording.results)
    names: dict[int, int] = {}
    views: dict[Any, int] = {}
    seen: dict[Any, list[int]] = {}
    for n in (*recording.arguments, *recording.outside):
        views.setdefault((memory[n], recording.views[n]), n)
    kept = []
    for position, kernel in enumerate(recording.kernels):
        kernel = _renamed(kernel, names)
        made = list(numbers_of(kernel.results))
        there = (views.setdefault((memory[n], recording.views[n]), n) for n in made)
        equal = [names.get(n, n) for n in there]
        # What is returned stays a tensor of its own: the caller may write into it.
        if kernel.value is not None or kernel.writes or kernel.draws or not made or returned & set(made):
            kept.append(kernel)
            continue
        if not all(its != n or n in kernel.reads for n, its in zip(made, equal, strict=True)):
            equal = []
            if written.isdisjoint(memory[n] for n in (*kernel.reads, *made)):
                key = (id(kernel.op), repr(kernel.args), repr(kernel.kwargs))
                first = seen.get(key)
                if first is not None and all(last[n] >= position for n in first):
                    equal = first
                else:
                    seen[key] = made
        if not equal:
            kept.append(kernel)
            continue
        for n, its in zip(made, equal, strict=True):
            if n != its:
                names[n] = its
                last[its] = max(last.get(its, 0), last.get(n, 0))
    return kept, [names.get(n, n) for n in recording.results]


def _written_memory(recording: Recording) -> set[int]:
    return {recording.memory[n] for kernel in recording.kernels for n in kernel.writes}


def _needed(kernels: list[Kernel], results: list[int], recording: Recording) -> list[Kernel]:
    """Without kernels whose results nobody reads, and writes into memory that nobody reads afterwards."""
    numbers, memory = set(results), {recording.memory[n] for n in results}
    kept = []
    for kernel in reversed(kernels):
        if (
            kernel.draws
            or kernel.value is not None
            or numbers.intersection(kernel.results)
            or any(recording.memory[n] in memory for n in kernel.writes)
        ):
            kept.append(kernel)
            numbers.update(kernel.reads)
            memory.update(recording.memory[n] for n in kernel.reads)
    return kept[::-1]


def _renamed(kernel: Kernel, names: dict[int, int]) -> Kernel:
    if names.keys().isdisjoint(kernel.reads) and names.keys().isdisjoint(kernel.results):
        return kernel

    def name(tree: Any) -> Any:
        if type(tree) is Slot:
            return Slot(names.get(tree.number, tree.number))
        if isinstance(tree, (list, tuple)):
            return type(tree)(name(item) for item in tree)
        return tree

    return replace(
        kernel,
        args=name(kernel.args),
        kwargs={key: name(item) for key, item in kernel.kwargs.items()} if kernel.kwargs else kernel.kwargs,
        reads=[names.get(n, n) for n in kernel.reads],
        results=[None if n is None else names.get(n, n) for n in kernel.results],
        writes=[names.get(n, n) for n in kernel.writes],
    )


def numbers_of(results: Sequence[int | None]) -> Iterator[int]:
    return (n for n in results if n is not None)


def last_uses(kernels: list[Kernel], results: list[int]) -> dict[int, int]:
    """number -> the position of the last kernel that makes or reads it; of results, after all."""
    last = {n: at for at, kernel in enumerate(kernels) for n in (*kernel.reads, *numbers_of(kernel.results))}
    return last | dict.fromkeys(results, len(kernels))
