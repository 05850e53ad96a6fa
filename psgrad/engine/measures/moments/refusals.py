"""Why a measure over checkpoints can't be had."""

from __future__ import annotations

from psgrad.engine.measures.measure import Measure, Setting
from psgrad.errors import MeasureError


def require_moments(measure: Measure, setting: Setting, least: int, why: str) -> None:
    """Raises MeasureError where there are fewer than `least` checkpoints; `why` says what is wrong with fewer."""
    count = len(setting.moments)
    if count < least:
        raise MeasureError(
            f"the measure {measure.name} looks at several checkpoints, and analyze.checkpoints lists {count or 'none'}",
            expected=f"at least {least}: {why}",
            cause="model.checkpoint is the one model that everything else is measured at; it is not counted" if count < 2 else None,
            next_step=f"list a training run's files, in order, in analyze.checkpoints; or take {measure.name} out of analyze.measures",
        )


def require_labels(measure: Measure, setting: Setting) -> None:
    """Raises MeasureError where a prediction can't be right or wrong: the loss has no labels."""
    if setting.kind in ("class", "token", "binary"):
        targets = setting.targets
        if targets is None:  # they come with the rows: the first one shows what they are
            targets = setting.examples.stream.read(0, 1).target
        if setting.kind == "binary" or targets is None or not targets.is_floating_point():
            return
    words = {"value": "a value to come near to", "custom": "a form of its own"}
    raise MeasureError(
        f"the measure {measure.name} asks whether a prediction is right, and this loss has {words.get(setting.kind, 'soft labels')}",
        expected="a loss over labels: cross_entropy, nll or token_cross_entropy with whole numbers, or bce_with_logits",
        next_step=f"take {measure.name} out of analyze.measures; trajectory follows the loss itself, whatever it is",
    )
