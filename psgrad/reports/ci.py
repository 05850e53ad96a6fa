"""A verdict in the formats of hosts, programs and people, by name, made of the entries of findings.jsonl and
check.json alone. What they say of findings and outcomes is one line, bounded, and harmless wherever it is
printed.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path, PurePath
from typing import Any
from urllib.parse import quote
from xml.etree import ElementTree as ET

from psgrad import __version__
from psgrad.reports.tables import Table, TableColumn, Writer, table
from psgrad.reports.terminal import print_table
from psgrad.reports.words import brief, count, identifier, number
from psgrad.run.results import RULES, CheckResult, Finding, GateOutcome
from psgrad.run.results.check import check_content, finding_content

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
    group = f"group {finding.group}" if finding.group not in (None, "all") else ""
    return clean("; ".join(filter(None, (f"sample {who(finding)}: {finding.message}", *reasons, group))))


def location(finding: Finding) -> str:
    """path:line, or the path."""
    line = finding.location.line
    return clean(finding.location.path) + ("" if line is None else f":{line}")


def headline(result: CheckResult) -> str:
    """The verdict in a sentence, with how many findings of each rule there are, and how many of these are
    known or ignored.
    """
    verdicts = {0: "the gate is passed", 1: "the gate is failed", 4: "the gate can't be evaluated"}
    partial, parts = "PARTIAL run: " if result.facts.partial else "", []
    for rule in result.facts.counts:
        states = [(state, result.count(rule, state)) for state in ("known", "ignored")]
        apart = ", ".join(f"{n:,} {state}" for state, n in states if n)
        if total := result.count(rule):
            parts.append(f"{rule} {total:,}" + (f" ({apart})" if apart else ""))
    counts = ", ".join(parts) or "no findings"
    return f"{partial}{verdicts[result.exit_code]}, {count(result.samples)}; {counts}"


def verdict_lines(result: CheckResult) -> list[str]:
    """The verdict, a line for each rule of the gate, and the warnings."""
    outcomes = [f"{VERDICTS[each.outcome]} {each.rule}: {clean(each.message)}" for each in result.outcomes]
    return [headline(result), *outcomes, *(f"warning: {clean(each)}" for each in result.warnings)]


def more(left: int, where: str = "findings.jsonl in the run folder") -> str:
    """That there are others, and where."""
    return f"and {left:,} more, see {where}"


def _new(findings: Sequence[Finding]) -> list[Finding]:
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
    lines.writelines(f"{line}\n" for line in verdict_lines(result))
    new = _new(result.findings)
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


def render_json(result: CheckResult) -> str:
    """All of a verdict as one JSON object: check.json with every finding that is kept. ASCII alone, so that
    no text in it can be anything but text.
    """
    content = {**check_content(result), "findings": [finding_content(finding) for finding in result.findings]}
    return json.dumps(content, indent=2, allow_nan=False) + "\n"


SHOWN_IN_JUNIT = 20


def render_junit(result: CheckResult) -> str:
    """JUnit XML: a test case for each rule of the gate, not for each sample. A rule that failed is a failure,
    with the first findings in its body; one that could not be evaluated is an error.
    """
    outcomes = [outcome.outcome for outcome in result.outcomes]
    numbers = {
        "tests": str(len(outcomes)),
        "failures": str(outcomes.count("failed")),
        "errors": str(outcomes.count("not evaluable")),
        "time": "0",
    }
    root = ET.Element("testsuites", {"name": "psgrad", **numbers})
    suite = ET.SubElement(
        root, "testsuite", {"name": clean(f"psgrad check {result.run}"), **numbers, "skipped": "0"}
    )
    findings = {finding.fingerprint: finding for finding in result.findings}
    for outcome in result.outcomes:
        about = {"name": outcome.rule, "classname": "psgrad.gate", "time": "0"}
        case = ET.SubElement(suite, "testcase", about)
        if outcome.outcome != "passed":
            kind = "failure" if outcome.outcome == "failed" else "error"
            inside = ET.SubElement(case, kind, {"message": clean(outcome.message), "type": outcome.outcome})
            inside.text = _body(outcome, findings)
    warnings = [f"warning: {clean(each)}" for each in result.warnings]
    ET.SubElement(suite, "system-out").text = "\n".join([headline(result), *warnings])
    ET.indent(root)
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{ET.tostring(root, encoding="unicode")}\n'


def _body(outcome: GateOutcome, findings: dict[str, Finding]) -> str:
    shown = [findings[each] for each in outcome.findings[:SHOWN_IN_JUNIT] if each in findings]
    lines = [f"{location(finding)}: {sentence(finding)}" for finding in shown]
    left = int(outcome.found or 0) - len(shown)
    return "\n".join([clean(outcome.message), *lines, *([more(left)] if left > 0 else [])])


SARIF_RESULTS = 5_000
SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"

_SARIF_LEVELS = {
    "nonfinite": "error",
    "outlier": "warning",
    "leak": "warning",
    "zero-gradient": "warning",
    "changed-row": "warning",
    "review": "note",
}


def render_sarif(result: CheckResult) -> str:
    """SARIF 2.1.0 (OASIS standard): one run with a result for each finding, those that are ignored as
    suppressed ones. Of the results of a run GitHub's code scanning shows the first 5,000.
    """
    shown = result.findings[:SARIF_RESULTS]
    left = result.count() - len(shown)
    levels = ["note", *("note" if each.outcome == "passed" else "error" for each in result.outcomes)]
    levels += ["warning"] * len(result.warnings)
    notes = [*zip(levels, verdict_lines(result), strict=True)]
    notes += [("warning", f"{len(shown):,} findings are listed, {more(left)}")] if left > 0 else []
    rules = [
        {
            "id": rule,
            "name": "".join(part.capitalize() for part in rule.split("-")),
            "shortDescription": {"text": meaning[0].upper() + meaning[1:] + "."},
            "fullDescription": {"text": meaning[0].upper() + meaning[1:] + "."},
            "defaultConfiguration": {"level": _SARIF_LEVELS[rule]},
        }
        for rule, meaning in RULES.items()
    ]
    driver = {"name": "psgrad", "version": __version__, "semanticVersion": __version__, "rules": rules}
    run = {
        "tool": {"driver": driver},
        "columnKind": "unicodeCodePoints",
        "invocations": [
            {
                "executionSuccessful": True,
                "exitCode": result.exit_code,
                "toolExecutionNotifications": [
                    {"level": level, "message": {"text": text}} for level, text in notes
                ],
            }
        ],
        "results": [_result(finding, result.facts.baseline is not None) for finding in shown],
    }
    content = {"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}
    return json.dumps(content, indent=1, allow_nan=False) + "\n"


def _result(finding: Finding, with_baseline: bool) -> dict[str, Any]:
    path = clean(finding.location.path)
    uri = PurePath(path).as_uri() if PurePath(path).is_absolute() else quote(path)
    physical: dict[str, Any] = {"artifactLocation": {"uri": uri}}
    if finding.location.line is not None:
        physical["region"] = {"startLine": finding.location.line}
    found: dict[str, Any] = {
        "ruleId": finding.rule,
        "ruleIndex": list(RULES).index(finding.rule),
        "level": finding.level,
        "message": {"text": sentence(finding)},
        "locations": [
            {"physicalLocation": physical, "logicalLocations": [{"name": who(finding), "kind": "sample"}]}
        ],
        "partialFingerprints": {"psgrad/v1": finding.fingerprint},
        "properties": {"row": finding.index, **finding.values},
    }
    if with_baseline:
        found["baselineState"] = "unchanged" if finding.state == "known" else "new"
    if finding.state == "ignored":
        found["suppressions"] = [{"kind": "external", "justification": clean(finding.ignored_because or "")}]
    return found


SHOWN_IN_MARKDOWN = 100
COMMENT_BYTES = 60_000  # bytes; a comment of GitHub may have 65,536 letters
_KEPT = frozenset(" ;=")  # beside letters and digits: no sign of Markdown is made of these


def render_markdown(result: CheckResult, limit: int = COMMENT_BYTES) -> str:
    """Markdown for a step's summary or a comment: the outcomes and the first new findings, as many as fit in
    `limit` bytes. No text of the data is a link, a mention, a table's end or HTML.
    """
    lines = [f"### psgrad: {_plain(headline(result))}", "", "| gate | verdict | |", "| --- | --- | --- |"]
    lines += [
        f"| {_plain(each.rule)} | {VERDICTS[each.outcome]} | {_plain(clean(each.message))} |"
        for each in result.outcomes
    ]
    warnings = [f"- warning: {_plain(clean(each))}" for each in result.warnings[:SHOWN_IN_MARKDOWN]]
    lines += ["", *warnings, "", "| level | rule | where | finding |", "| --- | --- | --- | --- |"]
    rows = [
        f"| {each.level} | {_plain(each.rule)} | {_code(location(each))} | {_code(sentence(each))} |"
        for each in _new(result.findings)[:SHOWN_IN_MARKDOWN]
    ]
    left, total, taken = limit - len("\n".join(lines).encode()) - 200, result.count(state="new"), 0
    while taken < len(rows) and (left := left - len(rows[taken].encode()) - 1) >= 0:
        taken += 1
    last = ["", more(total - taken)] if total > taken else []
    text = "\n".join([*(lines if taken else lines[:-2]), *rows[:taken], *last]) + "\n"
    return text if len(text.encode()) <= limit else ""


def _plain(text: str) -> str:
    """The text as text: every sign that Markdown or HTML may take for more than itself is written by its
    number.
    """
    return "".join(letter if letter.isalnum() or letter in _KEPT else f"&#{ord(letter)};" for letter in text)


def _code(text: str) -> str:
    # In code nobody is mentioned, and nothing is linked.
    return f"<code>{_plain(text)}</code>"


# GitHub keeps ten annotations of a kind for a step, and fifty for a job. It drops the rest without a message.
# It refuses a summary of more than 1 MiB.
ANNOTATIONS = 9  # and one that says how many more there are
SUMMARY_BYTES = 1 << 20


def render_github(result: CheckResult) -> str:
    """Workflow commands of GitHub Actions, which become annotations: the outcomes that are not passed, then
    the most severe new findings that are errors or warnings. The review list is in the summary.
    """
    annotations = [
        _command("error", clean(each.message), title=f"psgrad gate: {each.rule} {VERDICTS[each.outcome]}")
        for each in result.outcomes
        if each.outcome != "passed"
    ]
    severe = [finding for finding in _new(result.findings) if finding.level != "note"]
    total = sum(result.count(rule, "new") for rule in {finding.rule for finding in severe})
    shown = severe[: max(0, ANNOTATIONS - len(annotations))]
    for finding in shown:
        where = {"file": clean(finding.location.path), "line": finding.location.line}
        words = sentence(finding)
        annotations.append(_command(finding.level, words, **where, title=f"psgrad: {finding.rule}"))
    if total > len(shown):
        words = more(total - len(shown), "the step's summary and findings.jsonl")
        annotations.append(_command("notice", words, title="psgrad"))
    return "\n".join([*(f"psgrad: {line}" for line in verdict_lines(result)), *annotations]) + "\n"


def write_summary(result: CheckResult, path: Path) -> None:
    """Append to the step's summary what there is room for. Raises OSError."""
    taken = path.stat().st_size if path.exists() else 0
    text = render_markdown(result, SUMMARY_BYTES - taken)
    with path.open("a", encoding="utf-8", newline="\n") as file:
        file.write(text)


def _command(kind: str, message: str, **properties: str | int | None) -> str:
    escaped = {name: _escaped(str(value)) for name, value in properties.items() if value is not None}
    given = ",".join(
        f"{name}={value.replace(':', '%3A').replace(',', '%2C')}" for name, value in escaped.items()
    )
    return f"::{kind} {given}::{_escaped(message)}"


def _escaped(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


FORMATS: dict[str, Callable[[CheckResult], str]] = {
    "terminal": render_terminal,
    "json": render_json,
    "junit": render_junit,
    "sarif": render_sarif,
    "github": render_github,
    "markdown": render_markdown,
}


def render_check(result: CheckResult, style: str) -> str:
    """A verdict in one of FORMATS."""
    return FORMATS[style](result)
