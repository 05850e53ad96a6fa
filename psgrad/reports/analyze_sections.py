"""Sections of the page of an analyze run: the gate with its findings, and the classes with their worst
samples.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd
from markupsafe import Markup

from psgrad.reports.sample_table import mark_of
from psgrad.reports.sections import Bullets, Fold, Part, Subtitle, Text
from psgrad.reports.tables import Mark, Table, TableColumn, table
from psgrad.reports.words import FACT_LIMIT, brief, cell, identifier, label, number, percent
from psgrad.results import AnalyzeResult, disagrees
from psgrad.results.findings import RULES, CheckResult, Finding
from psgrad.results.manifest import read_manifest

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
    unit, total = read_manifest(result.manifest).loss_unit, len(statistics)
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
