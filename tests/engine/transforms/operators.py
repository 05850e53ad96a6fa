"""PyTorch's operator database as programs, and what is checked about each: value, vjp, and both under vmap.

The oracles come from outside: torch.autograd on one sample, and a Python loop over samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_flatten, tree_unflatten

from psgrad.engine.transforms import vjp, vmap
from psgrad.errors import TransformError

RELATIVE, ABSOLUTE = 1e-9, 1e-10
# Samples of one database entry that are looked at, and those of them that are mapped over in every way.
MOST_SAMPLES, MOST_MAPPED, MOST_TWICE = 24, 6, 4

Where = int | None


def entries() -> dict[str, Any]:
    """The database by name; an operator with several variants has one name a variant."""
    named = {}
    for entry in op_db:
        if torch.float64 in entry.supported_dtypes("cpu"):
            named[f"{entry.name}.{entry.variant_test_name}" if entry.variant_test_name else entry.name] = entry
    return named


@dataclass(frozen=True)
class Program:
    """One call of an operator as a function of all tensors among its arguments; it returns all tensors of its result."""

    call: Callable[..., Any]
    arguments: Any
    tensors: tuple[Tensor, ...]
    differentiable: tuple[int, ...]  # which of the tensors have a gradient

    @classmethod
    def of(cls, entry: Any, sample: Any) -> Program:
        arguments = (sample.input, sample.args, sample.kwargs)
        tensors = [leaf for leaf in tree_flatten(arguments)[0] if isinstance(leaf, Tensor)]

        def call(first: Any, rest: Any, kwargs: Any) -> Any:
            out = entry(first, *rest, **kwargs)
            return sample.output_process_fn_grad(out) if sample.output_process_fn_grad is not None else out

        wanted = tuple(i for i, tensor in enumerate(tensors) if tensor.requires_grad)
        return cls(call, arguments, tuple(tensor.detach() for tensor in tensors), wanted)

    def __call__(self, *tensors: Tensor) -> list[Tensor]:
        leaves, spec = tree_flatten(self.arguments)
        given = iter(tensors)
        out = self.call(*tree_unflatten([next(given) if isinstance(leaf, Tensor) else leaf for leaf in leaves], spec))
        return [leaf for leaf in tree_flatten(out)[0] if isinstance(leaf, Tensor)]


def programs(entry: Any) -> Iterator[Program]:
    """The entry's sample calls, in float64."""
    torch.manual_seed(0)
    for number, sample in enumerate(entry.sample_inputs("cpu", torch.float64, requires_grad=entry.supports_autograd)):
        if number == MOST_SAMPLES:
            return
        yield Program.of(entry, sample)


@dataclass(frozen=True)
class Answer:
    """The results of a program, and the cotangents of its differentiable tensors given those of its results."""

    values: tuple[Tensor, ...]
    cotangents: tuple[Tensor, ...]


def by_autograd(program: Program, tensors: Sequence[Tensor], seeds: Sequence[Tensor | None] | None) -> tuple[Answer, list[Tensor | None]]:
    """The oracle, and the cotangents of the results that it was given (drawn where `seeds` is None): None for constants."""
    # Cloned behind the leaf, as an in-place operator may not write into a leaf; the layout stays as it was.
    given = [tensor.detach().clone() for tensor in tensors]
    leaves = [given[i].requires_grad_() for i in program.differentiable]
    torch.manual_seed(0)
    values = program(*given)
    tracked = [i for i, value in enumerate(values) if value.requires_grad]
    if seeds is None:
        torch.manual_seed(1)
        seeds = [torch.randn_like(value) if value.requires_grad else None for value in values]
    cotangents: list[Tensor] = []
    if tracked:
        found = torch.autograd.grad([values[i] for i in tracked], leaves, [seeds[i] for i in tracked], allow_unused=True)
        zeros = [torch.zeros_like(leaf) for leaf in leaves]
        cotangents = [zero if g is None else g.to_dense() for g, zero in zip(found, zeros, strict=True)]
    return Answer(tuple(value.detach() for value in values), tuple(cotangents)), list(seeds)


def by_psgrad(program: Program, tensors: Sequence[Tensor], seeds: Sequence[Tensor | None]) -> Answer:
    """The same by the transforms under test; `tensors` and `seeds` may be traced."""
    tracked = [i for i, seed in enumerate(seeds) if seed is not None]

    def function(*leaves: Tensor) -> tuple[Any, Any]:
        given = list(tensors)
        for i, leaf in zip(program.differentiable, leaves, strict=True):
            given[i] = leaf
        values = program(*given)
        return tuple(values[i] for i in tracked), tuple(value for i, value in enumerate(values) if i not in tracked)

    results, pull, constants = vjp(function, *[tensors[i] for i in program.differentiable], has_aux=True)
    both = iter(results), iter(constants)
    values = tuple(next(both[0] if i in tracked else both[1]) for i in range(len(seeds)))
    return Answer(values, pull(tuple(seeds[i] for i in tracked)) if tracked else ())


