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
    """A table of all measures, and a section for each."""
    measures = own_classes(MEASURES)
    rows = [
        f"| [`{name}`](#{_anchor(kind)}) | {_cell(kind.title)} | {_cell(kind.unit)} | {_cell(kind.cost)} |"
        for name, kind in measures.items()
    ]
    table = "\n".join(["| name | measure | unit | cost |", "|---|---|---|---|", *rows])
    return (
        "\n\n".join([table, *(_section(kind) for kind in measures.values())]).replace("{loss}", "loss") + "\n"
    )


def page(text: str) -> str:
    """The page with its generated part made again."""
    return with_made_part(text, "measures_page", f"\n{generated()}\n")


def _section(kind: type[Measure]) -> str:
    words, options = _docstring(kind)
    parts = [f"### {_heading(kind)}", words]
    facts = [
        f"- Formula: `{kind.formula}`",
        f"- Unit: {kind.unit}",
        f"- Cost: {kind.cost}",
        f"- Source: {kind.source}",
    ]
    if kind.needs:
        facts.append(f"- Runs by itself before: {', '.join(f'`{name}`' for name in kind.needs)}")
    parts.append("\n".join(facts))
    if kind.meanings:
        rows = [f"| `{column}` | {_cell(words)} |" for column, words in kind.meanings.items()]
        parts.append("\n".join(["| column | meaning |", "|---|---|", *rows]))
    if options:
        rows = [f"| `{name}` | `{default}` | {_cell(words)} |" for name, default, words in options]
        parts.append("\n".join(["| option | default | meaning |", "|---|---|---|", *rows]))
    return "\n\n".join(parts)


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


def _heading(kind: type[Measure]) -> str:
    return f"`{kind.name}`: {kind.title}"


def _anchor(kind: type[Measure]) -> str:
    """The heading's anchor, as hosts of Markdown make it."""
    return re.sub(r"[^\w\- ]", "", _heading(kind).lower()).replace(" ", "-")


def _cell(words: str) -> str:
    return words.replace("|", "\\|")
