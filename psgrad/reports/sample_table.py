"""The table of samples on the page: who is on it, in which order, and what each column says."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd

from psgrad.reports.page import at, loss_unit
from psgrad.reports.tables import DataTable, Heading, TableRow, cell, key_of, words_of
from psgrad.reports.words import MISSING, brief, group_words, identifier, label, number, percent, percentile, value_words
from psgrad.results import AnalyzeResult, disagrees, has_classes, top_samples

MAX_SAMPLES = 200
MAX_COLUMNS = 26
MAX_VALUE_ROWS, MAX_VALUES = 40, 40


@dataclass(frozen=True)
class Column:
    """A column of the table of samples that the page knows by name."""

    words: str
    meaning: str
    numeric: bool = True


KNOWN: Mapping[str, Column] = {
    "rank": Column("rank", "1 for the sample that is most unlike the others by the score that was asked for"),
    "id": Column("id", "of the sample, as the dataset names it", numeric=False),
    "target": Column("label", "what the dataset says", numeric=False),
    "prediction": Column("prediction", "what the model says", numeric=False),
    "confidence": Column("confidence", "the model's probability of its prediction (%)"),
    "group": Column("group", "that the sample was compared within", numeric=False),
    "loss": Column("loss", "the sample's own loss ({unit})"),
    "grad_norm": Column("gradient norm", "L2 norm of the sample's gradient ({unit} per unit of parameter)"),
    "percentile": Column("percentile", "percentage of samples, of its group where there are groups, that are not more suspect (%)"),
    "robust_z": Column("robust z", "distance from the median of the log norms, in robust standard deviations (no unit)"),
    "p_value": Column("p-value", "conformal: how often a sample of the reference is at least as unusual (probability)"),
    "q_value": Column("q-value", "the p-value after Benjamini and Hochberg: the false discovery rate at which it is named (share)"),
    "outlier_score": Column("outlier score", "0 to 1, low is bad (no unit)"),
}
"""The columns that come first, in this order, and what they say."""

LAST: Mapping[str, Column] = {"reasons": Column("reasons", "why the sample is on a list", numeric=False)}

_NOT_SHOWN = {"index", "fingerprint", "log_norm", "is_outlier_issue", "status"}


def listed_samples(samples: pd.DataFrame, count: int = MAX_SAMPLES) -> pd.DataFrame:
    """The samples to look at: those on the review list or named as outliers first, then by rank; unranked ones never appear."""
    ranked = samples[samples["rank"].notna().to_numpy()]
    issues = ranked[ranked["is_outlier_issue"].to_numpy(bool)].nsmallest(count, "rank")
    others = ranked[~ranked["is_outlier_issue"].to_numpy(bool)].nsmallest(count - len(issues), "rank")
    return pd.concat([issues, others]).sort_values("rank", kind="stable")


def meanings_of(result: AnalyzeResult) -> dict[str, str]:
    """What the columns say that measures brought."""
    return {column: meaning for measure in result.measures.values() for column, meaning in measure.meanings.items()}


def shown_columns(result: AnalyzeResult) -> list[str]:
    """The columns of the table, in order, as far as there is something in them."""
    samples = result.samples
    there = [
        str(column)
        for column in samples
        if column not in _NOT_SHOWN
        and not (column == "group" and samples[column].nunique() < 2)
        and column not in LAST
        and (column in ("target", "prediction") or samples[column].notna().any())
    ]
    known = [column for column in KNOWN if column in there and (column != "confidence" or has_classes(samples))]
    others = [column for column in there if column not in KNOWN and pd.api.types.is_numeric_dtype(samples[column])]
    return [*known, *others][:MAX_COLUMNS] + [column for column in LAST if column in samples]


def sample_table(result: AnalyzeResult) -> DataTable:
    """The table of the samples to look at."""
    listed = listed_samples(result.samples)
    columns, meanings = shown_columns(result), meanings_of(result)
    headings = [_heading(column, meanings, loss_unit(result.manifest)) for column in columns]
    write = {column: writer(column, result.class_names) for column in columns}
    if "group" in columns:
        by = at(result.manifest, "outliers", "groups", "by")
        write["group"] = lambda value: group_words(value, by, result.class_names)
    predicted = columns.index("prediction") if "prediction" in columns else 0
    rows = [
        TableRow(
            [write[column](record[column]) for column in columns],
            sample=int(record["index"]),
            differs=frozenset([predicted]) if differs else frozenset(),
        )
        for record, differs in zip(listed.to_dict("records"), disagrees(listed), strict=True)
    ]
    return DataTable("samples", "The samples to look at first", headings, rows)


def values_table(result: AnalyzeResult) -> DataTable | None:
    """The inputs of the first ranks, where they are rows of a table: a column a value."""
    rows = top_samples(result.samples, len(result.top_inputs)).to_dict("records")
    known = {row["id"]: row for row in rows}
    shown = [each for each in result.top_inputs if each.values and each.id in known][:MAX_VALUE_ROWS]
    if not shown:
        return None
    names = list(dict.fromkeys(name for each in shown for name, _ in each.values))
    classes = [column for column in ("target", "prediction") if column in result.samples]
    headings = [
        Heading("rank", "rank", True, sorted=True),
        Heading("id", "id"),
        *(_heading(column, {}, "") for column in classes),
        *(Heading(key_of(name), brief(name, 60), True) for name in names[:MAX_VALUES]),
    ]
    cells = [
        [
            *(writer(column, result.class_names)(known[each.id][column]) for column in ("rank", "id", *classes)),
            *(value_words(dict(each.values).get(name)) for name in names[:MAX_VALUES]),
        ]
        for each in shown
    ]
    note = f"The first {MAX_VALUES} of {len(names):,} values are shown." if len(names) > MAX_VALUES else ""
    table_rows = [TableRow(each, sample=int(known[sample.id]["index"])) for each, sample in zip(cells, shown, strict=True)]
    return DataTable("values", "The values of the top samples", headings, table_rows, note)


def writer(column: str, class_names: list[str] | None) -> Callable[[Any], str]:
    """How the values of a column are written."""
    if column in ("target", "prediction"):
        return lambda value: label(value, class_names)
    if column == "id":
        return identifier
    if column == "rank":
        return str
    if column == "percentile":
        return lambda value: MISSING if pd.isna(value) else percentile(value)
    if column == "confidence":
        return lambda value: MISSING if pd.isna(value) else percent(value)
    if column == "reasons":
        return lambda value: brief(value if isinstance(value, str) else cell(value), 160)
    if column in KNOWN and KNOWN[column].numeric:
        return number
    return cell


def _heading(column: str, meanings: Mapping[str, str], unit: str) -> Heading:
    known = KNOWN.get(column) or LAST.get(column)
    if known:
        key = {"target": "label"}.get(column, column)
        return Heading(key, known.words, known.numeric, known.meaning.replace("{unit}", unit), sorted=column == "rank")
    return Heading(key_of(column), words_of(column), True, brief(meanings.get(column, ""), 300))
