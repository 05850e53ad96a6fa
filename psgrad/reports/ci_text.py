"""A verdict in the formats that people read: a terminal, Markdown, and annotations and the summary of a step
of GitHub Actions; and what all CI formats say of findings and outcomes: one line, bounded, and harmless
wherever it is printed.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from psgrad.reports.tables import Table, TableColumn, Writer, table
from psgrad.reports.terminal import print_table
from psgrad.reports.words import brief, count, identifier, number
from psgrad.run.results import RULES, CheckResult, Finding, GateOutcome

MESSAGE_LIMIT = 600
VERDICTS = {"passed": "PASS", "failed": "FAIL", "not evaluable": "NOT EVALUABLE"}


def clean(text: str, limit: int = MESSAGE_LIMIT) -> str:
    """The text on one line, without control characters, marks of direction or halves of letters."""
    # GitHub's runner takes a line of a log that begins with "::" for a command, and "##[" anywhere in it.
    line = brief(text, limit).replace("##[", "# #[")
    return line.replace("::", ": :", 1) if line.lstrip().startswith("::") else line


def who(finding: Finding) -> str:
    """The sample's id, as people see it."""
    return clean(identifier(finding.id))


def sentence(finding: Finding) -> str:
    """The sample and the message, with the reasons that the message does not give."""
    reasons = [reason for reason in finding.reasons if reason not in finding.message]
    group = f"; group {finding.group}" if finding.group not in (None, "all") else ""
    return clean(
        f"sample {who(finding)}: {finding.message}{''.join(f'; {reason}' for reason in reasons)}{group}"
    )


def location(finding: Finding) -> str:
    """path:line, or the path."""
    line = finding.location.line
    return clean(finding.location.path) + ("" if line is None else f":{line}")


def outcome_line(outcome: GateOutcome) -> str:
    """One line on one rule of the gate."""
    return f"{VERDICTS[outcome.outcome]} {outcome.rule}: {clean(outcome.message)}"


def headline(result: CheckResult) -> str:
    """The verdict in a sentence."""
    verdict = {0: "the gate is passed", 1: "the gate is failed", 4: "the gate can't be evaluated"}[
        result.exit_code
    ]
    partial = "PARTIAL run: " if result.facts.partial else ""
    return f"{partial}{verdict}, {count(result.samples)}; {counts_line(result)}"


def counts_line(result: CheckResult) -> str:
    """How many findings of each rule, and how many of these are known or ignored."""
    parts = []
    for rule in result.facts.counts:
        total = result.count(rule)
        if total:
            apart = [
                f"{result.count(rule, state):,} {state}"
                for state in ("known", "ignored")
                if result.count(rule, state)
            ]
            parts.append(f"{rule} {total:,}" + (f" ({', '.join(apart)})" if apart else ""))
    return ", ".join(parts) or "no findings"


def more(left: int, where: str = "findings.jsonl in the run folder") -> str:
    """That there are others, and where."""
    return f"and {left:,} more, see {where}"


def counting(findings: Sequence[Finding]) -> list[Finding]:
    """The findings that nobody has accepted: neither in the baseline nor ignored."""
    return [finding for finding in findings if finding.state == "new"]


SHOWN_IN_TERMINAL = 20
_HEADINGS = {"grad_norm": "gradient norm", "q_value": "q-value"}
_LEFT_OUT = ("p_value", "outlier_score")
"""Of a finding's values: both say what the q-value and the reasons say."""


def render_terminal(result: CheckResult) -> str:
    """The outcomes, the warnings, and the first new findings: a table for each rule, which says once what the
    rule says.
    """
    lines = io.StringIO()
    lines.write(f"{headline(result)}\n")
    lines.writelines(f"{outcome_line(outcome)}\n" for outcome in result.outcomes)
    lines.writelines(f"warning: {clean(warning)}\n" for warning in result.warnings)
    new = counting(result.findings)
    for (level, rule, path), found in groupby(
        new[:SHOWN_IN_TERMINAL], lambda each: (each.level, each.rule, each.location.path)
    ):
        lines.write(f"{clean(f'{level} {rule}, in {path}: {RULES.get(rule, rule)}')}\n")
        print_table(_findings_table(list(found)), lines)
    left = result.count(state="new") - min(len(new), SHOWN_IN_TERMINAL)
    if left > 0:
        lines.write(f"{more(left)}\n")
    return lines.getvalue()


def _findings_table(found: Sequence[Finding]) -> Table:
    """The sample, and the numbers and reasons that bear on it; columns without a value are left out."""
    columns = [TableColumn("id", who)]
    if any(each.location.line is not None for each in found):
        columns.append(TableColumn("line", lambda each: str(each.location.line or ""), True))
    known = (name for each in found for name, value in each.values.items() if value is not None)
    for name in dict.fromkeys(known):
        if name not in _LEFT_OUT:
            columns.append(TableColumn(_HEADINGS.get(name, clean(name)), _number_of(name), True))
    if any(each.group not in (None, "all") for each in found):
        columns.append(TableColumn("group", lambda each: clean(each.group or "")))
    if any(each.reasons for each in found):
        columns.append(TableColumn("reasons", lambda each: clean("; ".join(each.reasons))))
    return table("", "Findings", columns, found)


