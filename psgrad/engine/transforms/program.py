"""Programs: a recorded list of kernels, shortened, and the backends that run it.

The list becomes straight-line Python that calls PyTorch's own functions and frees each value at its last use;
on a GPU it becomes a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from psgrad import random_state
from psgrad.engine.transforms.private_torch import BelowAutograd, binding, write_count
from psgrad.engine.transforms.recorder import Kernel, Recording, Slot
from psgrad.engine.transforms.shortening import Shortened, is_view, last_uses, numbers_of, shorten

# Takes the call's tensors, returns the tensors of its results; None where a guard has another value.
Run = Callable[..., list[torch.Tensor] | None]


@dataclass
class Program:
    """A list of kernels that computes a call's results anew.

    Attributes:
        run: takes the call's tensors.
        refresh: called before it.
        how: the name of the backend, for messages.
        outside: the tensors that it takes from outside.
        relied_on: their addresses and shapes, which must not change.
        draws: whether it draws random numbers.
    """

    run: Run
    refresh: Callable[[], None]
    how: str
    outside: list[torch.Tensor]
    relied_on: list[Any]
    draws: bool

    def fits(self) -> bool:
        """Whether the tensors from outside are unchanged, apart from their values."""
        return all(_place(x) == before for x, before in zip(self.outside, self.relied_on, strict=True))


def program_of(
    recording: Recording,
    tensors: Sequence[torch.Tensor],
    binds: bool = True,
    hoists: bool = False,
) -> Program:
    """The program of a recorded call.

    Args:
        tensors: the call's own tensors, each once.
        binds: see `python_function`.
        hoists: whether what depends on tensors from outside alone is computed only when PyTorch has counted a
            write to one of them. It counts none through `.data`.
    """
    shortened = shorten(recording, hoists)
    outside = list(recording.outside.values())
    obstacle = obstacle_to_cuda_graph(recording, shortened, tensors)
    run, refresh = python_function(recording, shortened, binds)
    run = below_autograd(run)
    if obstacle is None:
        run = CudaGraph(run)
    on_gpu = any(x.device.type == "cuda" for x in tensors)
    plain = f"kernel by kernel ({obstacle})" if on_gpu and obstacle else "kernel by kernel"
    draws = any(kernel.draws for kernel in shortened.kernels)
    return Program(run, refresh, getattr(run, "how", plain), outside, [_place(x) for x in outside], draws)


def _place(x: torch.Tensor) -> Any:
    return x.data_ptr(), x.shape, x.dtype, x.requires_grad


# -- as Python -----------------------------------------------------------------------------------------------


def python_function(
    recording: Recording, shortened: Shortened, binds: bool
) -> tuple[Run, Callable[[], None]]:
    """The list as straight-line Python, and a function that computes hoisted values again where they have
    changed. binds: whether it calls PyTorch's own functions, which cost less than operators.
    """
    names = {f"v{n}": x for n, x in recording.outside.items()}
    source = _Source(names, binds)
    for kernel in (*shortened.once, *shortened.hoisted):
        source.add(kernel)
    with torch.no_grad():
        exec("\n".join(source.lines), names)
    source.lines.clear()
    refresh = _Refresh(recording, shortened, source)
    last = last_uses(shortened.kernels, shortened.results)
    made = {n for kernel in shortened.kernels for n in numbers_of(kernel.results)}
    for position, kernel in enumerate(shortened.kernels):
        source.add(kernel)
        used = {*kernel.reads, *numbers_of(kernel.results)}
        gone = [f"v{n}" for n in sorted(used & made) if last[n] == position]
        if gone:
            source.lines.append(f"{' = '.join(gone)} = None")
    source.lines.append(f"return [{', '.join(f'v{n}' for n in shortened.results)}]")
    head = f"def run({', '.join(f'v{n}' for n in dict.fromkeys(recording.arguments))}):"
    exec(compile("\n    ".join([head, *source.lines]), "<program>", "exec"), names)
    run: Any = names["run"]
    return run, refresh


class _Refresh:
    """Computes hoisted values again when PyTorch has counted a write to a tensor that they depend on. They
    keep their memory, whose addresses a CUDA graph knows.
    """

    def __init__(self, recording: Recording, shortened: Shortened, source: _Source) -> None:
        memory = {recording.memory[n] for kernel in shortened.hoisted for n in kernel.reads}
        self.read = [x for n, x in recording.outside.items() if recording.memory[n] in memory]
        self.counts, self.names = [write_count(x) for x in self.read], source.names
        copies = [
            f"v{kernel.results[0]}.copy_({source.call(kernel)})"
            for kernel in shortened.hoisted
            if not is_view(kernel, recording)
        ]
        self.code = compile("\n".join(copies), "<program>", "exec")

    def __call__(self) -> None:
        counts = [write_count(x) for x in self.read]
        if counts != self.counts:
            with torch.no_grad():
                exec(self.code, self.names)
            self.counts = counts


class _Source:
    """Lines of Python, with the objects that they name."""

    def __init__(self, names: dict[str, Any], binds: bool) -> None:
        self.names, self.binds = names, binds
        self.lines: list[str] = []

    def call(self, kernel: Kernel) -> str:
        # A binding may return another kind of value (torch.result_type a dtype, its operator a number).
        function = binding(kernel.op) if self.binds and kernel.value is None else kernel.op
        words = [self._word(x) for x in kernel.args]
        words += [f"{name}={self._word(x)}" for name, x in kernel.kwargs.items()]
        return f"{self._named(function)}({', '.join(words)})"

    def add(self, kernel: Kernel) -> None:
        call = self.call(kernel)
        if kernel.value is not None:
            self.lines.append(f"if {self._named(differs)}({call}, {self._named(kernel.value)}): return None")
            return
        targets = [f"v{n}" if n is not None else "_" for n in kernel.results]
        if all(target == "_" for target in targets):
            self.lines.append(call)
        else:
            self.lines.append(f"{', '.join(targets)}{',' if kernel.several else ''} = {call}")

    def _word(self, value: Any) -> str:
        if type(value) is Slot:
            return f"v{value.number}"
        if type(value) is list:
            return f"[{', '.join(map(self._word, value))}]"
        if type(value) is tuple:
            return f"({''.join(self._word(item) + ', ' for item in value)})"
        if value is None or type(value) in (bool, int, str):
            return repr(value)
        return self._named(value)

    def _named(self, value: Any) -> str:
        name = f"c{id(value)}"
        self.names[name] = value
        return name


def differs(now: Any, recorded: Any) -> bool:
    """Whether a value that Python reads is another one: NaN equals NaN, and 0.0 is not -0.0."""
    return type(now) is not type(recorded) or repr(now) != repr(recorded)


def below_autograd(run: Run) -> Run:
    """`run` without PyTorch's autograd, which costs time for each kernel even where it records nothing."""

    def call(*tensors: torch.Tensor) -> list[torch.Tensor] | None:
        with torch.no_grad(), BelowAutograd():
            return run(*tensors)

    return call


