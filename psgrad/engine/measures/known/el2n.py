"""EL2N: how far the predicted probabilities are from the label."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F

from psgrad.engine.gradients import PerSampleGradients
from psgrad.engine.gradients.terms import accumulating
from psgrad.engine.measures.finite import finite_rows, nan_elsewhere
from psgrad.engine.measures.measure import Arrays, Measure, Setting
from psgrad.engine.measures.predictions import class_in
from psgrad.engine.measures.refusals import require_classes


@dataclass
class EL2N(Measure):
    """Error L2-norm at this checkpoint."""

    name: ClassVar[str] = "el2n"
    title: ClassVar[str] = "Error L2-norm"
    formula: ClassVar[str] = "|softmax(z) - onehot(y)|_2"
    unit: ClassVar[str] = "probability, 0 to sqrt(2)"
    source: ClassVar[str] = "Paul, Ganguli, Dziugaite: Deep Learning on a Data Diet (2021), definition 2.2"
    cost: ClassVar[str] = "nothing beside the pass: it reads the outputs"
    meanings: ClassVar[dict[str, str]] = {"el2n": "distance of the predicted probabilities from the label's (probability, 0 to sqrt(2))"}

    def prepare(self, setting: Setting) -> None:
        require_classes(self, setting)

    def summary(self, output: Any, target: Any) -> Arrays:
        probabilities = torch.softmax(accumulating(output.detach()), -1)
        label, is_class = class_in(output, target)
        distance = torch.linalg.vector_norm(probabilities - F.one_hot(label, output.shape[-1]).to(probabilities.dtype))
        return {"el2n": distance.where(is_class, torch.nan)}

    def columns(self, gradients: PerSampleGradients) -> Arrays:
        return {"el2n": nan_elsewhere(gradients.aux["el2n"], finite_rows(gradients))}
