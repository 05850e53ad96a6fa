"""JUnit XML: a test case for each rule of the gate, not for each sample."""

from __future__ import annotations

from xml.etree import ElementTree as ET

from psgrad.reports.ci.words import clean, headline, more, place, sentence
from psgrad.results import CheckResult, Finding, GateOutcome

SHOWN = 20


def render(result: CheckResult) -> str:
    """A rule that failed is a failure, with the first findings in its body; one that could not be evaluated
    is an error.
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
    shown = [findings[each] for each in outcome.findings[:SHOWN] if each in findings]
    lines = [f"{place(finding)}: {sentence(finding)}" for finding in shown]
    left = int(outcome.found or 0) - len(shown)
    return "\n".join([clean(outcome.message), *lines, *([more(left)] if left > 0 else [])])
