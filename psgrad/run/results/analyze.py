"""The results of `psgrad analyze`: tables, values that measures gather over a dataset, progress."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from psgrad.config.values import names_in_condition
from psgrad.errors import ConfigError
from psgrad.run.results.check import CheckResult
from psgrad.run.results.manifest import RunManifest
from psgrad.wording import ShortRepr, first_line


@dataclass(frozen=True, repr=False)
class MeasureResult(ShortRepr):
    """The result of one measure.

    Attributes:
        name, title, formula, unit: for headings; source: paper and page.
        meanings: column of the table of samples -> its description, with its unit.
        numbers: of the dataset, by name (plain JSON values).
        tables: by name.
        arrays: by name.
    """

    name: str
    title: str
    formula: str
    unit: str
    source: str = ""
    meanings: Mapping[str, str] = field(default_factory=dict)
    numbers: Mapping[str, Any] = field(default_factory=dict)
    tables: Mapping[str, pd.DataFrame] = field(default_factory=dict)
    arrays: Mapping[str, np.ndarray[Any, Any]] = field(default_factory=dict)


SAMPLE_COLUMNS = (
    "id",
    "index",
    "dataset_row",
    "fingerprint",
    "target",
    "prediction",
    "confidence",
    "loss",
    "grad_norm",
    "log_norm",
    "rank",
    "percentile",
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
    """The input of one of the top samples, if it can be shown.

    `image` has shape [H, W] or [C, H, W] and any value range. `values` are those of a row of a table,
    (column, value). `original` is the image as it is in the dataset, made small, uint8 [H, W, 3]; None if the
    model sees the dataset's own numbers.
    """

    id: str | int
    image: np.ndarray[Any, Any] | None = None
    text: str | None = None
    values: tuple[tuple[str, float | int | str | None], ...] = ()
    original: np.ndarray[Any, Any] | None = None


@dataclass(frozen=True, repr=False)
class AnalyzeResult(ShortRepr):
    """The result of `psgrad analyze`.

    `samples` has one row per sample in dataset order with SAMPLE_COLUMNS: `index` counts them from 0, and
    `dataset_row`, where samples were drawn at random, is their row in the dataset; `grad_norm` is the L2 norm
    of the gradient of that sample's loss in all trainable parameters, `log_norm` its base-10 logarithm.
    `parameters` has one row per parameter with PARAMETER_COLUMNS: the distribution of the per-sample norm of
    that parameter's gradient, and its `share` of the mean squared norm. `top_inputs` are the inputs of the
    first ranks, largest norm first; empty if the config leaves inputs out. `measures` are the configured
    ones, by name. `check` is the gate's verdict, with all findings. `vocabulary` has the text of each id in
    maps of attribution, if the dataset has one; `special_tokens` are those of them that are no part of a
    text. `issues` has a row a sample with `is_<type>_issue` and `<type>_score` from 0 to 1, where low is bad;
    `issue_summary` a row a type.

    `manifest` is what manifest.json holds.
    """

    samples: pd.DataFrame
    parameters: pd.DataFrame
    manifest: RunManifest
    folder: Path
    top_inputs: list[TopSample] = field(default_factory=list)
    class_names: list[str] | None = None
    measures: Mapping[str, MeasureResult] = field(default_factory=dict)
    check: CheckResult | None = None
    vocabulary: Mapping[int, str] = field(default_factory=dict)
    special_tokens: frozenset[int] = frozenset()
    issues: pd.DataFrame | None = None
    issue_summary: pd.DataFrame | None = None


def top_samples(frame: pd.DataFrame, n: int) -> pd.DataFrame:
    """The first n rows of a ranked frame, in the order of ranks; unranked rows never appear."""
    return frame[frame["rank"] <= n].sort_values("rank")


def has_classes(frame: pd.DataFrame) -> bool:
    """Whether the targets are classes: a confidence goes with them, and they are integers or text."""
    if "confidence" not in frame or "target" not in frame or not frame["target"].notna().any():
        return False
    return not pd.api.types.is_float_dtype(frame["target"]) and all(
        np.ndim(target) == 0 for target in frame["target"].head(100)
    )


def disagrees(frame: pd.DataFrame) -> pd.Series[bool]:
    """For each row whether the predicted class is another than the label; False where either is missing, or
    where there are no classes.
    """
    differs = pd.Series(False, index=frame.index)
    if has_classes(frame) and "prediction" in frame:
        both = frame.loc[
            frame["target"].notna() & frame["prediction"].notna(), ["target", "prediction"]
        ].astype(object)
        differs[both.index] = both["target"] != both["prediction"]
    return differs


def rows_where(frame: pd.DataFrame, condition: str, option: str) -> np.ndarray[Any, Any]:
    """[n] bool: for which rows a condition on the columns holds. option: what the condition was given as.

    Raises ConfigError for a text that is not a condition, or that these columns can't answer.
    """
    try:
        names = names_in_condition(condition, [str(name) for name in frame])
        _require_same_types(frame, condition)
        found = frame[names].eval(" ".join(condition.split()), engine="python")
    except ValueError as error:
        raise ConfigError(f"{option}: {error}") from None
    except Exception as error:  # pandas has many kinds of them for types that can't be compared
        raise ConfigError(
            f"{option}: {condition!r} can't be answered: {first_line(error)}; expected values of the"
            f" columns' own types: {', '.join(f'{n} {frame[n].dtype}' for n in names)}",
        ) from error
    if not isinstance(found, pd.Series) or not pd.api.types.is_bool_dtype(found):
        raise ConfigError(
            f"{option}: {condition!r} is not true or false of each row; expected a comparison of a column"
            " with a value, such as loss > 2",
        )
    return found.to_numpy(bool)


def _require_same_types(frame: pd.DataFrame, condition: str) -> None:
    """Raises ValueError where a column of numbers is compared with a text, or one of texts with a number:
    that would be equal in no row, and so choose none, or all.
    """
    for comparison in ast.walk(ast.parse(" ".join(condition.split()), mode="eval")):
        if not isinstance(comparison, ast.Compare):
            continue
        operands = [comparison.left, *comparison.comparators]
        columns = [node.id for node in operands if isinstance(node, ast.Name)]
        for node in (part for operand in operands for part in ast.walk(operand)):
            if not isinstance(node, ast.Constant):
                continue
            for name in columns:
                if frame[name].isna().all():
                    continue
                numbers = pd.api.types.is_numeric_dtype(frame[name])
                texts = not numbers and pd.api.types.infer_dtype(frame[name], skipna=True) == "string"
                if numbers if isinstance(node.value, str) else texts:
                    kind = "numbers" if numbers else "texts"
                    raise ValueError(f"{condition!r}: {name} holds {kind}, and {node.value!r} is none")
