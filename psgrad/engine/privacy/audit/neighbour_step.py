"""One step on a dataset and on a neighbour with the same random numbers (the method of "Re:cord-play", arXiv
2602.17454, which found errors in a dozen libraries).

Any difference then comes from the data. The distance of the two sums before noise must be at most the
declared sensitivity, and nothing else that is published may differ.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from psgrad.engine.privacy.audit.canaries import StoringSource
from psgrad.engine.privacy.batches import GradientSource
from psgrad.engine.privacy.box_muller import Use
from psgrad.engine.privacy.clipped_sums import ClippedSum
from psgrad.engine.privacy.clipping import Clipping, Group
from psgrad.engine.privacy.generators import Generator
from psgrad.engine.privacy.noise import Noise
from psgrad.engine.privacy.records import Relation
from psgrad.engine.privacy.step import NoisySum, private_sum
from psgrad.errors import PsgradError


class DrawsDiffer(PsgradError):
    """The replayed step requested other random numbers than the first one: the data decide how many are
    drawn.
    """


class LoggedGenerator(Generator):
    """Gives the numbers of a generator, and logs them. `again` gives a generator of the same numbers, which
    raises DrawsDiffer for other requests.
    """

    def __init__(self, generator: Generator, log: list[tuple[Any, Any]] | None = None) -> None:
        super().__init__()
        self.name, self.secure = generator.name, generator.secure
        self._generator, self._replays, self._next = generator, log is not None, 0
        self._log: list[tuple[Any, Any]] = [] if log is None else log  # requests and numbers

    def again(self) -> LoggedGenerator:
        """A generator that gives the logged numbers from the first one on."""
        return LoggedGenerator(self._generator, self._log)

    @property
    def left(self) -> int:
        """The number of logged draws that were not requested again."""
        return len(self._log) - self._next

    def uint64(self, n: int) -> np.ndarray[Any, np.dtype[np.uint64]]:
        drawn: np.ndarray[Any, np.dtype[np.uint64]] = self._give("uint64", n).copy()
        return drawn

    def normal_blocks(self, total: int, deviation: float, use: Use) -> None:
        use(0, self._give("normals", total, deviation).copy())

    def _give(self, *request: Any) -> np.ndarray[Any, Any]:
        if not self._replays:
            self._log.append((request, self._drawn(*request)))
        logged: tuple[Any, Any] = self._log[self._next] if self.left else (None, None)
        if logged[0] != request:
            raise DrawsDiffer(
                f"draw {self._next + 1} of the step on the neighbour is {request}, and was"
                f" {logged[0] or 'none'} on the dataset; expected the same random numbers, whatever the"
                " data are",
                hint="noise that is skipped, or drawn again, depending on records",
            )
        self._next += 1
        numbers: np.ndarray[Any, Any] = logged[1]
        return numbers

    def _drawn(self, kind: str, total: int, deviation: float = 1.0) -> np.ndarray[Any, Any]:
        if kind == "uint64":
            return self._generator.uint64(total)
        normals = np.empty(total)

        def store(start: int, block: np.ndarray[Any, Any]) -> None:
            normals[start : start + len(block)] = block

        self._generator.normal_blocks(total, deviation, store)
        return normals

    def _in_a_fork(self) -> None:
        pass  # the logged numbers are not secret, and are repeated on purpose


@dataclass(frozen=True)
class Replayed:
    """The results of a dataset and its neighbour with the same random numbers. NOT PRIVATE if the data are
    real.

    Attributes:
        pair: how the neighbour differs, in words.
        distance: between the two clipped sums, before noise; in L2. Infinite or NaN if a sum is not
            finite.
        sensitivity: the largest allowed distance.
        over: by how much the distance in a clipping group exceeds the allowed one, in the worst group; below
            0 if none does.
        group_ratio: the distance in a clipping group over the allowed one, in the worst group.
        differing: the published values besides the noisy sums that differ.
        finite: whether all released numbers are.
    """

    pair: str
    distance: float
    sensitivity: float
    over: float
    differing: tuple[str, ...]
    finite: bool
    group_ratio: float = 0.0

    @property
    def ratio(self) -> float:
        """The measured sensitivity over the declared one, of the sums or of a clipping group, whichever is
        more.
        """
        ratios = [self.distance / self.sensitivity, self.group_ratio]
        return math.nan if any(map(math.isnan, ratios)) else max(ratios)

    @property
    def holds(self) -> bool:
        """Whether the sensitivity is respected, without any tolerance, all published values are equal, and
        all released numbers are finite.
        """
        near = self.distance <= self.sensitivity and self.over <= 0  # false for NaN
        return near and self.finite and not self.differing


def compare_neighbours(
    source: GradientSource,
    neighbour: GradientSource,
    clipping: Clipping,
    noise: Noise,
    relation: Relation,
    generator: Generator,
    *,
    pair: str = "",
) -> Replayed:
    """Take a private step on a drawn batch, and again on the neighbour's, with the noise frozen.

    Args:
        source, neighbour: the two batches. Draws of common records are the same by the caller's choice of
            them.

    The names and shapes of the sums, the sensitivity, the noise's standard deviation and the number of random
    draws are compared, too. The other arguments are those of `private_sum`.
    """
    logged = LoggedGenerator(generator)
    replayed = logged.again()
    sources = StoringSource(source), StoringSource(neighbour)
    outcomes: list[NoisySum] = []
    differing: list[str] = []
    for stored, numbers in zip(sources, (logged, replayed), strict=True):
        try:
            noisy = private_sum(stored, clipping, noise, relation, numbers)
        except DrawsDiffer:
            differing.append("the random draws")
            break
        outcomes.append(noisy)
    seen = [stored.last for stored in sources]
    if len(outcomes) == 2:
        if replayed.left:
            differing.append("the random draws")
        differing += _differing(*map(_published, outcomes))
    groups = [_in_group(group, seen, relation) for group in clipping.groups]
    return Replayed(
        pair,
        _distance(seen[0].sums, seen[1].sums),
        clipping.sensitivity(relation),
        max(apart - allowed for apart, allowed in groups),
        tuple(differing),
        all(bool(torch.isfinite(value).all()) for outcome in outcomes for value in outcome.sums.values()),
        max(apart / allowed for apart, allowed in groups),
    )


def _published(outcome: NoisySum) -> dict[str, Any]:
    tensors = {name: (tuple(value.shape), str(value.dtype)) for name, value in outcome.sums.items()}
    return {
        "the released tensors": tensors,
        "the sensitivity": outcome.sensitivity,
        "the noise's std": outcome.noise_std,
    }


def _differing(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[str]:
    return [
        name
        for name in {**first, **second}
        if name not in first or name not in second or first[name] != second[name]
    ]


def _distance(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> float:
    """The L2 distance of two sums."""
    apart = [(value - second[name]).double() for name, value in first.items()]
    return math.sqrt(math.fsum(float(torch.linalg.vector_norm(each)) ** 2 for each in apart))


def _in_group(group: Group, seen: Sequence[ClippedSum], relation: Relation) -> tuple[float, float]:
    """(the distance of two sums in a group, infinite if it is not a number; the allowed one)."""
    first, second = ({name: clipped.sums[name] for name in group.parameters} for clipped in seen)
    apart = _distance(first, second)
    return apart if math.isfinite(apart) else math.inf, group.bound * (2 if relation == "replace_one" else 1)
