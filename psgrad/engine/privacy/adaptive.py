"""A clipping bound that follows a quantile of the norms, privately (Andrew, Thakkar, McMahan and Ramaswamy, "Differentially Private
Learning with Adaptive Clipping", arXiv 1905.03871)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from psgrad.engine.privacy.generators import Generator
from psgrad.engine.privacy.relation import Relation
from psgrad.engine.privacy.rounding import noisy
from psgrad.errors import ConfigError

# Where the bound stays, however long the norms do: clipping takes no other.
_SMALLEST, _LARGEST = 1e-20, 1e20
# The largest move of one step, as a logarithm: beyond any bound, and still a number.
_FARTHEST = 200.0


@dataclass(frozen=True)
class AdaptiveBound:
    """A bound, and how it moves from step to step. What it is made of is noised, so the bound is public.

    Attributes:
        bound: the bound of the step to come, in units of the norm.
        quantile: the share of records whose norm is to be below it.
        learning_rate: the bound is multiplied by exp(-learning_rate * (share below - quantile)).
        count_multiplier: the standard deviation of the count's noise, in records; sigma_b in the paper. The count moves by 1/2 where a
            record comes or goes, so as a multiple of its sensitivity the noise is twice this number.

    Raises ConfigError for numbers outside of their range.
    """

    bound: float
    quantile: float = 0.5
    learning_rate: float = 0.2
    count_multiplier: float = 10.0

    def __post_init__(self) -> None:
        if not _SMALLEST <= self.bound <= _LARGEST:
            raise ConfigError(
                f"the clipping bound to start from is {self.bound!r}", expected=f"a number from {_SMALLEST:g} to {_LARGEST:g}"
            )
        if not 0 <= self.quantile <= 1:
            raise ConfigError(f"the quantile of the adaptive bound is {self.quantile!r}", expected="a number from 0 to 1")
        for name, value in (("learning rate", self.learning_rate), ("count_noise_multiplier", self.count_multiplier)):
            if not 0 < value < math.inf:
                raise ConfigError(f"the {name} of the adaptive bound is {value!r}", expected="a positive number")

    @staticmethod
    def count(below: torch.Tensor) -> float:
        """The sum over the drawn records that have a gradient of 1[norm <= bound] - 1/2, which is what gets noise. Not private.

        below: [n] bool, `RecordColumns.counted`. A record whose norm is not finite is above any bound: it counts -1/2, and moves the
        count no further than others.
        """
        return float(torch.count_nonzero(below)) - below.numel() / 2

    def sensitivity(self, relation: Relation) -> float:
        """How far `count` may move between neighbouring datasets: recentred, a record is worth 1/2 either way, and one without a gradient
        nothing; another one's place is worth 1."""
        return 1.0 if relation == "replace_one" else 0.5

    def standard_deviation(self, relation: Relation) -> float:
        """The standard deviation of the count's noise: 2 * count_multiplier * sensitivity, so that its cost is that of the paper's
        formula, (z^-2 - (2 count_multiplier)^-2)^(-1/2), under either relation.
        """
        return 2 * self.count_multiplier * self.sensitivity(relation)

    def updated(self, noisy_count: float, expected_batch_size: float) -> AdaptiveBound:
        """The bound for the next step, from the noised count and the public batch size that it is divided by."""
        share = noisy_count / expected_batch_size + 0.5
        factor = math.exp(min(max(-self.learning_rate * (share - self.quantile), -_FARTHEST), _FARTHEST))
        return replace(self, bound=min(max(self.bound * factor, _SMALLEST), _LARGEST))

    def next(self, below: torch.Tensor, expected_batch_size: float, relation: Relation, generator: Generator) -> AdaptiveBound:
        """The bound for the next step, from which of the drawn records with a gradient had a norm below this one: [n] bool, n = 0 even.

        The noisy count is rounded to a public grid, as the sums are.
        """
        count = torch.tensor([self.count(below)], dtype=torch.float64)
        return self.updated(float(noisy(count, self.standard_deviation(relation), generator)), expected_batch_size)
