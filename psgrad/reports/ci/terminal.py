"""A verdict in a terminal or in a log."""

from __future__ import annotations

import io
from collections.abc import Sequence
from itertools import groupby

from psgrad.reports.ci.words import clean, counting, headline, more, outcome_line, who
from psgrad.reports.tables import Column, Table, Writer, table
from psgrad.reports.terminal import print_table
from psgrad.reports.words import number
from psgrad.results import RULES, CheckResult, Finding

SHOWN = 20
_HEADINGS = {"grad_norm": "gradient norm", "q_value": "q-value"}
_LEFT_OUT = ("p_value", "outlier_score")
"""Of a finding's values: both say what the q-value and the reasons say."""


def render(result: CheckResult) -> str:
    """The outcomes, the warnings, and the first new findings: a table for each rule, which says once what the
    rule says.
    """
    lines = io.StringIO()
    lines.write(f"{headline(result)}\n")
    lines.writelines(f"{outcome_line(outcome)}\n" for outcome in result.outcomes)
    lines.writelines(f"warning: {clean(warning)}\n" for warning in result.warnings)
    new = counting(result.findings)
    for (level, rule, path), found in groupby(
        new[:SHOWN], lambda each: (each.level, each.rule, each.location.path)
    ):
        lines.write(f"{clean(f'{level} {rule}, in {path}: {RULES.get(rule, rule)}')}\n")
        print_table(_table(list(found)), lines)
    left = result.count(state="new") - min(len(new), SHOWN)
    if left > 0:
        lines.write(f"{more(left)}\n")
    return lines.getvalue()


def _table(found: Sequence[Finding]) -> Table:
    """The sample, and the numbers and reasons that bear on it; columns without a value are left out."""
    columns = [Column("id", who)]
    if any(each.location.line is not None for each in found):
        columns.append(Column("line", lambda each: str(each.location.line or ""), True))
    known = (name for each in found for name, value in each.values.items() if value is not None)
    for name in dict.fromkeys(known):
        if name not in _LEFT_OUT:
            columns.append(Column(_HEADINGS.get(name, clean(name)), _number_of(name), True))
    if any(each.group not in (None, "all") for each in found):
        columns.append(Column("group", lambda each: clean(each.group or "")))
    if any(each.reasons for each in found):
        columns.append(Column("reasons", lambda each: clean("; ".join(each.reasons))))
    return table("", "Findings", columns, found)


def _number_of(name: str) -> Writer:
    return lambda each: number(each.values.get(name))
