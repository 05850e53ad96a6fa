"""What the page says of the gate: its verdict, rule by rule, and the findings behind it."""

from __future__ import annotations

from collections import Counter

from psgrad.reports.page import FACT_LIMIT
from psgrad.reports.tables import DataTable, Heading, TableRow, cell
from psgrad.reports.words import brief, identifier
from psgrad.results.findings import RULES, CheckResult

MAX_FINDINGS = 100


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
            [brief(each.rule, 60), each.outcome, cell(each.found), cell(each.limit), brief(each.message, FACT_LIMIT)],
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
