"""The logit margin: by how much the label's logit leads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from psgrad.engine.gradients import PerSampleGradients
from psgrad.engine.measures.class_outputs import ClassOutputs, kept_outputs
from psgrad.engine.measures.finite import finite_rows
from psgrad.engine.measures.measure import Arrays, Measure, Setting
from psgrad.engine.measures.refusals import require_classes


@dataclass
class Margin(Measure):
    """The label's logit minus the largest of the others. Below zero the prediction is wrong."""

    name: ClassVar[str] = "margin"
    title: ClassVar[str] = "Logit margin"
    formula: ClassVar[str] = "z_y - max over c other than y of z_c"
    unit: ClassVar[str] = "nats (a difference of logits)"
    source: ClassVar[str] = (
        "Pleiss, Zhang, Elenberg, Weinberger: Identifying Mislabeled Data using the Area Under the Margin Ranking (2020), eq. 1"
    )
    cost: ClassVar[str] = "nothing beyond the pass: it uses the outputs"
    meanings: ClassVar[dict[str, str]] = {
        "margin": "how far the label's logit is above the largest other one; below zero is a wrong prediction (nats)"
    }

    def prepare(self, setting: Setting) -> None:
        require_classes(self, setting)

    def summary(self, output: Any, target: Any) -> Arrays:
        return kept_outputs(output, target)

    def columns(self, gradients: PerSampleGradients) -> Arrays:
        outputs = ClassOutputs.of(gradients)
        logits = outputs.logits
        margin = outputs.of_label(logits) - outputs.without_label(logits, -torch.inf).amax(1)
        return {"margin": outputs.where_known(margin, finite_rows(gradients))}
