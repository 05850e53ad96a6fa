"""How far the mean gradient moves when a sample is left out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from psgrad.engine.gradients import PerSampleGradients
from psgrad.engine.gradients.terms import CANCELLATION
from psgrad.engine.measures.finite import finite_rows, nan_elsewhere
from psgrad.engine.measures.measure import Arrays, Measure, Setting
from psgrad.engine.measures.sums import shared_sums


@dataclass
class LooMeanChange(Measure):
    """The distance between the mean gradient of all samples and that of all but this one, exact for every n."""

    name: ClassVar[str] = "loo_mean_change"
    title: ClassVar[str] = "Leave-one-out change of the mean gradient"
    formula: ClassVar[str] = "|gbar - gbar without i| = |g_i - gbar| / (n - 1)"
    unit: ClassVar[str] = "{loss} per unit of parameter"
    source: ClassVar[str] = "the jackknife of a mean: Efron, Tibshirani: An Introduction to the Bootstrap (1993), section 11.5"
    cost: ClassVar[str] = "as cosine_to_mean, whose sum and inner products it shares"
    meanings: ClassVar[dict[str, str]] = {
        "loo_mean_change": "how far the mean gradient moves without this sample; empty if it is the only one ({loss} per unit of parameter)"
    }
    needs_factors = True
    looks_twice = True

    def prepare(self, setting: Setting) -> None:
        self._sums = shared_sums(setting, self)

    def columns(self, gradients: PerSampleGradients) -> Arrays:
        self._sums.add(gradients)
        return {}

    def keep(self) -> None:
        self._sums.keep()

    def columns_again(self, gradients: PerSampleGradients) -> Arrays:
        others = self._sums.count - 1
        finite = finite_rows(gradients)
        if others < 1:
            return {"loo_mean_change": torch.full_like(gradients.square_norms(), torch.nan)}
        parts = gradients.square_norms() + self._sums.square_mean()
        distances = parts - 2 * self._sums.dot(gradients)
        close = torch.nonzero(finite & (distances < CANCELLATION * parts)).squeeze(1)  # float32 has lost digits there
        if len(close):
            distances[close] = self._sums.square_distances(gradients, close)
        return {"loo_mean_change": nan_elsewhere(distances.clamp(min=0).sqrt() / others, finite)}

    def state(self) -> Arrays:
        return self._sums.state(self)

    def restore(self, state: Arrays) -> None:
        self._sums.restore(self, state)
