"""The angle between a sample's gradient and the mean gradient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from psgrad.engine.gradients import PerSampleGradients
from psgrad.engine.measures.finite import finite_rows, nan_elsewhere
from psgrad.engine.measures.measure import Arrays, Measure, Setting
from psgrad.engine.measures.sums import shared_sums


@dataclass
class CosineToMean(Measure):
    """Whether a sample's gradient points like the mean of all samples. The mean includes the sample itself."""

    name: ClassVar[str] = "cosine_to_mean"
    title: ClassVar[str] = "Cosine to the mean gradient"
    formula: ClassVar[str] = "<g_i, gbar> / (|g_i| |gbar|), gbar = (1/n) sum_j g_j"
    unit: ClassVar[str] = "cosine, -1 to 1"
    source: ClassVar[str] = "Fort, Nowak, Jastrzebski, Narayanan: Stiffness (2019), section 2, of one sample with the mean of all"
    cost: ClassVar[str] = (
        "a sum and one inner product for each sample, a tenth of the pass each; a second pass, from memory if the gradients fit"
    )
    meanings: ClassVar[dict[str, str]] = {
        "cosine_to_mean": "cosine between the sample's gradient and the mean gradient; empty if either is zero (-1 to 1)"
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
        norms = gradients.square_norms().sqrt() * self._sums.square_mean() ** 0.5
        cosines = (self._sums.dot(gradients) / norms).clamp(-1, 1)  # nothing by nothing is NaN
        return {"cosine_to_mean": nan_elsewhere(cosines, finite_rows(gradients) & (norms > 0))}

    def state(self) -> Arrays:
        return self._sums.state(self)

    def restore(self, state: Arrays) -> None:
        self._sums.restore(self, state)
