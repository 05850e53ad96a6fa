"""Results as notebooks show them: lines with the verdict, and a small table. All texts are escaped."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from numbers import Integral, Real
from typing import Any

import numpy as np
import pandas as pd

from psgrad.wording import printable, shorten_middle

ROWS = 10
LETTERS = 60
MISSING = "–"


def cell(value: Any, names: Sequence[str] | None = None) -> str:
    """A value as text of HTML: numbers with four digits, a class by its name, long texts cut."""
    if np.ndim(value) == 0 and pd.isna(value):
        return MISSING
    if isinstance(value, Real) and not isinstance(value, bool) and float(value).is_integer():
        place = int(float(value))
        if names and 0 <= place < len(names):
            value = names[place]
        elif isinstance(value, Integral):
            value = str(place)
    if isinstance(value, Real) and not isinstance(value, bool):
        value = f"{float(value):.4g}"
    return html.escape(shorten_middle(printable(str(value)), LETTERS))


def page(lines: Iterable[str], headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Lines of text, and below them a table of cells that are HTML already."""
    said = "".join(f"<div>{html.escape(printable(line))}</div>" for line in lines)
    head = "".join(f"<th>{html.escape(heading)}</th>" for heading in headings)
    body = "".join(f"<tr>{''.join(f'<td>{each}</td>' for each in row)}</tr>" for row in rows)
    return f"<div>{said}<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
