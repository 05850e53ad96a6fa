"""What the page says of the gate: its verdict, rule by rule, and the findings behind it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from psgrad.reports.sections import Bullets, Fold, Part, Subtitle, Text
from psgrad.reports.tables import Column, Mark, Table, table
from psgrad.reports.words import FACT_LIMIT, brief, cell, identifier
from psgrad.results.findings import RULES, CheckResult, Finding

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
        Column("rule", lambda each: brief(each.rule, 60), key="rule"),
        Column("outcome", lambda each: each.outcome, key="outcome"),
        Column("found", lambda each: cell(each.found), True, "found"),
        Column("limit", lambda each: cell(each.limit), True, "limit"),
        Column("what it says", lambda each: brief(each.message, FACT_LIMIT), key="message"),
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
    """The gravest findings."""
    rules = "; ".join(f"{rule}: {meaning}" for rule, meaning in RULES.items())
    states = "new; known, in the baseline; or ignored, with the reason"
    columns = [
        Column("rule", lambda each: each.rule, key="rule", meaning=rules),
        Column("level", lambda each: each.level, key="level", meaning="how grave: error, warning or note"),
        Column("id", lambda each: identifier(each.id), key="id"),
        Column("state", _state, key="state", meaning=states),
        Column("what was found", lambda each: brief(each.message, FACT_LIMIT), key="message"),
    ]
    counts = Counter(each.rule for each in check.findings)
    note = f"In all: {', '.join(f'{counts[rule]:,} {rule}' for rule in RULES if counts[rule])}."
    more = len(check.findings) - MAX_FINDINGS
    return table(
        "findings",
        "Findings, the gravest first",
        columns,
        check.findings[:MAX_FINDINGS],
        lambda each: Mark(each.index),
        note=note + (f" {more:,} more are in findings.jsonl." if more > 0 else ""),
    )


def _state(finding: Finding) -> str:
    reason = finding.ignored_because
    return f"ignored: {brief(reason, 80)}" if reason else finding.state
