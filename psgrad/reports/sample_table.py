"""The table of samples on the page: which are on it, in which order, and what each column says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd

from psgrad.reports.tables import Mark, Table, TableColumn, Writer, table
from psgrad.reports.words import (
    MISSING,
    brief,
    cell,
    group_words,
    identifier,
    key_of,
    label,
    number,
    percent,
    percentile,
    value_words,
    words_of,
)
from psgrad.results import AnalyzeResult, disagrees, has_classes, top_samples
from psgrad.results.manifest import read_manifest

MAX_SAMPLES = 200
MAX_COLUMNS = 26
MAX_VALUE_ROWS, MAX_VALUES = 40, 40

KNOWN: Mapping[str, tuple[str, str]] = {
    "rank": ("rank", "1 for the sample that is most unlike the others by the score that was asked for"),
    "id": ("id", "of the sample, as the dataset names it"),
    "target": ("label", "what the dataset says"),
    "prediction": ("prediction", "what the model says"),
    "confidence": ("confidence", "the model's probability of its prediction (%)"),
    "group": ("group", "that the sample was compared within"),
    "loss": ("loss", "the sample's own loss ({unit})"),
    "grad_norm": ("gradient norm", "L2 norm of the sample's gradient ({unit} per unit of parameter)"),
    "percentile": (
        "percentile",
        "percentage of samples, of its group where there are groups, that are not more suspect (%)",
    ),
    "robust_z": (
        "robust z",
        "distance from the median of the log norms, in robust standard deviations (no unit)",
    ),
    "p_value": (
        "p-value",
        "conformal: how often a sample of the reference is at least as unusual (probability)",
    ),
    "q_value": (
        "q-value",
        "the p-value after Benjamini and Hochberg: the false discovery rate at which it is named (share)",
    ),
    "outlier_score": ("outlier score", "0 to 1, low is bad (no unit)"),
}
"""The columns that come first, in this order: heading, and meaning."""

LAST: Mapping[str, tuple[str, str]] = {"reasons": ("reasons", "why the sample is on a list")}

_WORDS = {"id", "target", "prediction", "group", "reasons"}  # columns that are no numbers
_NOT_SHOWN = {"index", "fingerprint", "log_norm", "is_outlier_issue", "status"}


def listed_samples(samples: pd.DataFrame, count: int = MAX_SAMPLES) -> pd.DataFrame:
    """The samples to look at: those on the review list or named as outliers first, then by rank; unranked
    ones never appear.
    """
    ranked = samples[samples["rank"].notna().to_numpy()]
    issues = ranked[ranked["is_outlier_issue"].to_numpy(bool)].nsmallest(count, "rank")
    others = ranked[~ranked["is_outlier_issue"].to_numpy(bool)].nsmallest(count - len(issues), "rank")
    return pd.concat([issues, others]).sort_values("rank", kind="stable")


def shown_columns(samples: pd.DataFrame) -> list[str]:
    """The columns of the table, in order, as far as there is something in them."""
    there = [
        str(column)
        for column in samples
        if column not in _NOT_SHOWN
        and not (column == "group" and samples[column].nunique() < 2)
        and column not in LAST
        and (column in ("target", "prediction") or samples[column].notna().any())
    ]
    known = [each for each in KNOWN if each in there and (each != "confidence" or has_classes(samples))]
    numeric = [each for each in there if each not in KNOWN and pd.api.types.is_numeric_dtype(samples[each])]
    return [*known, *numeric][:MAX_COLUMNS] + [column for column in LAST if column in samples]


def sample_table(result: AnalyzeResult) -> Table:
    """The table of the samples to look at."""
    listed = listed_samples(result.samples)
    columns = [column_of(name, result) for name in shown_columns(result.samples)]
    rows = listed.assign(_differs=disagrees(listed)).to_dict("records")
    return table("samples", "The samples to look at first", columns, rows, mark_of, explained=True)


def mark_of(row: Mapping[Any, Any]) -> Mark:
    """The mark of a row of samples, whose `_differs` is what `disagrees` says of it."""
    return Mark(int(row["index"]), differs=("prediction",) if row["_differs"] else ())


def values_table(result: AnalyzeResult) -> Table | None:
    """The inputs of the first ranks, where they are rows of a table: a column a value."""
    rows = top_samples(result.samples, len(result.top_inputs)).to_dict("records")
    known = {row["id"]: row for row in rows}
    shown = [each for each in result.top_inputs if each.values and each.id in known][:MAX_VALUE_ROWS]
    if not shown:
        return None
    names = list(dict.fromkeys(name for each in shown for name, _ in each.values))

    def value_of(name: str) -> Writer:
        return lambda row: value_words(row["_values"].get(name))

    columns = [
        TableColumn("rank", lambda row: str(row["rank"]), True, "rank", sorted=True),
        TableColumn("id", lambda row: identifier(row["id"]), key="id"),
        *(column_of(each, result) for each in ("target", "prediction") if each in result.samples),
        *(TableColumn(brief(name, 60), value_of(name), True, key_of(name)) for name in names[:MAX_VALUES]),
    ]
    note = f"The first {MAX_VALUES} of {len(names):,} values are shown." if len(names) > MAX_VALUES else ""
    return table(
        "values",
        "The values of the top samples",
        columns,
        [{**known[each.id], "_values": dict(each.values)} for each in shown],
        lambda row: Mark(int(row["index"])),
        note=note,
    )


def column_of(name: str, result: AnalyzeResult) -> TableColumn:
    """A column of the table of samples by its name: its heading, and how its values are written."""
    manifest = read_manifest(result.manifest)
    write = _writer(name, result.class_names)
    if name == "group":
        by = manifest.judged.groups.by

        def write(value: Any) -> str:
            return group_words(value, by, result.class_names)

    key, (words, meaning) = key_of(name), {**KNOWN, **LAST}.get(name, (words_of(name), ""))
    if name not in KNOWN and name not in LAST:
        brought = [each.meanings[name] for each in result.measures.values() if name in each.meanings]
        meaning = brief(brought[-1] if brought else "", 300)
    return TableColumn(
        words,
        lambda row: write(row[name]),
        numeric=name not in _WORDS,
        key="label" if name == "target" else key,
        meaning=meaning.replace("{unit}", manifest.loss_unit) if name in KNOWN else meaning,
        sorted=name == "rank",
    )


def _writer(name: str, class_names: list[str] | None) -> Writer:
    """How the values of a column are written."""
    if name in ("target", "prediction"):
        return lambda value: label(value, class_names)
    if name == "percentile":
        return lambda value: MISSING if pd.isna(value) else percentile(value)
    if name == "confidence":
        return lambda value: MISSING if pd.isna(value) else percent(value)
    if name == "reasons":
        return lambda value: brief(value if isinstance(value, str) else cell(value), 160)
    writers: dict[str, Writer] = {"id": identifier, "rank": str}
    return writers.get(name, number if name in KNOWN and name not in _WORDS else cell)