def _number_of(name: str) -> Writer:
    return lambda each: number(each.values.get(name))


SHOWN_IN_MARKDOWN = 100
COMMENT_BYTES = 60_000  # bytes; a comment of GitHub may have 65,536 letters
_KEPT = frozenset(" ;=")  # beside letters and digits: no sign of Markdown is made of these


def render_markdown(result: CheckResult, limit: int = COMMENT_BYTES) -> str:
    """Markdown for a step's summary or a comment: the outcomes and the first new findings, as many as fit in
    `limit` bytes. No text of the data is a link, a mention, a table's end or HTML.
    """
    lines = [f"### psgrad: {plain(headline(result))}", "", "| gate | verdict | |", "| --- | --- | --- |"]
    lines += [
        f"| {plain(each.rule)} | {VERDICTS[each.outcome]} | {plain(clean(each.message))} |"
        for each in result.outcomes
    ]
    lines += [
        "",
        *(f"- warning: {plain(clean(warning))}" for warning in result.warnings[:SHOWN_IN_MARKDOWN]),
        "",
    ]
    new = counting(result.findings)
    rows = [
        f"| {each.level} | {plain(each.rule)} | {code(location(each))} | {code(sentence(each))} |"
        for each in new[:SHOWN_IN_MARKDOWN]
    ]
    table = ["| level | rule | where | finding |", "| --- | --- | --- | --- |"] if rows else []
    left = limit - sum(len(line.encode()) + 1 for line in (*lines, *table)) - 200
    taken = 0
    while taken < len(rows) and (left := left - len(rows[taken].encode()) - 1) >= 0:
        taken += 1
    total = result.count(state="new")
    last = ["", more(total - taken)] if total > taken else []
    text = "\n".join([*lines, *(table if taken else []), *rows[:taken], *last]) + "\n"
    return text if len(text.encode()) <= limit else ""


def plain(text: str) -> str:
    """The text as text: every sign that Markdown or HTML may take for more than itself is written by its
    number.
    """
    return "".join(letter if letter.isalnum() or letter in _KEPT else f"&#{ord(letter)};" for letter in text)


def code(text: str) -> str:
    # In code nobody is mentioned, and nothing is linked.
    return f"<code>{plain(text)}</code>"


# GitHub keeps ten annotations of a kind for a step, and fifty for a job. It drops the rest without a message.
# It refuses a summary of more than 1 MiB.
ANNOTATIONS = 9  # and one that says how many more there are
SUMMARY_BYTES = 1 << 20


def render_github(result: CheckResult) -> str:
    """Workflow commands of GitHub Actions, which become annotations: the outcomes that are not passed, then
    the most severe new findings that are errors or warnings. The review list is in the summary.
    """
    annotations = [
        _command(
            "error", clean(outcome.message), title=f"psgrad gate: {outcome.rule} {VERDICTS[outcome.outcome]}"
        )
        for outcome in result.outcomes
        if outcome.outcome != "passed"
    ]
    severe = [finding for finding in counting(result.findings) if finding.level != "note"]
    total = sum(result.count(rule, "new") for rule in {finding.rule for finding in severe})
    shown = severe[: max(0, ANNOTATIONS - len(annotations))]
    for finding in shown:
        where = {
            "file": clean(finding.location.path),
            "line": finding.location.line,
            "title": f"psgrad: {finding.rule}",
        }
        annotations.append(_command(finding.level, sentence(finding), **where))
    if total > len(shown):
        annotations.append(
            _command(
                "notice", more(total - len(shown), "the step's summary and findings.jsonl"), title="psgrad"
            )
        )
    lines = [
        headline(result),
        *map(outcome_line, result.outcomes),
        *(f"warning: {clean(each)}" for each in result.warnings),
    ]
    return "\n".join([*(f"psgrad: {line}" for line in lines), *annotations]) + "\n"


def write_summary(result: CheckResult, path: Path) -> None:
    """Append to the step's summary what there is room for. Raises OSError."""
    taken = path.stat().st_size if path.exists() else 0
    text = render_markdown(result, SUMMARY_BYTES - taken)
    with path.open("a", encoding="utf-8", newline="\n") as file:
        file.write(text)


def _command(kind: str, message: str, **properties: str | int | None) -> str:
    given = ",".join(
        f"{name}={_property_text(str(value))}" for name, value in properties.items() if value is not None
    )
    return f"::{kind} {given}::{_escaped(message)}"


def _escaped(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property_text(text: str) -> str:
    return _escaped(text).replace(":", "%3A").replace(",", "%2C")
