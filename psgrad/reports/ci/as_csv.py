"""A line a finding, for spreadsheets: no cell is run as a formula."""

from __future__ import annotations

import csv
import io

from psgrad.reports.ci.words import clean
from psgrad.results import CheckResult

_FORMULA_STARTS = ("=", "+", "-", "@")
_COLUMNS = (
    "rule",
    "level",
    "state",
    "id",
    "index",
    "path",
    "line",
    "fingerprint",
    "message",
    "reasons",
    "group",
    "ignored_because",
)


def render(result: CheckResult) -> str:
    """Every finding that is kept, and its numbers."""
    numbers = list(dict.fromkeys(column for finding in result.findings for column in finding.values))
    lines = io.StringIO()
    writer = csv.writer(lines, lineterminator="\n")
    writer.writerow([*_COLUMNS, *map(cell, numbers)])
    for finding in result.findings:
        texts = (
            finding.rule,
            finding.level,
            finding.state,
            finding.id,
            finding.index,
            finding.location.path,
            finding.location.line,
        )
        rest = (
            finding.fingerprint,
            finding.message,
            "; ".join(finding.reasons),
            finding.group,
            finding.ignored_because,
        )
        writer.writerow(
            [*map(cell, (*texts, *rest)), *(_number(finding.values.get(column)) for column in numbers)]
        )
    return lines.getvalue()


def cell(value: object) -> object:
    if value is None or isinstance(value, int):
        return value
    text = clean(str(value), 1000)
    return f"'{text}" if text.lstrip().startswith(_FORMULA_STARTS) else text


def _number(value: float | None) -> str:
    return "" if value is None else repr(value)
