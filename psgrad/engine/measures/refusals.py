"""Why a measure can't be had."""

from __future__ import annotations

import torch

from psgrad.engine.measures.measure import Measure, Setting
from psgrad.errors import MeasureError


def require_classes(measure: Measure, setting: Setting) -> None:
    """Raises MeasureError where samples have no classes, or each has a share in several."""
    if setting.kind != "class" or setting.classes is None:
        raise MeasureError(
            f"the measure {measure.name} looks at the class of each sample, and this loss has {_what(setting)}",
            expected="a loss over classes (cross_entropy, nll) whose output is one vector of classes a sample",
            next_step=f"take {measure.name} out of analyze.measures",
        )
    if setting.targets is None and not _is_whole(setting.examples.read(0, 1).target):
        raise MeasureError(
            f"the measure {measure.name} looks at the class of each sample, and the targets are probabilities of classes",
            expected="targets that are whole numbers, one class a sample",
            next_step=f"take {measure.name} out of analyze.measures, or give the likeliest class as the target",
        )


def _is_whole(target: torch.Tensor | None) -> bool:
    return target is not None and target.dim() == 1 and not target.is_floating_point()


def _what(setting: Setting) -> str:
    return {
        "token": "a class for each position",
        "binary": "one probability",
        "value": "a value",
        "class": "outputs with positions",
    }.get(setting.kind, "a form of its own")
