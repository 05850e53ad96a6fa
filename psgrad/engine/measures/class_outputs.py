"""The outputs of a chunk for measures of classes: kept once a sample, whoever asks, and looked at for all samples together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from psgrad.engine.gradients import PerSampleGradients
from psgrad.engine.gradients.terms import accumulating
from psgrad.engine.measures.measure import Arrays
from psgrad.engine.measures.predictions import class_in

_OUTPUT, _TARGET = "class_outputs.output", "class_outputs.target"


def kept_outputs(output: Any, target: Any) -> Arrays:
    """What to keep of one sample: the very tensors, so that several measures may keep the same."""
    return {_OUTPUT: output, _TARGET: target}


@dataclass(frozen=True)
class ClassOutputs:
    """The outputs of n samples. logits: [n, C], at least float32. label: [n], 0 where there is no class. is_class: [n] bool."""

    logits: torch.Tensor
    label: torch.Tensor
    is_class: torch.Tensor

    @classmethod
    def of(cls, gradients: PerSampleGradients) -> ClassOutputs:
        """Those that `kept_outputs` kept."""
        logits = accumulating(gradients.aux[_OUTPUT])
        return cls(logits, *class_in(logits, gradients.aux[_TARGET]))

    @property
    def probabilities(self) -> torch.Tensor:
        """[n, C]"""
        return torch.softmax(self.logits, 1)

    def of_label(self, values: torch.Tensor) -> torch.Tensor:
        """[n]: of values [n, C] that of the label."""
        return values.gather(1, self.label.unsqueeze(1)).squeeze(1)

    def without_label(self, values: torch.Tensor, instead: float) -> torch.Tensor:
        """[n, C]: the values with `instead` in the label's place."""
        return values.scatter(1, self.label.unsqueeze(1), instead)

    def where_known(self, column: torch.Tensor, finite: torch.Tensor) -> torch.Tensor:
        """[n]: the column, NaN where a sample has no class or is not `finite` [n]."""
        return column.where(self.is_class & finite, torch.nan)
