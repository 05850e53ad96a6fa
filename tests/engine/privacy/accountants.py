"""What the tests of accounting share: steps in short, and closed forms from outside."""

from __future__ import annotations

import math
from typing import Any

from psgrad.engine.privacy.accounting import StepEvent
from psgrad.engine.privacy.sampling import Sampling


def poisson(multiplier: float, rate: float, relation: Any = "add_or_remove_one") -> StepEvent:
    return StepEvent(multiplier, Sampling("poisson", sample_rate=rate), relation)


def fixed(multiplier: float, relation: Any = "replace_one") -> StepEvent:
    return StepEvent(multiplier, Sampling("fixed", batch_size=32), relation)


def gaussian_delta(epsilon: float, distance: float) -> float:
    """delta of a Gaussian whose mean moves by `distance` standard deviations: Balle and Wang, arXiv
    1805.06530, theorem 8.
    """

    def below(x: float) -> float:
        return 0.5 * math.erfc(-x / math.sqrt(2))

    return below(distance / 2 - epsilon / distance) - math.exp(epsilon) * below(
        -distance / 2 - epsilon / distance
    )


def gaussian_epsilon(delta: float, distance: float) -> float:
    """The epsilon at which that is delta, by bisection."""
    low, high = 0.0, 1.0
    while gaussian_delta(high, distance) > delta:
        high *= 2
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if gaussian_delta(middle, distance) > delta else (low, middle)
    return high
