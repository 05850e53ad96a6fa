"""Why a measure can't be had."""

from __future__ import annotations

from psgrad.engine.measures.measure import Measure, Setting
from psgrad.errors import MeasureError


def require_classes(measure: Measure, setting: Setting) -> None:
    """Raises MeasureError where samples have no classes."""
    if setting.kind != "class" or setting.classes is None:
        raise MeasureError(
            f"the measure {measure.name} looks at the class of each sample, and this loss has {_what(setting)}",
            expected="a loss over classes (cross_entropy, nll) whose output is one vector of classes a sample",
            next_step=f"take {measure.name} out of analyze.measures",
        )


def _what(setting: Setting) -> str:
    return {
        "token": "a class for each position",
        "binary": "one probability",
        "value": "a value",
        "class": "outputs with positions",
    }.get(setting.kind, "a form of its own")
