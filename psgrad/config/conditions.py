"""Conditions on the columns of a table, such as `label == 3 and loss > 2`: nothing that runs code."""

from __future__ import annotations

import ast
from collections.abc import Collection

from psgrad.config.values import did_you_mean

_ALLOWED = (
    ast.Expression,
    ast.BoolOp,
    ast.And,
    ast.Or,
    ast.UnaryOp,
    ast.Not,
    ast.USub,
    ast.Compare,
    ast.Eq,
    ast.NotEq,
    ast.Lt,
    ast.LtE,
    ast.Gt,
    ast.GtE,
    ast.In,
    ast.NotIn,
    ast.Name,
    ast.Load,
    ast.Constant,
    ast.List,
    ast.Tuple,
)
_EXPECTED = "comparisons of columns with values, joined by and, or, not, such as label == 3 and loss > 2"


def names_in_condition(text: str, columns: Collection[str] | None = None) -> list[str]:
    """The columns that a condition reads. Raises ValueError for what is none, or names one not there."""
    try:
        tree = ast.parse(" ".join(text.split()), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        reason = error.msg if isinstance(error, SyntaxError) else str(error)
        raise ValueError(f"{text!r} is no condition ({reason}); expected {_EXPECTED}") from None
    for node in ast.walk(tree):
        plain = not isinstance(node, ast.Constant) or isinstance(node.value, str | int | float | bool)
        if not isinstance(node, _ALLOWED) or not plain:
            written = ast.get_source_segment(" ".join(text.split()), node) or type(node).__name__
            raise ValueError(
                f"{text!r} has {written!r}, which is no part of a condition; expected {_EXPECTED}"
            )
    names = list(dict.fromkeys(node.id for node in ast.walk(tree) if isinstance(node, ast.Name)))
    for name in names:
        if columns is not None and name not in columns:
            meant = did_you_mean(name, list(columns), before="", after=" ")
            raise ValueError(f"{text!r}: there is no column {name!r}; {meant}known: {', '.join(columns)}")
    return names
