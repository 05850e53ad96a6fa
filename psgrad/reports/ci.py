"""A verdict in the formats of hosts and shells, by name. All are made of the entries of findings.jsonl and
check.json alone.
"""

from __future__ import annotations

from collections.abc import Callable

from psgrad.reports.ci_data import render_csv, render_gitlab, render_json, render_junit, render_sarif
from psgrad.reports.ci_text import render_github, render_markdown, render_terminal
from psgrad.results import CheckResult

FORMATS: dict[str, Callable[[CheckResult], str]] = {
    "terminal": render_terminal,
    "json": render_json,
    "csv": render_csv,
    "junit": render_junit,
    "sarif": render_sarif,
    "github": render_github,
    "gitlab": render_gitlab,
    "markdown": render_markdown,
}


def render_check(result: CheckResult, style: str) -> str:
    """A verdict in one of FORMATS."""
    return FORMATS[style](result)
