"""A verdict in the formats of hosts and shells, by name; and here those that programs read: JSON, JUnit and
SARIF. All are made of the entries of findings.jsonl and check.json alone.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import PurePath
from typing import Any
from urllib.parse import quote
from xml.etree import ElementTree as ET

from psgrad import __version__
from psgrad.reports.ci_text import (
    clean,
    headline,
    location,
    more,
    outcome_line,
    render_github,
    render_markdown,
    render_terminal,
    sentence,
    who,
)
from psgrad.run.results import RULES, CheckResult, Finding, GateOutcome
from psgrad.run.results.check import check_content
from psgrad.run.results.findings import finding_content


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
    failed = sum(outcome.outcome == "failed" for outcome in result.outcomes)
    errors = sum(outcome.outcome == "not evaluable" for outcome in result.outcomes)
    numbers = {
        "tests": str(len(result.outcomes)),
        "failures": str(failed),
        "errors": str(errors),
        "time": "0",
    }
    root = ET.Element("testsuites", {"name": "psgrad", **numbers})
    suite = ET.SubElement(
        root, "testsuite", {"name": clean(f"psgrad check {result.run}"), **numbers, "skipped": "0"}
    )
    findings = {finding.fingerprint: finding for finding in result.findings}
    for outcome in result.outcomes:
        case = ET.SubElement(
            suite, "testcase", {"name": outcome.rule, "classname": "psgrad.gate", "time": "0"}
        )
        if outcome.outcome != "passed":
            kind = "failure" if outcome.outcome == "failed" else "error"
            inside = ET.SubElement(case, kind, {"message": clean(outcome.message), "type": outcome.outcome})
            inside.text = _body(outcome, findings)
    ET.SubElement(suite, "system-out").text = "\n".join(
        [headline(result), *(f"warning: {clean(each)}" for each in result.warnings)]
    )
    ET.indent(root)
    return ET.tostring(root, encoding="unicode", xml_declaration=False).join(
        ['<?xml version="1.0" encoding="UTF-8"?>\n', "\n"]
    )


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
    "zero-gradient": "warning",
    "changed-row": "warning",
    "review": "note",
}
_RULE_INDEX = {rule: index for index, rule in enumerate(RULES)}


def render_sarif(result: CheckResult) -> str:
    """SARIF 2.1.0 (OASIS standard): one run with a result for each finding, those that are ignored as
    suppressed ones. Of the results of a run GitHub's code scanning shows the first 5,000.
    """
    shown = result.findings[:SARIF_RESULTS]
    left = result.count() - len(shown)
    notes = [("note", headline(result))]
    notes += [
        ("note" if each.outcome == "passed" else "error", outcome_line(each)) for each in result.outcomes
    ]
    notes += [("warning", clean(warning)) for warning in result.warnings]
    notes += [("warning", f"{len(shown):,} findings are listed, {more(left)}")] if left > 0 else []
    run = {
        "tool": {
            "driver": {
                "name": "psgrad",
                "version": __version__,
                "semanticVersion": __version__,
                "rules": _rules(),
            }
        },
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
    return (
        json.dumps({"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}, indent=1, allow_nan=False) + "\n"
    )


def _rules() -> list[dict[str, Any]]:
    return [
        {
            "id": rule,
            "name": "".join(part.capitalize() for part in rule.split("-")),
            "shortDescription": {"text": meaning[0].upper() + meaning[1:] + "."},
            "fullDescription": {"text": meaning[0].upper() + meaning[1:] + "."},
            "defaultConfiguration": {"level": _SARIF_LEVELS[rule]},
        }
        for rule, meaning in RULES.items()
    ]


def _result(finding: Finding, with_baseline: bool) -> dict[str, Any]:
    physical: dict[str, Any] = {"artifactLocation": {"uri": _uri(finding.location.path)}}
    if finding.location.line is not None:
        physical["region"] = {"startLine": finding.location.line}
    found: dict[str, Any] = {
        "ruleId": finding.rule,
        "ruleIndex": _RULE_INDEX[finding.rule],
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


def _uri(path: str) -> str:
    text = clean(path)
    return PurePath(text).as_uri() if PurePath(text).is_absolute() else quote(text)


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
