"""The tables of the page of an analyze run: the samples to look at, their values, the gate with its findings,
groups, classes with their worst samples, and parameters.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from psgrad.reports.outliers import listed_samples
from psgrad.reports.tables import Table, TableColumn, Writer, column, number_column, table
from psgrad.reports.words import (
    FACT_LIMIT,
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
from psgrad.run.results import AnalyzeResult, disagrees, has_classes, top_samples
from psgrad.run.results.check import CheckResult
from psgrad.run.results.findings import RULES, Finding
from psgrad.run.results.manifest import OutlierFacts
from psgrad.wording import common_prefix, parameter_names, prefix_note

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
    return table("samples", "The samples to look at first", columns, rows, marks_of)


def marks_of(row: Mapping[Any, Any]) -> dict[str, Any]:
    """The marks of a row of samples, whose `_differs` is the result of `disagrees`."""
    return {"sample": int(row["index"]), "differs": ("prediction",) if row["_differs"] else ()}


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
        *(
            column_of(each, result)
            for each in ("rank", "id", "target", "prediction")
            if each in result.samples
        ),
        *(TableColumn(brief(name, 60), value_of(name), True, key_of(name)) for name in names[:MAX_VALUES]),
    ]
    return table(
        "values",
        "The values of the top samples",
        columns,
        [{**known[each.id], "_values": dict(each.values)} for each in shown],
        lambda row: {"sample": int(row["index"])},
        f"The first {MAX_VALUES} of {len(names):,} values are shown." if len(names) > MAX_VALUES else "",
    )


def column_of(name: str, result: AnalyzeResult) -> TableColumn:
    """A column of the table of samples by its name: its heading, and how its values are written."""
    manifest, names = result.manifest, result.class_names
    writers: dict[str, Writer] = {
        "id": identifier,
        "rank": str,
        "target": lambda value: label(value, names),
        "prediction": lambda value: label(value, names),
        "group": lambda value: group_words(value, manifest.judged.groups.by, names),
        "percentile": lambda value: MISSING if pd.isna(value) else percentile(value),
        "confidence": lambda value: MISSING if pd.isna(value) else percent(value),
        "reasons": lambda value: brief(value if isinstance(value, str) else cell(value), 160),
    }
    words, meaning = {**KNOWN, **LAST}.get(name, (words_of(name), ""))
    meaning = meaning.replace("{unit}", manifest.loss_unit)
    if name not in KNOWN and name not in LAST:
        brought = [each.meanings[name] for each in result.measures.values() if name in each.meanings]
        meaning = brief(brought[-1] if brought else "", 300)
    return TableColumn(
        words,
        lambda row: writers.get(name, number if name in KNOWN else cell)(row[name]),
        numeric=name not in _WORDS,
        key="label" if name == "target" else key_of(name),
        meaning=meaning,
        sorted=name == "rank",
    )


MAX_FINDINGS = 100


def gate_table(check: CheckResult) -> Table:
    """A row a rule of the gate."""
    columns = [
        TableColumn("rule", lambda each: brief(each.rule, 60), key="rule"),
        TableColumn("outcome", lambda each: each.outcome, key="outcome"),
        TableColumn("found", lambda each: cell(each.found), True, "found"),
        TableColumn("limit", lambda each: cell(each.limit), True, "limit"),
        TableColumn("what it says", lambda each: brief(each.message, FACT_LIMIT), key="message"),
    ]
    return table(
        "gate",
        "What each rule of the gate says",
        columns,
        check.outcomes,
        lambda each: {} if each.outcome == "passed" else {"differs": ("outcome",)},
    )


def issue_summary(summary: pd.DataFrame) -> Table:
    """A row a type of issue: how many samples have it, the worst of them, and what it was made of."""
    columns = [
        TableColumn("issue", lambda row: str(row.issue).replace("_", " ")),
        TableColumn("samples", lambda row: "" if pd.isna(row.found) else f"{row.found:,}", numeric=True),
        TableColumn(
            "of the dataset", lambda row: "" if pd.isna(row.score) else number(row.score), numeric=True
        ),
        TableColumn("from", lambda row: str(row.made_of)),
    ]
    return table("issue-types", "Issues by type", columns, summary.itertuples())


def finding_table(check: CheckResult) -> Table:
    """The most severe findings."""
    rules = "; ".join(f"{rule}: {meaning}" for rule, meaning in RULES.items())
    states = "new; known, in the baseline; or ignored, with the reason"
    columns = [
        TableColumn("rule", lambda each: each.rule, key="rule", meaning=rules),
        TableColumn(
            "level", lambda each: each.level, key="level", meaning="how severe: error, warning or note"
        ),
        TableColumn("id", lambda each: identifier(each.id), key="id"),
        TableColumn("state", _state, key="state", meaning=states),
        TableColumn("what was found", lambda each: brief(each.message, FACT_LIMIT), key="message"),
    ]
    counts = Counter(each.rule for each in check.findings)
    note = f"In all: {', '.join(f'{counts[rule]:,} {rule}' for rule in RULES if counts[rule])}."
    more = len(check.findings) - MAX_FINDINGS
    return table(
        "findings",
        "Findings, the most severe first",
        columns,
        check.findings[:MAX_FINDINGS],
        lambda each: {"sample": each.index},
        note + (f" {more:,} more are in findings.jsonl." if more > 0 else ""),
    )


def _state(finding: Finding) -> str:
    reason = finding.ignored_because
    return f"ignored: {brief(reason, 80)}" if reason else finding.state


MAX_GROUPS = 200


def group_table(facts: OutlierFacts, class_names: Sequence[str] | None) -> Table:
    """A row a group, where samples were compared within groups."""
    least = "the least that this group's reference can give (probability)"
    columns = [column("group", "group"), number_column("samples", "samples", write=cell)]
    if facts.referenced:
        columns += [
            number_column("reference", "trusted samples", write=cell),
            number_column("smallest_p", "smallest p-value", least, cell),
            number_column(
                "smallest_flaggable",
                "smallest number that can be named",
                "fewer outliers than that can't be told (samples)",
                cell,
            ),
            column("evaluable", "evaluable", cell, meaning="whether any sample of the group could be named"),
        ]
    by, each = facts.groups.by, facts.groups.each
    rows = [
        {**vars(about), "group": group_words(group, by, class_names)}
        for group, about in list(each.items())[:MAX_GROUPS]
    ]
    note = f"{MAX_GROUPS} of {len(each):,} groups are shown." if len(each) > MAX_GROUPS else ""
    return table("groups", f"Groups by {words_of(by)}", columns, rows, lambda _: {"only": "group"}, note)


MAX_CLASSES = 200
MAX_OPENED = 40
WORST = 5


def class_statistics(samples: pd.DataFrame) -> pd.DataFrame:
    """A row a class, most listed samples first: samples, listed, nonfinite, median_norm, median_loss, differs
    (a share).
    """
    finite = samples["status"].to_numpy() != "nonfinite"
    frame = pd.DataFrame(
        {
            "target": samples["target"].to_numpy(),
            "norm": samples["grad_norm"].where(finite).to_numpy(),
            "loss": samples["loss"].where(finite).to_numpy(),
            "listed": samples["is_outlier_issue"].to_numpy(bool) & finite,
            "nonfinite": ~finite,
            "differs": disagrees(samples).to_numpy(bool),
        }
    )
    groups = frame.groupby("target", observed=True)
    found = groups.agg(
        samples=("norm", "size"),
        listed=("listed", "sum"),
        nonfinite=("nonfinite", "sum"),
        median_norm=("norm", "median"),
        median_loss=("loss", "median"),
        differs=("differs", "mean"),
    )
    return found.sort_values(["listed", "median_norm"], ascending=False, kind="stable")


def class_table(result: AnalyzeResult, statistics: pd.DataFrame) -> Table:
    """All classes, or the first MAX_CLASSES by listed samples."""
    unit, total = result.manifest.loss_unit, len(statistics)

    def whole(value: float) -> str:
        return f"{value:,.0f}"

    columns = [
        TableColumn("class", lambda row: row["name"], key="class"),
        number_column("samples", "samples", "how many there are", whole),
        number_column("listed", "listed", "how many are on the review list or named as outliers", whole),
        number_column("share", "listed share", "the same in percent of the class", percent),
        number_column(
            "nonfinite", "not finite", "how many have a loss or gradient that is not finite", whole
        ),
        number_column(
            "differs",
            "prediction differs",
            "percentage of the class for which the model predicts another",
            percent,
        ),
        number_column("median_norm", "median gradient norm", f"{unit} per unit of parameter"),
        number_column("median_loss", "median loss", unit),
    ]
    shown = statistics.head(MAX_CLASSES)
    names = [label(target, result.class_names) for target in shown.index]
    rows = shown.assign(name=names, share=shown["listed"] / shown["samples"]).to_dict("records")
    many = f"{MAX_CLASSES} of {total:,} classes are shown, most listed samples first."
    note = many if total > MAX_CLASSES else ""
    caption = "Samples, norms and losses of each class"
    return table("classes", caption, columns, rows, lambda _: {"only": "label"}, note)


@dataclass(frozen=True)
class ClassPage:
    """A class with its worst samples."""

    name: str
    samples: int
    listed: int
    median_norm: float
    worst: Table


def class_pages(result: AnalyzeResult, statistics: pd.DataFrame) -> list[ClassPage]:
    """The classes with the most listed samples, each with its worst samples."""
    samples, names = result.samples, result.class_names
    shown = statistics.head(MAX_OPENED)
    place = shown.index.get_indexer(pd.Index(samples["target"].to_numpy()))
    inside = samples[(place >= 0) & samples["rank"].notna().to_numpy()]
    ranked = inside.assign(_rank=inside["rank"].to_numpy(np.float64)).sort_values("_rank")
    worst = ranked.groupby("target", observed=True).head(WORST)
    worst = worst.assign(_differs=disagrees(worst), prediction=worst.get("prediction"))
    by_class: dict[Any, pd.DataFrame] = dict(iter(worst.groupby("target", observed=True)))
    columns = [
        column("rank", "rank", numeric=True, sorted=True),
        column("id", "id", identifier),
        column("prediction", "prediction", lambda value: label(value, names)),
        number_column("loss", "loss"),
        number_column("grad_norm", "gradient norm"),
    ]
    pages = []
    for at, (target, about) in enumerate(shown.iterrows()):
        name, rows = label(target, names), by_class.get(target, worst.head(0)).to_dict("records")
        listing = table(f"class-{at}", f"The worst samples of class {name}", columns, rows, marks_of)
        sizes = int(about["samples"]), int(about["listed"])
        pages.append(ClassPage(name, *sizes, about["median_norm"], listing))
    return pages


MAX_PARAMETER_ROWS = 300
NAME_LIMIT = 100


def layer_table(parameters: pd.DataFrame, unit_of_loss: str) -> Table:
    """One row for each parameter, in the order of the model."""
    shown, left_out = parameters, ""
    if len(parameters) > MAX_PARAMETER_ROWS:
        shown = parameters.loc[parameters["share"].fillna(0).nlargest(MAX_PARAMETER_ROWS).index.sort_values()]
        left_out = f"{len(shown)} of {len(parameters):,} parameters are shown, those with the largest share."
    prefix = common_prefix(list(map(str, parameters["parameter"])))
    names = parameter_names(list(map(str, shown["parameter"])), NAME_LIMIT, prefix)
    unit = f"{unit_of_loss} per unit of parameter"

    def text(value: Any) -> str:
        return brief(str(value), NAME_LIMIT)

    columns = [
        column("parameter", "parameter"),
        column("shape", "shape", text),
        number_column(
            "mean_norm", "mean norm", f"mean over samples of the norm of this parameter's gradient ({unit})"
        ),
        number_column("std_norm", "standard deviation", f"over samples ({unit})"),
        number_column("median", "median", unit),
        number_column("max_norm", "largest", unit),
        number_column(
            "share",
            "share",
            "mean squared norm, divided by that of all parameters together (%)",
            lambda share: MISSING if pd.isna(share) else percent(share),
        ),
        column("computed_as", "computed as", text, meaning="the terms whose sum the gradient is"),
    ]
    note = ". ".join(part for part in (prefix_note(prefix), left_out) if part)
    rows = shown.assign(parameter=names).to_dict("records")
    return table("layers", "Gradient norms of each parameter", columns, rows, note=note)
