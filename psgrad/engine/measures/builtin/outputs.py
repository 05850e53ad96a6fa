"""The model's outputs for classes: the predictions, one or two numbers for each sample; and the measures
self-confidence, logit margin and EL2N, which share the outputs of a chunk.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from psgrad.engine.gradients import PerSampleGradients, SquareNorms
from psgrad.engine.gradients.terms import accumulating
from psgrad.engine.measures.measure import Arrays, Measure, Setting, finite_rows, require_classes

Summary = Callable[[Any, Any], dict[str, torch.Tensor]]


class Predictions(Measure):
    """The columns of `summary_for` a kind of loss; half precision, which no table has, as float32."""

    def __init__(self, summary: Summary | None) -> None:
        self._summary = summary
        self._names: list[str] = []

    def summary(self, output: Any, target: Any) -> Arrays:
        values = {} if self._summary is None else self._summary(output, target)
        self._names = list(values)
        return values

    def columns(self, gradients: PerSampleGradients | SquareNorms) -> Arrays:
        return {name: accumulating(gradients.aux[name]) for name in self._names}


def summary_for(kind: str, ignore_index: int = -100) -> Summary | None:
    """The summary for a kind of loss; None if nothing is known about the output.

    'class': `prediction`, the most likely class, and `confidence`, its probability. 'token':
    `token_accuracy`, the share of positions that are predicted right. 'binary': `prediction`, the
    probability. 'value': `prediction`. All are for outputs of one number or one vector of classes; larger
    outputs have no single prediction.
    """
    return {
        "class": _class_summary,
        "token": lambda output, target: _token_summary(output, target, ignore_index),
        "binary": lambda output, target: _number(torch.sigmoid(output)),
        "value": lambda output, target: _number(output),
    }.get(kind)


def class_in(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(the class [] of one sample, whether it is one [] bool), from its output [..., C] and target []: class
    0 and False for a target outside of the classes.
    """
    is_class = (target >= 0) & (target < output.shape[-1])
    return target.where(is_class, 0), is_class


def _class_summary(output: torch.Tensor, target: torch.Tensor) -> dict[str, torch.Tensor]:
    if output.dim() != 1:
        return {}
    probabilities = torch.softmax(output.detach(), 0)
    return {"prediction": probabilities.argmax(), "confidence": probabilities.amax()}


def _token_summary(output: torch.Tensor, target: torch.Tensor, ignore_index: int) -> dict[str, torch.Tensor]:
    counted = target != ignore_index
    right = (output.detach().argmax(-1) == target) & counted
    return {"token_accuracy": right.sum() / counted.sum().clamp(min=1)}


def _number(output: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"prediction": output.detach().reshape(())} if output.numel() == 1 else {}


_OUTPUT, _TARGET = "class_outputs.output", "class_outputs.target"


def kept_outputs(output: Any, target: Any) -> Arrays:
    """The kept part of one sample: output [C] and target [], the same tensors for all measures that use
    them.
    """
    return {_OUTPUT: output, _TARGET: target}


@dataclass(frozen=True)
class ClassOutputs:
    """The outputs of n samples. logits: [n, C], at least float32. label: [n], 0 where there is no class.
    is_class: [n] bool.
    """

    logits: torch.Tensor
    label: torch.Tensor
    is_class: torch.Tensor

    @classmethod
    def of(cls, gradients: PerSampleGradients) -> ClassOutputs:
        """The outputs from `kept_outputs`."""
        logits = accumulating(gradients.aux[_OUTPUT])
        return cls(logits, *class_in(logits, gradients.aux[_TARGET]))

    @property
    def probabilities(self) -> torch.Tensor:
        """[n, C]"""
        return torch.softmax(self.logits, 1)

    def of_label(self, values: torch.Tensor) -> torch.Tensor:
        """[n]: the entry of the label of values [n, C]."""
        return values.gather(1, self.label.unsqueeze(1)).squeeze(1)

    def without_label(self, values: torch.Tensor, instead: float) -> torch.Tensor:
        """[n, C]: the values with `instead` in the label's place."""
        return values.scatter(1, self.label.unsqueeze(1), instead)

    def where_known(self, column: torch.Tensor, finite: torch.Tensor) -> torch.Tensor:
        """[n]: the column, NaN where a sample has no class or is not `finite` [n]."""
        return column.where(self.is_class & finite, torch.nan)


class OutputMeasure(Measure):
    """A measure of the output for the classes of a sample, which needs no gradient."""

    cost: ClassVar[str] = "nothing: it uses the outputs"

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
