"""Self-confidence: the probability that the model gives to the label."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from psgrad.engine.gradients import PerSampleGradients
from psgrad.engine.gradients.terms import accumulating
from psgrad.engine.measures.finite import finite_rows, nan_elsewhere
from psgrad.engine.measures.measure import Arrays, Measure, Setting
from psgrad.engine.measures.predictions import class_in
from psgrad.engine.measures.refusals import require_classes


@dataclass
class Confidence(Measure):
    """The predicted probability of the label; `confidence`, which every table of classes has, is that of the prediction."""

    name: ClassVar[str] = "confidence"
    title: ClassVar[str] = "Self-confidence"
    formula: ClassVar[str] = "softmax(z)_y"
    unit: ClassVar[str] = "probability, 0 to 1"
    source: ClassVar[str] = "Northcutt, Jiang, Chuang: Confident Learning (2021), section 3; cleanlab's self-confidence"
    cost: ClassVar[str] = "nothing beside the pass: it reads the outputs"
    meanings: ClassVar[dict[str, str]] = {"self_confidence": "predicted probability of the sample's own label (probability, 0 to 1)"}

    def prepare(self, setting: Setting) -> None:
        require_classes(self, setting)

    def summary(self, output: Any, target: Any) -> Arrays:
        probabilities = torch.softmax(accumulating(output.detach()), -1)
        label, is_class = class_in(output, target)
        own = torch.arange(probabilities.shape[-1], device=probabilities.device) == label
        return {"self_confidence": probabilities.masked_fill(~own, 0).sum(-1).where(is_class, torch.nan)}

    def columns(self, gradients: PerSampleGradients) -> Arrays:
        return {"self_confidence": nan_elsewhere(gradients.aux["self_confidence"], finite_rows(gradients))}