# -- on a GPU -----------------------------------------------------------------------------------------------


def obstacle_to_cuda_graph(
    recording: Recording, shortened: Shortened, tensors: Sequence[torch.Tensor]
) -> str | None:
    """The reason why a program can't be a CUDA graph; None if it can. tensors: of the recorded call."""
    if any(getattr(x, "supply", None) is not None for x in recording.outside.values()):
        return "weights are brought to the GPU as kernels need them"
    devices = [x.device for x in (*tensors, *recording.outside.values())]
    for kernel in shortened.kernels:
        devices += [x for x in kernel.kwargs.values() if isinstance(x, torch.device)]
    numbers = {device.index for device in devices} - {None}
    if any(device.type != "cuda" for device in devices) or len(numbers) != 1:
        return "not all of it is on one GPU"
    if any(kernel.value is not None for kernel in shortened.kernels):
        return "it reads values"
    lasting = {recording.memory[n] for n in (*recording.arguments, *recording.outside)}
    if any(recording.memory[n] in lasting for n in shortened.results):
        return "a result is a view of an argument"
    return None


class CudaGraph:
    """A program as a CUDA graph: one launch for all its kernels.

    A graph reads fixed addresses. An argument with the same address at each call (a weight) is read there. If
    the address of an argument changes, the argument is copied into a buffer from then on. The results are
    copies, because the next replay overwrites the graph's own. PyTorch advances its generators at each
    replay. If the graph can't be made (a library waits for the GPU), the kernels run one by one.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self.how = "CUDA graph"
        self.graph: torch.cuda.CUDAGraph | None = None
        self.moving: set[int] = set()  # arguments that have a buffer, by position
        self.addresses: list[int] = []

    def __call__(self, *tensors: torch.Tensor) -> list[torch.Tensor] | None:
        if self.how != "CUDA graph":
            return self.run(*tensors)
        addresses = [x.data_ptr() for x in tensors]
        moved = {
            i for i, (now, then) in enumerate(zip(addresses, self.addresses, strict=False)) if now != then
        } - self.moving
        if self.graph is None or moved:
            self.moving |= moved
            try:
                self._capture_graph(tensors, addresses)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:
                self.how = (
                    f"kernel by kernel, as no CUDA graph could be made: {str(error).partition(chr(10))[0]}"
                )
                return self.run(*tensors)
        assert self.graph is not None
        for i in self.moving:
            self.given[i].copy_(tensors[i])
        self.graph.replay()
        return [x.clone() for x in self.results or ()]

    def _capture_graph(self, tensors: tuple[torch.Tensor, ...], addresses: list[int]) -> None:
        self.addresses = addresses
        self.given = [x.clone() if i in self.moving else x for i, x in enumerate(tensors)]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        before = random_state.states()
        with torch.cuda.stream(stream):  # libraries make their handles and workspaces at the first call
            self.run(*self.given)
        torch.cuda.current_stream().wait_stream(stream)
        random_state.restore(before)
        self.graph = torch.cuda.CUDAGraph()
        # Only this thread is checked for operations that a graph can't hold: another thread may copy the next
        # chunk to the GPU.
        with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
            self.results = self.run(*self.given)