def twice_by_autograd(program: Program, seeds: Sequence[Tensor | None], probes: Sequence[Tensor] | None) -> tuple[Answer, list[Tensor]]:
    """The cotangents as values, and theirs in turn: in the differentiable tensors and in the seeds, given `probes` (drawn where None)."""
    given = [tensor.detach().clone() for tensor in program.tensors]
    leaves = [given[i].requires_grad_() for i in program.differentiable]
    torch.manual_seed(0)
    values = program(*given)
    tracked = [i for i, seed in enumerate(seeds) if seed is not None]
    inner = [seeds[i].detach().clone().requires_grad_() for i in tracked]  # type: ignore[union-attr]
    found = torch.autograd.grad([values[i] for i in tracked], leaves, inner, create_graph=True, materialize_grads=True)
    if probes is None:
        torch.manual_seed(2)
        probes = [torch.randn_like(leaf) for leaf in leaves]
    smooth = [i for i, g in enumerate(found) if g.requires_grad]
    again = torch.autograd.grad([found[i] for i in smooth], [*leaves, *inner], [probes[i] for i in smooth], materialize_grads=True)
    return Answer(tuple(g.detach() for g in found), again), list(probes)


def twice_by_psgrad(program: Program, tensors: Sequence[Tensor], seeds: Sequence[Tensor | None], probes: Sequence[Tensor]) -> Answer:
    """The same by the transforms under test."""
    count = len(program.differentiable)

    def cotangents(*both: Tensor) -> tuple[Tensor, ...]:
        given, outer = list(tensors), iter(both[count:])
        for i, leaf in zip(program.differentiable, both[:count], strict=True):
            given[i] = leaf
        return by_psgrad(program, given, [seed if seed is None else next(outer) for seed in seeds]).cotangents

    first, pull = vjp(cotangents, *[tensors[i] for i in program.differentiable], *[seed for seed in seeds if seed is not None])
    return Answer(first, pull(tuple(probes)))


def agree(one: Answer, other: Answer, *, values_are_defined: bool = True) -> bool:
    """Whether two answers are the same but for rounding; without defined values only their shapes and dtypes count."""
    if not values_are_defined:
        return [(x.shape, x.dtype) for x in one.values] == [(y.shape, y.dtype) for y in other.values]
    pairs = [(one.values, other.values), (one.cotangents, other.cotangents)]
    return all(len(a) == len(b) and all(close(x, y) for x, y in zip(a, b, strict=True)) for a, b in pairs)


def close(x: Tensor, y: Tensor) -> bool:
    return x.shape == y.shape and x.dtype == y.dtype and torch.allclose(x, y, RELATIVE, ABSOLUTE, equal_nan=True)


# -- over samples -----------------------------------------------------------------------------------------------------------------


def other_sample(tensor: Tensor) -> Tensor:
    """Another value from the same domain: the same numbers, in the opposite order."""
    return tensor.flip(list(range(tensor.dim()))) if tensor.dim() else tensor


def ways_to_map(program: Program) -> Iterator[tuple[Where, ...]]:
    """Axes for the program's tensors: all of them mapped in front, all behind, and each alone."""
    count = len(program.tensors)
    if count:
        yield (0,) * count
        yield (-1,) * count
    if count > 1:
        for alone in range(count):
            yield tuple((-1 if alone % 2 else 0) if i == alone else None for i in range(count))


@dataclass(frozen=True)
class TwoSamples:
    """A program on two samples: the tensors stacked where they are mapped, and what the loop says to each."""

    program: Program
    where: tuple[Where, ...]
    stacked: list[Tensor]
    seeds: list[Tensor | None]
    loop: tuple[Answer, Answer]

    @classmethod
    def of(cls, program: Program, where: tuple[Where, ...]) -> TwoSamples:
        first, seeds = by_autograd(program, program.tensors, None)
        others = [other_sample(tensor) if axis is not None else tensor for tensor, axis in zip(program.tensors, where, strict=True)]
        try:
            second, _ = by_autograd(program, others, seeds)
        except Exception:  # out of the operator's domain, or a result of another shape: the same sample twice
            others, second = list(program.tensors), first
        pairs = zip(program.tensors, others, strict=True)
        stacked = [torch.stack(pair, axis) if axis is not None else pair[0] for pair, axis in zip(pairs, where, strict=True)]
        return cls(program, where, stacked, seeds, (first, second))

    def vmap_of_vjp(self) -> Answer:
        def one(*tensors: Tensor) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
            answer = by_psgrad(self.program, tensors, self.seeds)
            return answer.values, answer.cotangents

        return Answer(*vmap(one, in_dims=self.where)(*self.stacked))

    def vjp_of_vmap(self) -> Answer:
        """Only for tensors that are all mapped in front: the gradient goes through the batching rules."""
        tracked = [i for i, seed in enumerate(self.seeds) if seed is not None]

        def whole(*leaves: Tensor) -> tuple[Tensor, ...]:
            given = list(self.stacked)
            for i, leaf in zip(self.program.differentiable, leaves, strict=True):
                given[i] = leaf
            values = vmap(lambda *tensors: tuple(self.program(*tensors)))(*given)
            return tuple(values[i] for i in tracked)

        _, pull = vjp(whole, *[self.stacked[i] for i in self.program.differentiable])
        seeds = [self.seeds[i] for i in tracked]
        return Answer(self.vmap_of_vjp().values, pull(tuple(torch.stack([seed, seed]) for seed in seeds if seed is not None)))

    def confirms(self, stacked: Answer, *, values_are_defined: bool) -> bool:
        return all(agree(row(stacked, i), answer, values_are_defined=values_are_defined) for i, answer in enumerate(self.loop))


