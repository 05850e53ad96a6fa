"""The sweep over PyTorch's operator database: which derivatives are compared, alone and over samples, and the
verdict on each.

The oracles come from outside: torch.autograd on one sample, and a Python loop over samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from psgrad.engine.transforms import vjp, vmap
from psgrad.errors import PsgradError
from tests.engine.transforms.derivatives import (
    GRADIENT,
    PULL,
    PULL_TWICE,
    PUSH,
    PUSH_PULLED,
    Answer,
    Derivative,
)
from tests.engine.transforms.operators import MOST_SAMPLES, Program, programs
from tests.seeds import set_seed

RELATIVE, ABSOLUTE = 1e-9, 1e-10
# Of how many calls each tensor is mapped alone, too, and not just all of them together.
MOST_MAPPED_ALONE = 2

Where = int | None


class Row(NamedTuple):
    """What one row of the table compares."""

    derivative: Derivative
    mapped: bool
    bar: int | None  # percent of the entries that must be right; None where none is set


ROWS = {
    "vmap(grad)": Row(GRADIENT, True, 98),
    "vjp": Row(PULL, False, 95),
    "vmap(vjp)": Row(PULL, True, 95),
    "jvp": Row(PUSH, False, 95),
    "vmap(jvp)": Row(PUSH, True, 95),
    "vjp of vjp": Row(PULL_TWICE, False, 95),
    "jvp of vjp": Row(PUSH_PULLED, False, 95),
    "vmap(vjp of vjp)": Row(PULL_TWICE, True, None),
    "vjp of vmap": Row(PULL, True, None),
}

# The rows of second derivatives.
TWICE = frozenset(row for row, (derivative, _, _) in ROWS.items() if derivative in (PULL_TWICE, PUSH_PULLED))

# Their results are uninitialised memory: only shape and dtype can be compared.
UNINITIALISED = {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"}


def agree(one: Answer, other: Answer, *, values_are_defined: bool = True) -> bool:
    """Whether two answers are the same but for rounding; without defined values only their shapes and dtypes
    count.
    """
    if not values_are_defined:
        return [(x.shape, x.dtype) for x in one.values] == [(y.shape, y.dtype) for y in other.values]
    pairs = [(one.values, other.values), (one.derivatives, other.derivatives)]
    return all(len(a) == len(b) and all(close(x, y) for x, y in zip(a, b, strict=True)) for a, b in pairs)


def close(x: Tensor, y: Tensor) -> bool:
    return (
        x.shape == y.shape and x.dtype == y.dtype and torch.allclose(x, y, RELATIVE, ABSOLUTE, equal_nan=True)
    )


# -- over samples --------------------------------------------------------------------------------------------


def other_sample(tensor: Tensor) -> Tensor:
    """Another value from the same domain: the same numbers, in the opposite order."""
    return tensor.flip(list(range(tensor.dim()))) if tensor.dim() else tensor


def ways_to_map(program: Program, alone: bool) -> Iterator[tuple[Where, ...]]:
    """Axes for the program's tensors: all of them mapped in front, all behind, and each alone where asked
    for.
    """
    count = len(program.tensors)
    if count:
        yield (0,) * count
    if count and alone:
        yield (-1,) * count
    if count > 1 and alone:
        for only in range(count):
            yield tuple((-1 if only % 2 else 0) if i == only else None for i in range(count))


@dataclass(frozen=True)
class TwoSamples:
    """A program on two samples: what is mapped is stacked, and what the loop says to each."""

    program: Program
    derivative: Derivative
    where: tuple[Where, ...]
    tensors: list[Tensor]
    directions: list[Tensor]
    directions_where: Where
    loop: tuple[Answer, Answer]

    @classmethod
    def of(
        cls, program: Program, derivative: Derivative, where: tuple[Where, ...], *, equal: bool
    ) -> TwoSamples:
        """With `equal` both samples have the same tensors, and other directions at most."""
        shared = None in where
        ours = list(derivative.directions(program))
        theirs = ours if shared else [-2 * direction for direction in ours]
        first = derivative.oracle(program, program.tensors, ours)
        others = [
            other_sample(tensor) if axis is not None and not equal else tensor
            for tensor, axis in zip(program.tensors, where, strict=True)
        ]
        try:
            second = derivative.oracle(program, others, theirs)
        except Exception:  # out of the operator's domain, or a result of another shape: the same sample twice
            others, second = list(program.tensors), derivative.oracle(program, program.tensors, theirs)
        pairs = zip(program.tensors, others, strict=True)
        tensors = [
            torch.stack(pair, axis) if axis is not None else pair[0]
            for pair, axis in zip(pairs, where, strict=True)
        ]
        directions = ours if shared else [torch.stack(pair) for pair in zip(ours, theirs, strict=True)]
        return cls(program, derivative, where, tensors, directions, None if shared else 0, (first, second))

    def vmap(self) -> Answer:
        def one(
            tensors: Sequence[Tensor], directions: Sequence[Tensor]
        ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
            answer = self.derivative.ours(self.program, tensors, directions)
            return tuple(answer.values), tuple(answer.derivatives)

        set_seed(0)
        in_dims = (list(self.where), self.directions_where)
        return Answer(*vmap(one, in_dims=in_dims, randomness="same")(self.tensors, self.directions))

    def vjp_of_vmap(self) -> Answer:
        """The gradient goes through the batching rules. Only for tensors that are all mapped in front."""

        def whole(*leaves: Tensor) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
            given = self.program.with_leaves(self.tensors, leaves)
            values = vmap(lambda *tensors: tuple(self.program(*tensors)), randomness="same")(*given)
            return tuple(values[i] for i in self.program.tracked), values

        set_seed(0)
        _, pull, values = vjp(whole, *self.program.leaves(self.tensors), has_aux=True)
        return Answer(values, pull(tuple(self.directions)))

    def confirms(self, stacked: Answer, *, values_are_defined: bool) -> bool:
        samples = [
            Answer(tuple(v[i] for v in stacked.values), tuple(d[i] for d in stacked.derivatives))
            for i in range(2)
        ]
        return all(
            agree(a, b, values_are_defined=values_are_defined)
            for a, b in zip(samples, self.loop, strict=True)
        )


# -- the verdict ---------------------------------------------------------------------------------------------


@dataclass
class Verdict:
    """What was found in one row over all calls of one entry."""

    right: int = 0
    wrong: list[str] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)

    def record(self, what: str, check: Callable[[], bool]) -> None:
        """A raised error other than a named refusal is as wrong as a wrong number."""
        try:
            right = check()
        except PsgradError as error:
            self.refusals.append(f"{what}: {error}")
        except Exception as error:
            self.wrong.append(f"{what}: {type(error).__name__}: {error}")
        else:
            if right:
                self.right += 1
            else:
                self.wrong.append(f"{what}: another number")


def judge(
    entry: Any,
    rows: Sequence[str] = tuple(ROWS),
    *,
    equal_samples: bool = False,
    dtype: torch.dtype = torch.float64,
    most: int = MOST_SAMPLES,
    device: str = "cpu",
) -> dict[str, Verdict]:
    """The verdict on an entry in each of `rows`. Where nothing is differentiable, the vjp rows compare values
    alone.

    equal_samples: for operators that vmap can only handle where their data says the same for both samples.
    """
    verdicts = {row: Verdict() for row in rows}
    for number, program in enumerate(programs(entry, dtype, most, device)):
        for row in rows:
            if program.tracked or row in ("vjp", "vmap(vjp)"):
                _judge_row(
                    entry, row, program, verdicts[row], equal_samples, alone=number < MOST_MAPPED_ALONE
                )
    return verdicts


def _judge_row(entry: Any, row: str, program: Program, verdict: Verdict, equal: bool, alone: bool) -> None:
    derivative, mapped, _ = ROWS[row]
    defined = entry.name not in UNINITIALISED
    shapes = [tuple(tensor.shape) for tensor in program.tensors]
    if not mapped:
        directions = derivative.directions(program)
        expected = derivative.oracle(program, program.tensors, directions)

        def check() -> bool:
            set_seed(0)
            tensors = [tensor.clone() for tensor in program.tensors]
            return agree(derivative.ours(program, tensors, directions), expected, values_are_defined=defined)

        verdict.record(f"{row} of {program.name} {shapes}", check)
        return
    for where in ways_to_map(program, alone and row != "vjp of vmap"):
        samples = TwoSamples.of(program, derivative, where, equal=equal)

        def check_samples(samples: TwoSamples = samples) -> bool:
            result = samples.vjp_of_vmap() if row == "vjp of vmap" else samples.vmap()
            return samples.confirms(result, values_are_defined=defined)

        verdict.record(f"{row} of {program.name} {shapes}, mapped {where}", check_samples)
