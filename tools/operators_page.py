"""docs/reference/operators.md: how many of PyTorch's operators are right, and which are refused.

The numbers come from the refusals that tests/engine/transforms/refused.py lists; test_operators.py compares
that list with what the operators do. `python -m tools.pages` writes the page.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from tests.engine.transforms.derivatives import PUSH
from tests.engine.transforms.operators import entries
from tests.engine.transforms.refused import (
    REFUSED,
    UNJUDGED,
    UNJUDGED_MAPPED,
    UNJUDGED_PULLED,
    UNJUDGED_TWICE,
)
from tests.engine.transforms.sweep import ROWS, TWICE

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "operators.md"
MAPPED = frozenset(row for row in ROWS if ROWS[row].mapped)


def judged_rows(name: str, entry: Any) -> list[str]:
    """The rows that say something of an entry: those whose oracle exists; values alone where there is no
    derivative.
    """
    if name in UNJUDGED:
        return []
    rows = [row for row in ROWS if entry.supports_autograd or row in ("vjp", "vmap(vjp)")]
    if name in UNJUDGED_MAPPED:
        rows = [row for row in rows if row not in MAPPED]
    if name in UNJUDGED_PULLED:
        rows = [row for row in rows if ROWS[row].derivative is PUSH]
    if name in UNJUDGED_TWICE or not entry.supports_gradgrad:
        rows = [row for row in rows if row not in TWICE]
    return rows


def refused_rows(name: str, entry: Any) -> set[str]:
    """The rows in which some call of the entry is refused."""
    if name not in REFUSED:
        return set()
    rows = REFUSED[name].rows
    if rows is None:
        rows = frozenset(ROWS) if entry.supports_autograd else MAPPED
    return set(rows).intersection(judged_rows(name, entry))


TEMPLATE = """\
# PyTorch's operators: what is right, what is refused

`python -m tools.pages` makes this page; a test fails if it is out of date.

The tests run the {entries} entries of PyTorch's database of operators that have float64 through each row
of the table: the first four sample calls of an entry, the same calls in place, and writes through views.
Each result is compared with `torch.autograd` on one sample at a time, with a relative error of 1e-9. An entry
is *right* if all of its calls are right, and *refused* if one of them ends in an error that names the
operator. **No entry is wrong, and none ends in another error**: the tests fail in both cases.

| | entries | right | refused | right, percent |
|---|---|---|---|---|
{bars}

A row counts the entries that have a derivative in float64 and an oracle for the row.

## Refused

{refused}

## Not judged

{unjudged}
"""


class Count(NamedTuple):
    """How many entries a row judges, and how many of them are right."""

    entries: int
    right: int

    @property
    def percent(self) -> float:
        return 100 * self.right / self.entries


def counts() -> dict[str, Count]:
    """For each row, over the entries that have a derivative in float64 and an oracle for it."""
    database = {name: entry for name, entry in entries().items() if entry.supports_autograd}
    found = {}
    for row in ROWS:
        judged = [name for name, entry in database.items() if row in judged_rows(name, entry)]
        found[row] = Count(len(judged), sum(row not in refused_rows(name, database[name]) for name in judged))
    return found


def page(text: str) -> str:
    """The whole page; nothing of its present `text` stays."""
    database = entries()
    bars = [
        f"| `{row}` | {count.entries} | {count.right} | {count.entries - count.right} |"
        f" {_floored(count.percent)} |"
        for row, count in counts().items()
    ]
    refused = [
        (name, _named(refused_rows(name, entry), judged_rows(name, entry)), REFUSED[name].reason)
        for name, entry in database.items()
        if refused_rows(name, entry)
    ]
    groups = (
        ("all", UNJUDGED),
        ("under `vmap`", UNJUDGED_MAPPED),
        ("all but jvp", UNJUDGED_PULLED),
        ("second derivatives", UNJUDGED_TWICE),
    )
    unjudged = [(name, rows, reason) for rows, reasons in groups for name, reason in reasons.items()]
    return TEMPLATE.format(
        entries=len(database), bars="\n".join(bars), refused=_listed(refused), unjudged=_listed(unjudged)
    )


def _listed(entries: list[tuple[str, str, str]]) -> str:
    """A line for all entries (name, rows, reason) that have the same rows and the same reason."""
    found: dict[tuple[str, str], list[str]] = {}
    for name, rows, reason in entries:
        found.setdefault((rows, reason), []).append(f"`{name}`")
    return "\n".join(f"- {', '.join(names)} ({rows}): {reason}" for (rows, reason), names in found.items())


def _floored(percent: float) -> str:
    return f"{int(percent * 10) / 10:.1f}"


def _named(rows: set[str], judged: list[str]) -> str:
    if rows == set(judged):
        return "all"
    if rows == MAPPED.intersection(judged):
        return "all under `vmap`"
    return ", ".join(f"`{row}`" for row in judged if row in rows)
