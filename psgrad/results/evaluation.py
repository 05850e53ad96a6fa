"""What `psgrad influence --evaluate` yields: how well scores foretell what retraining does, beside those of controls."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from psgrad.results.short_repr import ShortRepr

EVALUATION_FILE = "evaluation.json"

# The columns of the table of each kind, after `method` and `control`. Intervals are 95 % bootstrap intervals.
EVALUATION_COLUMNS: Mapping[str, tuple[str, ...]] = {
    "lds": ("mean", "low", "high", "ahead", "ahead_low", "ahead_high", "undefined", "damping"),
    "loo": ("pearson", "low", "high", "spearman", "slope", "intercept", "pooled", "undefined"),
    "mislabel": (
        *("auc", "auc_deviation", "average_precision", "average_precision_deviation"),
        *("recall", "recall_deviation", "undefined"),
    ),
    "removal": ("removed", "rise", "low", "high", "ahead", "ahead_low", "ahead_high"),
}
# What a kind is first judged by.
HEADLINE: Mapping[str, str] = {"lds": "mean", "loo": "pearson", "mislabel": "auc", "removal": "rise"}
# Columns that stand in evaluation.json as one list.
_INTERVALS = {"low": ("interval", "high"), "ahead_low": ("ahead_interval", "ahead_high")}


@dataclass(frozen=True, repr=False)
class EvaluationResult(ShortRepr):
    """How the methods did.

    Attributes:
        kind: 'lds', 'loo', 'mislabel' or 'removal'.
        method: the config's, with which the others are compared.
        table: one row a method or control (for removal, one a number of removed examples, too), with `method`, `control` (bool) and
            EVALUATION_COLUMNS of the kind. Missing numbers are NaN.
        facts: of the evaluation as a whole (numbers of models, the noise ceiling, how many queries), by the names of evaluation.json.
        details: one row a method and query (lds, loo, removal) or set of flips (mislabel): what the means are made of.
        points: of loo, one row a removal and query: predicted and actual rise, by the config's method.
        curves: of lds with tuning, method -> damping -> the score on the tuning subsets and queries.
        notes: sentences for people.
        unit: what a rise is a rise of, in words. folder: of the run. manifest: what manifest.json holds.
    """

    kind: str
    method: str
    table: pd.DataFrame
    facts: dict[str, Any]
    details: pd.DataFrame
    unit: str
    folder: Path
    points: pd.DataFrame = field(default_factory=pd.DataFrame)
    curves: dict[str, dict[float, float]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    manifest: dict[str, Any] = field(default_factory=dict)


def evaluation_content(result: EvaluationResult) -> dict[str, Any]:
    """What evaluation.json holds: `lds.mean`, `lds.interval`, `lds.ceiling`, `loo.pearson`, `loo.slope`, `mislabel.auc` and so on are of
    the config's method, and `lds.methods` has the same for every method and control."""
    methods: dict[str, Any] = {}
    for row in result.table.to_dict("records"):
        values = _values(result.kind, {str(key): value for key, value in row.items()})
        name = str(row["method"])
        if result.kind == "removal":
            entry = methods.setdefault(name, {"control": bool(row["control"]), "curve": []})
            entry["curve"].append(values)
        else:
            methods[name] = {"control": bool(row["control"]), **values}
    main = {key: value for key, value in methods[result.method].items() if key != "control"}
    content: dict[str, Any] = {**main, **result.facts, "methods": methods}
    if result.curves:
        content["tuning"] = {
            name: [{"damping": damping, "mean": mean} for damping, mean in curve.items()] for name, curve in result.curves.items()
        }
    return {"kind": result.kind, "method": result.method, "unit": result.unit, result.kind: content, "notes": result.notes}


def _values(kind: str, row: dict[str, Any]) -> dict[str, Any]:
    """A row of the table by the names of evaluation.json: intervals as lists, numbers that are missing as null."""
    values: dict[str, Any] = {}
    for column in EVALUATION_COLUMNS[kind]:
        if column in _INTERVALS:
            name, high = _INTERVALS[column]
            values[name] = None if pd.isna(row[column]) else [float(row[column]), float(row[high])]
        elif not column.endswith("high"):
            values[column] = _plain(row[column])
    return values


def _plain(value: Any) -> int | float | None:
    if pd.isna(value):
        return None
    return value if isinstance(value, int) else float(value)
