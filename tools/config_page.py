"""docs/reference/config.md: the part that lists every key of a config, from the config's models.

`python -m tools.pages` writes it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from psgrad.config import Config
from psgrad.config.schema import schema
from psgrad.config.values import ConfigSection, sections_in
from tools.made_part import with_made_part

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "config.md"
NAMES = {
    "integer": "whole number",
    "number": "number",
    "string": "text",
    "boolean": "true or false",
    "null": "null",
}


def page(text: str) -> str:
    """The page with its generated part made again."""
    return with_made_part(text, "config_page", f"\n{generated()}\n")


def generated() -> str:
    """A heading and a table of keys for each section, outer sections first."""
    content = schema()
    definitions = content["$defs"]
    parts = []
    for path, kind in sections(Config, ""):
        found = content if kind is Config else definition(definitions[kind.__name__])
        heading = f"### `{path}`\n\n" if path else ""
        required = found.get("required", [])
        rows = [row(path, key, each, key in required) for key, each in found["properties"].items()]
        parts.append("\n".join([f"{heading}| key | value | default | meaning |", "|---|---|---|---|", *rows]))
    return "\n\n".join(parts) + "\n"


def sections(kind: type[ConfigSection], path: str) -> Iterator[tuple[str, type[ConfigSection]]]:
    """(dotted path, section) of a section and of all sections inside it."""
    yield path, kind
    for key, info in kind.model_fields.items():
        below = f"{path}.{key}".lstrip(".")
        # The data of a reference have the keys of the config's own data, which are listed once.
        inside = (
            next(sections_in(info.annotation), None) if below != "analyze.outliers.reference.data" else None
        )
        if inside is not None:
            yield from sections(inside, below)


def definition(content: Mapping[str, Any]) -> Mapping[str, Any]:
    """The object among what a section may be: a section that takes a bare text too is a list of both."""
    return next((each for each in content.get("anyOf", []) if "properties" in each), content)


def row(path: str, key: str, content: Mapping[str, Any], required: bool) -> str:
    """One line of a table."""
    default = "required" if required else default_of(content)
    cells = (f"`{key}`", value_of(f"{path}.{key}".lstrip("."), content), default, content["description"])
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def default_of(content: Mapping[str, Any]) -> str:
    """The value of a key that is left out; empty for a section, whose keys have defaults of their own."""
    if "default" in content:
        return f"`{json.dumps(content['default'])}`"
    return {"array": "`[]`", "object": "`{}`"}.get(content.get("type", ""), "")


def value_of(path: str, content: Mapping[str, Any]) -> str:
    """What a key takes, in words."""
    if "const" in content:
        return f"`{content['const']}`"
    if "enum" in content:
        return ", ".join(f"`{each}`" for each in content["enum"])
    if "$ref" in content:
        target = path if path != "analyze.outliers.reference.data" else "data"
        return f"[section](#{target.replace('.', '')})"
    for joined in ("anyOf", "allOf"):
        if joined in content:
            return " or ".join(dict.fromkeys(value_of(path, each) for each in content[joined]))
    if content["type"] == "array":
        return f"list of: {value_of(path, content['items'])}"
    if content["type"] == "object":
        return "mapping"
    return " ".join([NAMES[content["type"]], *bounds(content)])


def bounds(content: Mapping[str, Any]) -> list[str]:
    """The limits of a number, in words."""
    words = {"minimum": "from", "exclusiveMinimum": "above", "maximum": "to", "exclusiveMaximum": "below"}
    return [f"{word} {content[limit]}" for limit, word in words.items() if limit in content]
