"""What the pages of the documentation show: their blocks of code, commands, tables; and stored results."""

from __future__ import annotations

import itertools
import json
import re
import shlex
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)


def block(text: str, language: str, words: str) -> str:
    """The one block of this language that has these words."""
    (found,) = (each for each in blocks(text, language) if words in each)
    return str(found)


def shown(text: str, words: str) -> tuple[list[str], list[str]]:
    """The arguments of the command of a page that has these words, and the lines below it."""
    command, *lines = next(
        block for block in blocks(text, "console") if words in block.partition("\n")[0]
    ).splitlines()
    return shlex.split(command.removeprefix("$ ")), lines


def table_below(text: str, title: str) -> list[list[str]]:
    """The rows of the first table below a title, or the table whose first line begins so, cell by cell."""
    lines = text[text.index(title) :].splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("|---"))
    rows = itertools.takewhile(lambda line: line.startswith("|"), lines[first + 1 :])
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in rows]


def table(text: str, first_line: str) -> list[list[str]]:
    """The cells of the table whose first line begins so, without its first column."""
    return [row[1:] for row in table_below(text, first_line)]


def stored(name: str) -> dict[str, Any]:
    """A stored result of the benchmarks."""
    path = ROOT / "benchmarks" / "results" / f"{name}.json"
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found
