"""Tables and sections of the page of an analyze run: the samples to look at, the gate with its findings, and
the classes with their worst samples.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pandas as pd
from markupsafe import Markup

from psgrad.reports.sections import Bullets, Fold, Part, Subtitle, Text
from psgrad.reports.tables import Mark, Table, TableColumn, Writer, table
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


def listed_samples(samples: pd.DataFrame) -> pd.DataFrame:
    """The samples to look at: those on the review list or named as outliers first, then by rank; unranked
    ones never appear.
    """
    ranked = samples[samples["rank"].notna().to_numpy()]
    issues = ranked[ranked["is_outlier_issue"].to_numpy(bool)].nsmallest(MAX_SAMPLES, "rank")
    others = ranked[~ranked["is_outlier_issue"].to_numpy(bool)].nsmallest(MAX_SAMPLES - len(issues), "rank")
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
    """The mark of a row of samples, whose `_differs` is the result of `disagrees`."""
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
    manifest = result.manifest
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


MAX_FINDINGS = 100
MAX_WARNINGS = 20
_VERDICTS = {0: "The gate passed.", 1: "The gate failed.", 4: "The gate could not be evaluated."}


def verdict_parts(check: CheckResult | None) -> Iterator[Part]:
    """The verdict in a sentence, where there is a gate."""
    if check is not None and check.outcomes:
        yield Text(_VERDICTS.get(check.exit_code, ""), "" if check.exit_code == 0 else "failed")


def gate_parts(check: CheckResult | None) -> Iterator[Part]:
    """Each rule of the gate, its warnings, and the findings, to be unfolded."""
    if check is None:
        return
    if check.outcomes:
        yield Subtitle("The gate")
        yield gate_table(check)
    if check.warnings:
        yield Bullets([brief(each, 300) for each in check.warnings[:MAX_WARNINGS]])
    if check.findings:
        findings = finding_table(check)
        yield Fold(findings.caption, [findings])


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
        lambda each: Mark(differs=() if each.outcome == "passed" else ("outcome",)),
        tall=False,
    )


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
        lambda each: Mark(each.index),
        note=note + (f" {more:,} more are in findings.jsonl." if more > 0 else ""),
    )


def _state(finding: Finding) -> str:
    reason = finding.ignored_because
    return f"ignored: {brief(reason, 80)}" if reason else finding.state


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


def class_parts(result: AnalyzeResult) -> Iterator[Part]:
    """The table of classes, and the worst samples of each, to be unfolded."""
    statistics = class_statistics(result.samples)
    yield Subtitle("All classes")
    yield class_table(result, statistics)
    yield Subtitle("The worst samples of each class")
    pages = class_pages(result, statistics)
    yield from pages
    if len(statistics) > len(pages):
        words = f"{len(pages)} of {len(statistics):,} classes, those with the most listed samples."
        yield Text(words, "quiet")


def class_table(result: AnalyzeResult, statistics: pd.DataFrame) -> Table:
    """All classes, or the first MAX_CLASSES by listed samples."""
    unit, total = result.manifest.loss_unit, len(statistics)
    listed = "how many are on the review list or named as outliers"
    nonfinite = "how many have a loss or gradient that is not finite"
    differs = "percentage of the class for which the model predicts another"
    norm = f"{unit} per unit of parameter"

    def whole(key: str, words: str, meaning: str) -> TableColumn:
        return TableColumn(words, lambda row: f"{row[key]:,.0f}", True, key, meaning)

    def share(row: dict[str, Any]) -> str:
        return percent(row["listed"] / row["samples"])

    columns = [
        TableColumn("class", lambda row: row["class"], key="class"),
        whole("samples", "samples", "how many there are"),
        whole("listed", "listed", listed),
        TableColumn("listed share", share, True, "share", "the same in percent of the class"),
        whole("nonfinite", "not finite", nonfinite),
        TableColumn("prediction differs", lambda row: percent(row["differs"]), True, "differs", differs),
        TableColumn(
            "median gradient norm", lambda row: number(row["median_norm"]), True, "median_norm", norm
        ),
        TableColumn("median loss", lambda row: number(row["median_loss"]), True, "median_loss", unit),
    ]
    shown = statistics.head(MAX_CLASSES)
    names = [label(target, result.class_names) for target in shown.index]
    many = f"{MAX_CLASSES} of {total:,} classes are shown, most listed samples first."
    return table(
        "classes",
        "Samples, norms and losses of each class",
        columns,
        shown.assign(**{"class": names}).to_dict("records"),
        lambda row: Mark(only=("label", row["class"])),
        note=many if total > MAX_CLASSES else "",
        explained=True,
    )


def class_pages(result: AnalyzeResult, statistics: pd.DataFrame) -> list[Fold]:
    """The classes with the most listed samples, each with its worst samples."""
    samples, names = result.samples, result.class_names
    shown = statistics.head(MAX_OPENED)
    place = shown.index.get_indexer(pd.Index(samples["target"].to_numpy()))
    inside = samples[(place >= 0) & samples["rank"].notna().to_numpy()]
    ranked = inside.assign(_rank=inside["rank"].to_numpy(np.float64)).sort_values("_rank")
    worst = ranked.groupby("target", observed=True).head(WORST)
    worst = worst.assign(_differs=disagrees(worst))
    by_class: dict[Any, pd.DataFrame] = dict(iter(worst.groupby("target", observed=True)))
    columns = [
        TableColumn("rank", lambda row: str(row["rank"]), True, "rank", sorted=True),
        TableColumn("id", lambda row: identifier(row["id"]), key="id"),
        TableColumn("prediction", lambda row: label(row.get("prediction"), names), key="prediction"),
        TableColumn("loss", lambda row: number(row["loss"]), True, "loss"),
        TableColumn("gradient norm", lambda row: number(row["grad_norm"]), True, "grad_norm"),
    ]

    pages = []
    for number_of, (target, about) in enumerate(shown.iterrows()):
        name, rows = label(target, names), by_class.get(target, worst.head(0)).to_dict("records")
        caption = f"The worst samples of class {name}"
        summary = Markup("<b>{}</b>: {:,.0f} samples, {:,.0f} listed, median gradient norm {}").format(
            name, about["samples"], about["listed"], number(about["median_norm"])
        )
        listing = table(f"class-{number_of}", caption, columns, rows, mark_of, tall=False)
        pages.append(Fold(summary, [listing], "page"))
    return pages
