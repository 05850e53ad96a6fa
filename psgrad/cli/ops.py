"""`psgrad ops`: which operators have rules."""

from __future__ import annotations

import sys
from collections import Counter
from fnmatch import fnmatchcase
from operator import attrgetter
from typing import TYPE_CHECKING, Annotated

import typer

from psgrad.cli.options import AsJson
from psgrad.errors import ConfigError

if TYPE_CHECKING:
    from psgrad.engine.transforms.rules.registry import Coverage

Pattern = Annotated[
    str | None,
    typer.Argument(
        metavar="PATTERN",
        help="Only operators with this in their name; * and ? stand for any letters.",
        show_default=False,
    ),
]


def ops(
    pattern: Pattern = None,
    as_json: AsJson = False,
) -> None:
    """List PyTorch's operators, and the rule of each.

    "own rule" and "constant" (zero derivative): psgrad has a rule for the operator. "decomposed": it runs as
    a program of other operators, and is refused by name if one of those is. An in-place operator runs as the
    operator of the same name without the underscore. docs/reference/operators.md lists what was compared with
    PyTorch's own derivatives.
    """
    from psgrad.engine.transforms.rules.registry import Coverage, coverage
    from psgrad.reports.tables import TableColumn, table
    from psgrad.reports.terminal import print_table, write_json

    found = [row for row in coverage() if matches(row.operator, pattern)]
    if not found:
        raise ConfigError(
            f"no operator has {pattern!r} in its name; expected a part of a name as PyTorch writes it"
            " (aten::add.Tensor), or a pattern with * and ?",
            hint="psgrad ops without a pattern lists them all",
        )
    if as_json:
        write_json([row._asdict() for row in found], sys.stdout)
    else:
        columns = [TableColumn(name, attrgetter(name)) for name in Coverage._fields]
        print_table(table("list", "", columns, found), sys.stdout)
    typer.echo(summary(found), err=True)


def matches(name: str, pattern: str | None) -> bool:
    """Whether the pattern is in the name; one with * or ? has to fit all of it, or all behind the `::`."""
    if pattern is None or pattern in name:
        return True
    return any(fnmatchcase(part, pattern) for part in (name, name.split("::")[-1]))


def summary(rows: list[Coverage]) -> str:
    """How many operators, and how they are differentiated."""
    kinds = Counter(row.vjp for row in rows)
    return f"{len(rows):,} operators; VJP: " + ", ".join(
        f"{count:,} {kind}" for kind, count in kinds.most_common()
    )
