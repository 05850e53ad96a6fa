"""SARIF 2.1.0 (OASIS standard), as GitHub's code scanning takes it: of the results of a run it shows the
first 5,000.
"""

from __future__ import annotations

import json
from pathlib import PurePath
from typing import Any
from urllib.parse import quote

from psgrad import __version__
from psgrad.reports.ci.words import clean, headline, more, outcome_line, sentence, who
from psgrad.results import RULES, CheckResult, Finding

LIMIT = 5_000
SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"

_LEVELS = {"nonfinite": "error", "outlier": "warning", "zero-gradient": "warning", "review": "note"}
_PLACES = {rule: place for place, rule in enumerate(RULES)}


def render(result: CheckResult) -> str:
    """One run with a result for each finding, those that are ignored as suppressed ones."""
    shown = result.findings[:LIMIT]
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
            "defaultConfiguration": {"level": _LEVELS[rule]},
        }
        for rule, meaning in RULES.items()
    ]


def _result(finding: Finding, with_baseline: bool) -> dict[str, Any]:
    physical: dict[str, Any] = {"artifactLocation": {"uri": _uri(finding.location.path)}}
    if finding.location.line is not None:
        physical["region"] = {"startLine": finding.location.line}
    found: dict[str, Any] = {
        "ruleId": finding.rule,
        "ruleIndex": _PLACES[finding.rule],
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
