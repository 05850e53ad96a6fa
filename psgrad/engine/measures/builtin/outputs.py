"""Measures of the model's output for classes: self-confidence, logit margin, and EL2N."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from psgrad.engine.gradients import PerSampleGradients
from psgrad.engine.measures.measure import Arrays, Measure, Setting, finite_rows, require_classes
from psgrad.engine.measures.output_values import ClassOutputs, kept_outputs


class OutputMeasure(Measure):
    """A measure of the output for the classes of a sample, which needs no gradient."""

    cost: ClassVar[str] = "nothing beyond the pass: it uses the outputs"

    def prepare(self, setting: Setting) -> None:
        require_classes(self, setting)

    def summary(self, output: Any, target: Any) -> Arrays:
        return kept_outputs(output, target)


@dataclass
class Confidence(OutputMeasure):
    """The predicted probability of the label; `confidence`, which every table of classes has, is that of the
    prediction.
    """

    name: ClassVar[str] = "confidence"
    title: ClassVar[str] = "Self-confidence"
    formula: ClassVar[str] = "softmax(z)_y"
    unit: ClassVar[str] = "probability, 0 to 1"
    source: ClassVar[str] = (
        "Northcutt, Jiang, Chuang: Confident Learning (2021), section 3; cleanlab's self-confidence"
    )
    meanings: ClassVar[dict[str, str]] = {
        "self_confidence": "predicted probability of the sample's own label (probability, 0 to 1)"
    }

    def columns(self, gradients: PerSampleGradients) -> Arrays:
        outputs = ClassOutputs.of(gradients)
        confidence = outputs.of_label(outputs.probabilities)
        return {"self_confidence": outputs.where_known(confidence, finite_rows(gradients))}


@dataclass
class Margin(OutputMeasure):
    """The label's logit minus the largest of the others. Below zero the prediction is wrong."""

    name: ClassVar[str] = "margin"
    title: ClassVar[str] = "Logit margin"
    formula: ClassVar[str] = "z_y - max over c other than y of z_c"
    unit: ClassVar[str] = "nats (a difference of logits)"
    source: ClassVar[str] = (
        "Pleiss, Zhang, Elenberg, Weinberger: Identifying Mislabeled Data using the Area Under the Margin"
        " Ranking (2020), eq. 1"
    )
    meanings: ClassVar[dict[str, str]] = {
        "margin": (
            "how far the label's logit is above the largest other one; below zero is a wrong prediction"
            " (nats)"
        )
    }

    def columns(self, gradients: PerSampleGradients) -> Arrays:
        outputs = ClassOutputs.of(gradients)
        logits = outputs.logits
        margin = outputs.of_label(logits) - outputs.without_label(logits, -torch.inf).amax(1)
        return {"margin": outputs.where_known(margin, finite_rows(gradients))}


@dataclass
class EL2N(OutputMeasure):
    """Error L2-norm at this checkpoint."""

    name: ClassVar[str] = "el2n"
    title: ClassVar[str] = "Error L2-norm"
    formula: ClassVar[str] = "|softmax(z) - onehot(y)|_2"
    unit: ClassVar[str] = "probability, 0 to sqrt(2)"
    source: ClassVar[str] = "Paul, Ganguli, Dziugaite: Deep Learning on a Data Diet (2021), definition 2.2"
    meanings: ClassVar[dict[str, str]] = {
        "el2n": "distance of the predicted probabilities from the label's (probability, 0 to sqrt(2))"
    }

    def columns(self, gradients: PerSampleGradients) -> Arrays:
        outputs = ClassOutputs.of(gradients)
        probabilities = outputs.probabilities
        missing = 1 - outputs.of_label(probabilities)
        distance = (outputs.without_label(probabilities, 0).square().sum(1) + missing.square()).sqrt()
        return {"el2n": outputs.where_known(distance, finite_rows(gradients))}
