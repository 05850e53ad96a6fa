"""What the page says of outliers and gates: how samples were judged, what was found, and whether it may pass."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import pandas as pd

from psgrad.reports.measure_words import flat_words
from psgrad.reports.page import FACT_LIMIT, at
from psgrad.reports.tables import DataTable, Heading, TableRow
from psgrad.reports.words import brief, count, identifier, number
from psgrad.results import AnalyzeResult, disagrees, has_classes
from psgrad.results.findings import RULES, CheckResult

MAX_FINDINGS = 100
MAX_FACTS = 40
MAX_NAMED = 20


def findings_sentences(samples: pd.DataFrame, referenced: bool) -> list[str]:
    """Plain sentences about those that are listed, with what speaks for it and what against."""
    finite = samples[(samples["status"] == "ok").to_numpy()]
    listed = finite[finite["is_outlier_issue"].to_numpy(bool)]
    found = []
    if len(listed):
        ranks = finite["loss"].rank(ascending=False, method="first")
        also_by_loss = int((ranks[listed.index] <= len(listed)).sum())
        what = "Unlike the reference:" if referenced else "The review list has"
        found.append(f"{what} {count(len(listed))}; {also_by_loss:,} of them are also among the {len(listed):,} largest by loss.")
        if has_classes(samples) and "prediction" in samples:
            wrong = disagrees(finite)
            found.append(
                f"The model's prediction differs from the label for {int(wrong[listed.index].sum()):,} of them, "
                f"and for {int(wrong.sum()):,} of all {count(len(finite))} that are finite."
            )
    elif referenced and len(finite):
        found.append("No sample is unlike the reference at the false discovery rate that was asked for.")
    zero = int((finite["grad_norm"] == 0).sum())
    if zero and (len(listed) or referenced):
        found.append(f"Gradients of exactly zero: {count(zero)}. They would not move the model at all.")
    return found


def nonfinite_samples(samples: pd.DataFrame) -> tuple[int, list[str]]:
    """How many samples are not finite, and the first of them."""
    bad = samples.loc[(samples["status"] != "ok").to_numpy(), "id"]
    return len(bad), [identifier(each) for each in bad.head(MAX_NAMED)]


def has_reference(result: AnalyzeResult) -> bool:
    """Whether samples were judged against trusted ones."""
    return "q_value" in result.samples and bool(result.samples["q_value"].notna().any())


def outlier_facts(manifest: Mapping[str, Any]) -> list[tuple[str, str]]:
    """How samples were judged, as the manifest tells it."""
    facts = at(dict(manifest), "outliers")
    return flat_words(facts, FACT_LIMIT)[:MAX_FACTS] if isinstance(facts, dict) else []


def gate_table(check: CheckResult | None) -> DataTable | None:
    """A row a rule of the gate; None where none was asked."""
    if check is None or not check.outcomes:
        return None
    headings = [
        Heading("rule", "rule"),
        Heading("outcome", "outcome"),
        Heading("found", "found", True),
        Heading("limit", "limit", True),
        Heading("message", "what it says"),
    ]
    rows = [
        TableRow(
            [brief(each.rule, 60), each.outcome, number(each.found), number(each.limit), brief(each.message, FACT_LIMIT)],
            differs=frozenset() if each.outcome == "passed" else frozenset([1]),
        )
        for each in check.outcomes
    ]
    return DataTable("gate", "What each rule of the gate says", headings, rows)


def finding_table(check: CheckResult | None) -> DataTable | None:
    """The gravest findings; None where there are none."""
    if check is None or not check.findings:
        return None
    headings = [
        Heading("rule", "rule", meaning="; ".join(f"{rule}: {meaning}" for rule, meaning in RULES.items())),
        Heading("level", "level", meaning="how grave: error, warning or note"),
        Heading("id", "id"),
        Heading("state", "state", meaning="new; known, in the baseline; or ignored, with the reason"),
        Heading("message", "what was found"),
    ]
    rows = [
        TableRow(
            [
                each.rule,
                each.level,
                identifier(each.id),
                f"ignored: {brief(each.ignored_because, 80)}" if each.ignored_because else each.state,
                brief(each.message, FACT_LIMIT),
            ],
            sample=each.index,
        )
        for each in check.findings[:MAX_FINDINGS]
    ]
    counts = Counter(each.rule for each in check.findings)
    note = ", ".join(f"{counts[rule]:,} {rule}" for rule in RULES if counts[rule])
    more = len(check.findings) - MAX_FINDINGS
    note = f"In all: {note}." + (f" {more:,} more are in findings.jsonl." if more > 0 else "")
    return DataTable("findings", "Findings, the gravest first", headings, rows, note)


def gate_sentence(check: CheckResult | None) -> str:
    """The verdict in a sentence; empty where there is no gate."""
    if check is None or not check.outcomes:
        return ""
    return {0: "The gate passed.", 1: "The gate failed.", 4: "The gate could not be evaluated."}.get(check.exit_code, "")
