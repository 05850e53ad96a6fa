"""The results of `psgrad review`: what a change of the training data does, and who is to blame."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from psgrad.run.results.analyze import TopSample
from psgrad.run.results.check import CheckResult, check_content
from psgrad.run.results.manifest import RunManifest
from psgrad.wording import ShortRepr

SUSPECT = 0.99
"""From this suspicion on an added row looks wrong by itself."""


@dataclass(frozen=True)
class GroupChange:
    """What the change does to the mean over some queries.

    level: 'overall', 'class' or 'group'; name: of the class or group. queries: how many. now: the mean of the
    loss; predicted, low, high: of its change; measured: by the training that went on, None where there was
    none. margin_...: the same of the margin, None without classes. accuracy_now, accuracy_then: the share of
    right predictions now, and as predicted.
    """

    level: str
    name: str
    queries: int
    now: float
    predicted: float
    low: float | None = None
    high: float | None = None
    measured: float | None = None
    margin_now: float | None = None
    margin_predicted: float | None = None
    margin_measured: float | None = None
    accuracy_now: float | None = None
    accuracy_then: float | None = None


@dataclass(frozen=True)
class Trust:
    """How far predictions can be trusted.

    scalar: 'margin' or 'loss', what is compared. exact: whether the model is affine in its parameters, so
    that the prediction is a minimisation. steps: Newton steps. tried: whether training went on with and
    without the change; why_not: else. epochs, seconds: of that training. agreement: the rank correlation over
    the queries of what was predicted and measured. slope: the measured change for each unit that was
    predicted; predictions are multiplied by it where they are no amounts by themselves (`scaled`). index: the
    folder of the index that the curvature was read from; None where it was computed.
    """

    scalar: str
    exact: bool
    steps: int
    tried: bool = False
    why_not: str = ""
    epochs: int | None = None
    seconds: float | None = None
    agreement: float | None = None
    slope: float | None = None
    scaled: bool = False
    index: str | None = None


@dataclass(frozen=True, repr=False)
class ReviewResult(ShortRepr):
    """What `psgrad review` found.

    queries: a row a query: id, loss, predicted_change, low, high; where training went on measured_change; for
    classes label, margin, predicted_change_margin and measured_change_margin. changes: a row a changed row:
    id, kind, what, before, after (rows of the two versions), predicted_effect (on the mean loss of the
    queries; on the mean margin, falls counted as positive, for classes), worst_query, suspect, reasons.
    counts: kind -> how many rows. inputs: row of `changes` -> the input before and after; None for no row.
    """

    queries: pd.DataFrame
    changes: pd.DataFrame
    totals: tuple[GroupChange, ...]
    trust: Trust
    check: CheckResult
    counts: Mapping[str, int]
    unit: str
    folder: Path
    manifest: RunManifest
    inputs: Mapping[int, tuple[TopSample | None, TopSample | None]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def review_content(result: ReviewResult) -> dict[str, Any]:
    """The content of review.json."""
    return {
        "version": 1,
        "counts": dict(result.counts),
        "totals": [dataclasses.asdict(each) for each in result.totals],
        "trust": dataclasses.asdict(result.trust),
        "verdict": check_content(result.check),
        "notes": list(result.notes),
    }
