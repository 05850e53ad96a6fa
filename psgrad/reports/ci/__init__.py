"""A verdict in the formats of hosts and shells, one file a format. All are made of the entries of
findings.jsonl and check.json alone.
"""

from __future__ import annotations

import importlib

from psgrad.results import CheckResult

FORMATS = ("terminal", "json", "csv", "junit", "sarif", "github", "gitlab", "markdown")

_MODULES = {"json": "as_json", "csv": "as_csv"}  # names that the standard library has


def render_check(result: CheckResult, style: str) -> str:
    """A verdict in one of FORMATS. A format's module is imported when it is asked for."""
    module = importlib.import_module(f"{__name__}.{_MODULES.get(style, style)}")
    text: str = module.render(result)
    return text
