"""One step on a dataset and on a neighbour with the same random numbers (the method of "Re:cord-play", arXiv
2602.17454, which found errors in a dozen libraries).

Any difference then comes from the data. The distance of the two sums before noise must be at most the
declared sensitivity, and nothing else that is published may differ.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from psgrad.engine.privacy.audit.canaries import StoringSource
from psgrad.engine.privacy.batches import GradientSource
from psgrad.engine.privacy.clipped_sums import ClippedSum
from psgrad.engine.privacy.clipping import Clipping, Group
from psgrad.engine.privacy.generators import Generator
from psgrad.engine.privacy.noise import Noise
from psgrad.engine.privacy.records import Relation
from psgrad.engine.privacy.step import NoisySum, private_sum


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
    *,
    pair: str = "",
) -> Replayed:
    """Take a private step on a drawn batch, and again on the neighbour's, with the same noise.

    Args:
        source, neighbour: the two batches. Draws of common records are the same by the caller's choice of
            them.

    The names and shapes of the sums, the sensitivity, the noise's standard deviation and the number of random
    draws are compared, too. The other arguments are those of `private_sum`.
    """
    key = os.urandom(32)
    sources = StoringSource(source), StoringSource(neighbour)
    outcomes: list[NoisySum] = []
    published: list[dict[str, Any]] = []
    for stored in sources:
        generator = Generator(key, "of an audit")
        outcome = private_sum(stored, clipping, noise, relation, generator)
        outcomes.append(outcome)
        published.append(
            {
                "the released tensors": {
                    name: (value.shape, value.dtype) for name, value in outcome.sums.items()
                },
                "the sensitivity": outcome.sensitivity,
                "the noise's std": outcome.noise_std,
                "the random draws": generator.drawn,
            }
        )
    seen = [stored.last for stored in sources]
    groups = [_in_group(group, seen, relation) for group in clipping.groups]
    return Replayed(
        pair,
        _distance(seen[0].sums, seen[1].sums),
        clipping.sensitivity(relation),
        max(apart - allowed for apart, allowed in groups),
        tuple(name for name, value in published[0].items() if value != published[1][name]),
        all(bool(torch.isfinite(value).all()) for outcome in outcomes for value in outcome.sums.values()),
        max(apart / allowed for apart, allowed in groups),
    )


def _distance(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> float:
    """The L2 distance of two sums."""
    apart = [(value - second[name]).double() for name, value in first.items()]
    return math.sqrt(math.fsum(float(torch.linalg.vector_norm(each)) ** 2 for each in apart))


def _in_group(group: Group, seen: Sequence[ClippedSum], relation: Relation) -> tuple[float, float]:
    """(the distance of two sums in a group, infinite if it is not a number; the allowed one)."""
    first, second = ({name: clipped.sums[name] for name in group.parameters} for clipped in seen)
    apart = _distance(first, second)
    return apart if math.isfinite(apart) else math.inf, group.bound * (2 if relation == "replace_one" else 1)
