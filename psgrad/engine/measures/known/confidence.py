"""Self-confidence: the probability that the model gives to the label."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from psgrad.engine.gradients import PerSampleGradients
from psgrad.engine.measures.class_outputs import ClassOutputs, kept_outputs
from psgrad.engine.measures.finite import finite_rows
from psgrad.engine.measures.measure import Arrays, Measure, Setting
from psgrad.engine.measures.refusals import require_classes


@dataclass
class Confidence(Measure):
    """The predicted probability of the label; `confidence`, which every table of classes has, is that of the prediction."""

    name: ClassVar[str] = "confidence"
    title: ClassVar[str] = "Self-confidence"
    formula: ClassVar[str] = "softmax(z)_y"
    unit: ClassVar[str] = "probability, 0 to 1"
    source: ClassVar[str] = "Northcutt, Jiang, Chuang: Confident Learning (2021), section 3; cleanlab's self-confidence"
    cost: ClassVar[str] = "nothing beyond the pass: it uses the outputs"
    meanings: ClassVar[dict[str, str]] = {"self_confidence": "predicted probability of the sample's own label (probability, 0 to 1)"}

    def prepare(self, setting: Setting) -> None:
        require_classes(self, setting)

    def summary(self, output: Any, target: Any) -> Arrays:
        return kept_outputs(output, target)

    def columns(self, gradients: PerSampleGradients) -> Arrays:
        outputs = ClassOutputs.of(gradients)
        confidence = outputs.of_label(outputs.probabilities)
        return {"self_confidence": outputs.where_known(confidence, finite_rows(gradients))}