def row(answer: Answer, sample: int) -> Answer:
    return Answer(tuple(v[sample] for v in answer.values), tuple(c[sample] for c in answer.cotangents))


# Their results are memory that nobody wrote to: only shape and dtype can be compared.
UNINITIALISED = {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"}

# -- the verdict --------------------------------------------------------------------------------------------------------------------


@dataclass
class Verdict:
    """What was found over all calls of one entry."""

    right: int = 0
    wrong: list[str] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)

    def record(self, what: str, check: Callable[[], bool]) -> bool:
        """Whether the check came to an end; a raised error other than a named refusal is as wrong as a wrong number."""
        try:
            right = check()
        except TransformError as error:
            self.refusals.append(f"{what}: {error}")
            return False
        except Exception as error:
            self.wrong.append(f"{what}: {type(error).__name__}: {error}")
            return False
        if right:
            self.right += 1
        else:
            self.wrong.append(f"{what}: another number")
        return True


def judge_twice(entry: Any) -> Verdict:
    """The vjp of the vjp of an entry's first sample calls, alone and with every tensor mapped."""
    verdict = Verdict()
    for number, program in enumerate(programs(entry)):
        if number == MOST_TWICE:
            break
        _, seeds = by_autograd(program, program.tensors, None)
        if all(seed is None for seed in seeds):
            continue
        expected, probes = twice_by_autograd(program, seeds, None)

        def alone(program: Program = program, expected: Answer = expected, seeds: Any = seeds, probes: Any = probes) -> bool:
            torch.manual_seed(0)
            return agree(twice_by_psgrad(program, program.tensors, seeds, probes), expected)

        def mapped(program: Program = program, expected: Answer = expected, seeds: Any = seeds, probes: Any = probes) -> bool:
            def one(tensors: Any, probes: Any) -> Any:
                answer = twice_by_psgrad(program, tensors, seeds, probes)
                return answer.values, answer.cotangents

            stacked = [[torch.stack([t, t]) for t in program.tensors], [torch.stack([t, 2 * t]) for t in probes]]
            found = Answer(*vmap(one)(*stacked))
            doubled = Answer(expected.values, tuple(2 * c for c in expected.cotangents))
            return agree(row(found, 0), expected) and agree(row(found, 1), doubled)

        if verdict.record(f"second vjp of call {number}", alone):
            verdict.record(f"vmap of the second vjp of call {number}", mapped)
    return verdict


def judge(entry: Any) -> Verdict:
    """Value and vjp of every sample call of an entry, alone and under vmap."""
    verdict, defined = Verdict(), entry.name not in UNINITIALISED
    for number, program in enumerate(programs(entry)):
        shapes = [tuple(tensor.shape) for tensor in program.tensors]
        try:
            expected, seeds = by_autograd(program, program.tensors, None)
        except Exception as error:
            raise AssertionError(f"the oracle itself fails on call {number} of {entry.name}: {error}") from error

        def alone(program: Program = program, expected: Answer = expected, seeds: Any = seeds) -> bool:
            torch.manual_seed(0)
            tensors = [tensor.clone() for tensor in program.tensors]
            return agree(by_psgrad(program, tensors, seeds), expected, values_are_defined=defined)

        if not verdict.record(f"vjp of call {number} {shapes}", alone) or number >= MOST_MAPPED:
            continue
        for way, where in enumerate(ways_to_map(program)):
            samples = TwoSamples.of(program, where)

            def mapped(samples: TwoSamples = samples) -> bool:
                return samples.confirms(samples.vmap_of_vjp(), values_are_defined=defined)

            def pulled(samples: TwoSamples = samples) -> bool:
                return samples.confirms(samples.vjp_of_vmap(), values_are_defined=defined)

            came_to_an_end = verdict.record(f"vmap {where} of the vjp of call {number} {shapes}", mapped)
            if way == 0 and came_to_an_end and samples.loop[0].cotangents:
                verdict.record(f"vjp of the vmap of call {number} {shapes}", pulled)
    return verdict
