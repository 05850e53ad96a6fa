"""EL2N: how far the predicted probabilities are from the label."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from psgrad.engine.gradients import PerSampleGradients
from psgrad.engine.measures.class_outputs import ClassOutputs, kept_outputs
from psgrad.engine.measures.finite import finite_rows
from psgrad.engine.measures.measure import Arrays, Measure, Setting
from psgrad.engine.measures.refusals import require_classes


@dataclass
class EL2N(Measure):
    """Error L2-norm at this checkpoint."""

    name: ClassVar[str] = "el2n"
    title: ClassVar[str] = "Error L2-norm"
    formula: ClassVar[str] = "|softmax(z) - onehot(y)|_2"
    unit: ClassVar[str] = "probability, 0 to sqrt(2)"
    source: ClassVar[str] = "Paul, Ganguli, Dziugaite: Deep Learning on a Data Diet (2021), definition 2.2"
    cost: ClassVar[str] = "nothing beyond the pass: it uses the outputs"
    meanings: ClassVar[dict[str, str]] = {"el2n": "distance of the predicted probabilities from the label's (probability, 0 to sqrt(2))"}

    def prepare(self, setting: Setting) -> None:
        require_classes(self, setting)

    def summary(self, output: Any, target: Any) -> Arrays:
        return kept_outputs(output, target)

    def columns(self, gradients: PerSampleGradients) -> Arrays:
        outputs = ClassOutputs.of(gradients)
        probabilities = outputs.probabilities
        missing = 1 - outputs.of_label(probabilities)
        distance = (outputs.without_label(probabilities, 0).square().sum(1) + missing.square()).sqrt()
        return {"el2n": outputs.where_known(distance, finite_rows(gradients))}
