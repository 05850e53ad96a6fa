"""A verdict for who reads it in a terminal or in a log."""

from __future__ import annotations

import io

from rich.table import Table
from rich.text import Text

from psgrad.reports.ci.words import clean, counting, headline, more, outcome_line, place, sentence
from psgrad.reports.terminal import print_table
from psgrad.results import CheckResult

SHOWN = 20


def render(result: CheckResult) -> str:
    """The outcomes, the warnings, and the first new findings."""
    lines = io.StringIO()
    lines.write(f"{headline(result)}\n")
    lines.writelines(f"{outcome_line(outcome)}\n" for outcome in result.outcomes)
    lines.writelines(f"warning: {clean(warning)}\n" for warning in result.warnings)
    new = counting(result.findings)
    if new:
        table = Table(box=None, pad_edge=False, header_style="bold")
        for heading in ("level", "rule", "where", "finding"):
            table.add_column(heading, no_wrap=heading != "finding", overflow="fold")
        for finding in new[:SHOWN]:
            table.add_row(*map(Text, (finding.level, finding.rule, place(finding), sentence(finding))))
        print_table(table, lines)
    left = result.count(state="new") - min(len(new), SHOWN)
    if left > 0:
        lines.write(f"{more(left)}\n")
    return lines.getvalue()
