"""What `psgrad analyze` yields, and what its tables say: one meaning per column."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from psgrad.results.findings import CheckResult
from psgrad.results.measures import MeasureResult
from psgrad.results.short_repr import ShortRepr

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
    "robust_z",
    "p_value",
    "q_value",
    "outlier_score",
    "is_outlier_issue",
    "reasons",
    "status",
    "group",
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


@dataclass(frozen=True, repr=False)
class TopSample(ShortRepr):
    """The input of one of the top samples, as far as a person can look at it.

    `image` has shape [H, W] or [C, H, W] and any value range. `values` are those of a row of a table, (column, value).
    """

    id: str | int
    image: np.ndarray[Any, Any] | None = None
    text: str | None = None
    values: tuple[tuple[str, float | int | str | None], ...] = ()


@dataclass(frozen=True, repr=False)
class AnalyzeResult(ShortRepr):
    """What `psgrad analyze` found.

    `samples` has one row per sample in dataset order with SAMPLE_COLUMNS: `grad_norm` is the L2 norm of the gradient of that sample's
    loss in all trainable parameters, `log_norm` its base-10 logarithm. `parameters` has one row per parameter with PARAMETER_COLUMNS:
    the distribution of the per-sample norm of that parameter's gradient, and its `share` of the mean squared norm.
    `top_inputs` are the inputs of the first ranks, largest norm first; empty where the config leaves inputs out. `measures` are those that
    were asked for, by name. `check` is the gate's verdict, with all findings. `vocabulary` has the text of each id in maps of attribution,
    where the dataset knows it.

    `manifest` is what manifest.json holds. The reports read these keys, and do without the ones that are missing:
    `config` (the resolved config), `versions` {name: version}, `model` {factory, parameters, trainable, checkpoint, sha256, notes,
    modules_imported}, `data` {source, fingerprint}, `engine` {device, dtype, chunk_size}, `self_check` {samples,
    worst_relative_error}, `timings` {phase: seconds}, `created`, `command_line`, `revision`.
    """

    samples: pd.DataFrame
    parameters: pd.DataFrame
    manifest: dict[str, Any]
    folder: Path
    top_inputs: list[TopSample] = field(default_factory=list)
    class_names: list[str] | None = None
    measures: Mapping[str, MeasureResult] = field(default_factory=dict)
    check: CheckResult | None = None
    vocabulary: Mapping[int, str] = field(default_factory=dict)


def top_samples(frame: pd.DataFrame, n: int) -> pd.DataFrame:
    """The n rows of a ranked frame that are to be looked at first, in this order; unranked rows never appear."""
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
