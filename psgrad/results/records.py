"""A verdict and its findings as plain values: what findings.jsonl and check.json hold, and every CI format is made of."""

from __future__ import annotations

import dataclasses
from typing import Any

from psgrad.results.findings import CheckResult, Finding


def check_record(result: CheckResult) -> dict[str, Any]:
    """A verdict without its findings, as plain values."""
    return {
        "version": 1,
        "run": result.run,
        "samples": result.samples,
        "exit_code": result.exit_code,
        "outcomes": [dataclasses.asdict(outcome) for outcome in result.outcomes],
        "warnings": list(result.warnings),
        "facts": dict(result.facts),
    }


def finding_record(finding: Finding) -> dict[str, Any]:
    """A finding as a line of findings.jsonl, as plain values."""
    found = {field.name: getattr(finding, field.name) for field in dataclasses.fields(finding)}
    location = {"path": finding.location.path, "line": finding.location.line}
    return {**found, "location": location, "reasons": list(finding.reasons), "values": dict(finding.values)}
