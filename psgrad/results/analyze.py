"""What `psgrad analyze` yields, and what its tables say: one meaning per column."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from psgrad.results.findings import CheckResult
from psgrad.results.measures import MeasureResult

SAMPLE_COLUMNS = (
    "id",
    "index",
    "fingerprint",
    "target",
    "prediction",
    "confidence",
    "loss",
    "grad_norm",
    "log_norm",
    "rank",
    "percentile",
    "is_outlier_issue",
    "reasons",
    "status",
)

PARAMETER_COLUMNS = (
    "parameter",
    "module",
    "shape",
    "numel",
    "mean_norm",
    "std_norm",
    "min_norm",
    "q05",
    "median",
    "q95",
    "max_norm",
    "share",
    "computed_as",
)


@dataclass(frozen=True)
class TopSample:
    """The input of one of the top samples, as far as a person can look at it.

    `image` has shape [H, W] or [C, H, W] and any value range.
    """

    id: str | int
    image: np.ndarray[Any, Any] | None = None
    text: str | None = None


@dataclass(frozen=True)
class AnalyzeResult:
    """What `psgrad analyze` found.

    `samples` has one row per sample in dataset order with SAMPLE_COLUMNS: `grad_norm` is the L2 norm of the gradient of that sample's
    loss in all trainable parameters, `log_norm` its base-10 logarithm. `parameters` has one row per parameter with PARAMETER_COLUMNS:
    the distribution of the per-sample norm of that parameter's gradient, and its `share` of the mean squared norm.
    `top_inputs` are the inputs of the first ranks, largest norm first; empty where the config leaves inputs out. `measures` are those that
    were asked for, by name. `check` is the gate's verdict, with all findings.

    `manifest` is what manifest.json holds. The reports read these keys, and do without the ones that are missing:
    `config` (the resolved config), `versions` {name: version}, `model` {factory, parameters, trainable, checkpoint, sha256, notes,
    modules_imported}, `data` {source, fingerprint}, `engine` {device, dtype, chunk_size}, `self_check` {samples,
    worst_relative_error}, `timings` {phase: seconds}.
    """

    samples: pd.DataFrame
    parameters: pd.DataFrame
    manifest: dict[str, Any]
    folder: Path
    top_inputs: list[TopSample] = field(default_factory=list)
    class_names: list[str] | None = None
    measures: Mapping[str, MeasureResult] = field(default_factory=dict)
    check: CheckResult | None = None


def rank_samples(frame: pd.DataFrame, review_fraction: float) -> pd.DataFrame:
    """Add what the norms say about each other: rank, percentile, log_norm, is_outlier_issue, reasons and status.

    Rows whose loss or norm is not finite are unranked and always in the review list. The rest of the list are the
    ceil(review_fraction * finite rows) largest norms, so it is never empty on a healthy model: a list to look at, not a verdict.
    Samples with a gradient of exactly zero are named, but never reviewed for it. Ties are ranked in dataset order; `percentile` is the
    percentage of finite rows whose norm is not larger. Columns come back in the order of SAMPLE_COLUMNS, unknown ones last.
    """
    norm = frame["grad_norm"].astype("float64")
    finite = np.isfinite(norm) & np.isfinite(frame["loss"].astype("float64"))
    if "status" in frame:
        finite &= frame["status"] == "ok"
    ranked = norm.where(finite)
    rank = ranked.rank(ascending=False, method="first")
    in_review = (rank <= math.ceil(review_fraction * int(finite.sum()))) & (norm > 0)
    reasons = np.select(
        [~finite, in_review, norm == 0],
        ["loss or gradient is not finite", f"among the largest {review_fraction:.3g} of gradient norms", "gradient is exactly zero"],
        default="",
    )
    with np.errstate(divide="ignore"):
        log_norm = np.log10(ranked)
    result = frame.assign(
        log_norm=log_norm,
        rank=rank.astype("Int64"),
        percentile=100 * ranked.rank(method="max", pct=True),
        is_outlier_issue=in_review | ~finite,
        reasons=reasons,
        status=np.where(finite, "ok", "nonfinite"),
    )
    known = [column for column in SAMPLE_COLUMNS if column in result]
    return result[known + [column for column in result if column not in SAMPLE_COLUMNS]]


def top_samples(frame: pd.DataFrame, n: int) -> pd.DataFrame:
    """The n rows of a ranked frame with the largest norms, largest first; unranked rows never appear."""
    return frame[frame["rank"] <= n].sort_values("rank")


def has_classes(frame: pd.DataFrame) -> bool:
    """Whether the targets are classes: a confidence goes with them, and they are integers or text."""
    if "confidence" not in frame or "target" not in frame or not frame["target"].notna().any():
        return False
    return not pd.api.types.is_float_dtype(frame["target"]) and all(np.ndim(target) == 0 for target in frame["target"].head(100))


def disagrees(frame: pd.DataFrame) -> pd.Series[bool]:
    """For each row whether the predicted class is another than the label; False where either is missing, or where there are no classes."""
    differs = pd.Series(False, index=frame.index)
    if has_classes(frame) and "prediction" in frame:
        both = frame.loc[frame["target"].notna() & frame["prediction"].notna(), ["target", "prediction"]].astype(object)
        differs[both.index] = both["target"] != both["prediction"]
    return differs
