"""docs/reference/measures.md: the part that lists all measures, from the classes of the measures.

`python -m tools.pages` writes it.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import textwrap
from pathlib import Path
from typing import Any

from psgrad.engine.measures.measure import Measure
from psgrad.plugins import MEASURES, own_classes
from tools.made_part import with_made_part

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "measures.md"


def generated() -> str:
    """The measures by what they cost, and a section for each."""
    measures = own_classes(MEASURES)
    costs: dict[str, list[str]] = {}
    for name, kind in measures.items():
        costs.setdefault(kind.cost, []).append(f"[`{name}`](#{name})")
    listed = "\n".join(f"- {', '.join(names)}: {cost}" for cost, names in costs.items())
    return "\n\n".join([listed, *map(_section, measures.values())]).replace("{loss}", "loss") + "\n"


def page(text: str) -> str:
    """The page with its generated part made again."""
    return with_made_part(text, "measures_page", f"\n{generated()}\n")


def _section(kind: type[Measure]) -> str:
    words, options = _docstring(kind)
    facts = [
        f"- Formula: `{kind.formula}`",
        *([] if kind.meanings else [f"- Unit: {kind.unit}"]),  # a column's meaning has its unit
        f"- Source: {kind.source}",
        *([f"- Needs: {', '.join(f'`{name}`' for name in kind.needs)}"] if kind.needs else []),
        *(f"- Column `{column}`: {meaning}" for column, meaning in kind.meanings.items()),
        *(f"- Option `{name}` (**`{default}`**): {meaning}" for name, default, meaning in options),
    ]
    return "\n\n".join([f"### `{kind.name}`", f"**{kind.title}.** {words}", "\n".join(facts)])


def _docstring(kind: type[Measure]) -> tuple[str, list[tuple[str, str, str]]]:
    """(the paragraphs of a class's docstring, one a line; its options: name, default, what it says of
    them).
    """
    before, _, listed = inspect.cleandoc(kind.__doc__ or "").partition("Options:\n")
    paragraphs = "\n\n".join(
        textwrap.fill(" ".join(each.split()), 140, break_on_hyphens=False)
        for each in before.strip().split("\n\n")
    )
    said: dict[str, str] = {}
    for found in re.finditer(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", listed, flags=re.MULTILINE):
        said[found[1]] = " ".join(found[2].split())
    fields: tuple[dataclasses.Field[Any], ...] = (
        dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else ()
    )
    return paragraphs, [
        (field.name, _default(field.default), said[field.name]) for field in fields if field.init
    ]


def _default(value: object) -> str:
    return (
        {True: "true", False: "false", None: "null"}[value]
        if value is None or isinstance(value, bool)
        else str(value)
    )
