"""The results of `psgrad influence --evaluate`: how well scores predict what retraining does,
beside the scores of controls.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from psgrad.run.results.manifest import RunManifest
from psgrad.wording import ShortRepr

EVALUATION_FILE = "evaluation.json"

# The columns of the table of each kind, after `method` and `control`. Intervals are 95 % jackknife intervals.
EVALUATION_COLUMNS: Mapping[str, tuple[str, ...]] = {
    "lds": ("mean", "low", "high", "ahead", "ahead_low", "ahead_high", "undefined"),
    "loo": ("pearson", "low", "high", "spearman", "slope", "intercept", "pooled", "undefined"),
    "removal": ("removed", "rise", "low", "high", "ahead", "ahead_low", "ahead_high"),
}
# The main column of each kind.
HEADLINE: Mapping[str, str] = {"lds": "mean", "loo": "pearson", "removal": "rise"}
# Columns that stand in evaluation.json as one list.
_INTERVALS = {"low": ("interval", "high"), "ahead_low": ("ahead_interval", "ahead_high")}


# What was trained again, of each kind, as in evaluation.json.
_CEILING = ("ceiling", "single_seed", "reliability")
_RETRAINED: Mapping[str, tuple[str, ...]] = {
    "lds": ("subsets", "fraction", "seeds", "queries", "models", *_CEILING),
    "loo": ("removals", "highest", "seeds", "queries", "models", *_CEILING),
    "removal": ("queries", "seeds", "models"),
}


@dataclass(frozen=True)
class Retrained:
    """What was trained again, and how much of the outcomes is noise of training.

    models: all of them. seeds: trainings of each set of rows. subsets, fraction: of lds. removals, highest:
    of loo, how many examples were left out, and how many of them for their self-influence. ceiling,
    single_seed, reliability: of lds and loo, see `Ceiling`; None where each was trained once.
    """

    queries: int
    seeds: int
    models: int
    subsets: int | None = None
    fraction: float | None = None
    removals: int | None = None
    highest: int | None = None
    ceiling: float | None = None
    single_seed: float | None = None
    reliability: float | None = None


@dataclass(frozen=True, repr=False)
class EvaluationResult(ShortRepr):
    """The results of the methods.

    Attributes:
        kind: 'lds', 'loo' or 'removal'.
        method: the config's, with which the others are compared.
        table: one row a method or control (of removal, one a number of removed examples, too), with
            `method`, `control` (bool) and EVALUATION_COLUMNS of the kind. Missing numbers are NaN.
        details: one row a method and query: the values behind the means.
        points: of loo, one row a removal and query: predicted and actual rise, by the
            config's method.
        notes: sentences.
        unit: the unit of a rise, in words.
        folder: of the run.
        manifest: what manifest.json holds.
    """

    kind: str
    method: str
    table: pd.DataFrame
    retrained: Retrained
    details: pd.DataFrame
    unit: str
    folder: Path
    points: pd.DataFrame = field(default_factory=pd.DataFrame)
    notes: list[str] = field(default_factory=list)
    manifest: RunManifest = field(default_factory=RunManifest)


def evaluation_content(result: EvaluationResult) -> dict[str, Any]:
    """What evaluation.json holds: `lds.mean`, `lds.interval`, `lds.ceiling`, `loo.pearson`, `loo.slope` and
    so on are of the config's method, and `lds.methods` has the same for every method and
    control.
    """
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
    retrained = {name: getattr(result.retrained, name) for name in _RETRAINED[result.kind]}
    content: dict[str, Any] = {**main, **retrained, "methods": methods}
    return {
        "kind": result.kind,
        "method": result.method,
        "unit": result.unit,
        result.kind: content,
        "notes": result.notes,
    }


def _values(kind: str, row: dict[str, Any]) -> dict[str, Any]:
    """A row of the table as in evaluation.json: intervals as lists, missing numbers as null."""
    values: dict[str, Any] = {}
    for column in EVALUATION_COLUMNS[kind]:
        if column in _INTERVALS:
            name, high = _INTERVALS[column]
            values[name] = None if pd.isna(row[column]) else [float(row[column]), float(row[high])]
        elif not column.endswith("high"):
            values[column] = _plain(row[column])
    return values


def _plain(value: Any) -> int | float | str | None:
    if pd.isna(value):
        return None
    return value if isinstance(value, int | str) else float(value)
