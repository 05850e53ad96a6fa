"""The angle between a sample's gradient and the mean gradient of its class."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from psgrad.engine.gradients import PerSampleGradients
from psgrad.engine.measures.finite import finite_rows, nan_elsewhere
from psgrad.engine.measures.measure import Arrays, Gathered, Measure, Setting
from psgrad.engine.measures.sums import shared_sums


@dataclass
class CosineToClassMean(Measure):
    """Whether a sample's gradient points like those of its label. The mean includes the sample: alone in its class it has cosine 1."""

    name: ClassVar[str] = "cosine_to_class_mean"
    title: ClassVar[str] = "Cosine to the class's mean gradient"
    formula: ClassVar[str] = "<g_i, gbar_c> / (|g_i| |gbar_c|), gbar_c the mean of g_j over the samples j with label c = y_i"
    unit: ClassVar[str] = "cosine, -1 to 1"
    source: ClassVar[str] = "Fort, Nowak, Jastrzebski, Narayanan: Stiffness (2019), section 2.2, of one sample with the mean of its class"
    cost: ClassVar[str] = "as cosine_to_mean, whose sums it shares; 16 bytes of memory for each class and parameter"
    meanings: ClassVar[dict[str, str]] = {
        "cosine_to_class_mean": "cosine between the gradient and its label's mean gradient; empty if either is zero (-1 to 1)"
    }
    needs_factors = True
    looks_twice = True

    def prepare(self, setting: Setting) -> None:
        self._sums = shared_sums(setting, self, by_class=True)

    def summary(self, output: Any, target: Any) -> Arrays:
        return self._sums.summary(target)

    def columns(self, gradients: PerSampleGradients) -> Arrays:
        self._sums.add(gradients)
        return {}

    def keep(self) -> None:
        self._sums.keep()

    def columns_again(self, gradients: PerSampleGradients) -> Arrays:
        of_class = self._sums.class_norms().to(gradients.losses.device)[self._sums.classes_of(gradients)]
        norms = gradients.square_norms().sqrt() * of_class
        cosines = (self._sums.class_dot(gradients) / norms).clamp(-1, 1)
        return {"cosine_to_class_mean": nan_elsewhere(cosines, finite_rows(gradients) & (norms > 0))}

    def gather(self, rows: Mapping[str, torch.Tensor]) -> Gathered:
        counts, norms = self._sums.counts[:-1], self._sums.class_norms()[:-1]
        return Gathered(tables={"classes": {"class": torch.arange(len(counts)), "samples": counts, "mean_gradient_norm": norms}})

    def state(self) -> Arrays:
        return self._sums.state(self)

    def restore(self, state: Arrays) -> None:
        self._sums.restore(self, state)
