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
    "integer": "integer",
    "number": "number",
    "string": "text",
    "boolean": "true or false",
    "null": "null",
}


def page(text: str) -> str:
    """The page with its generated part made again."""
    return with_made_part(text, "config_page", f"\n{generated()}\n")


def generated() -> str:
    """A heading and a list of keys for each section, outer sections first."""
    content = schema()
    definitions = content["$defs"]
    parts: list[str] = []
    before: dict[str, list[str]] = {}
    for path, kind in sections(Config, ""):
        found = content if kind is Config else definition(definitions[kind.__name__])
        required = found.get("required", [])
        rows = {key: row(path, key, each, key in required) for key, each in found["properties"].items()}
        if path:
            parts.append(f"### `{path}`")
        parts.append("\n".join(without_repeated(rows, before)))
        before[path] = list(rows.values())
    return "\n\n".join(parts) + "\n"


def without_repeated(rows: Mapping[str, str], before: Mapping[str, list[str]]) -> list[str]:
    """The lines of a section; keys that an earlier section has in the same words are named in one line."""
    for path, listed in before.items():
        repeated = [key for key, line in rows.items() if line in listed]
        if len(repeated) > 1 or len(repeated) == len(rows) > 0:
            names = ", ".join(f"`{key}`" for key in repeated)
            rest = [line for key, line in rows.items() if key not in repeated]
            if len(repeated) == len(listed) > 1:
                names = "all keys"
            return [f"- As in [`{path}`](#{path.replace('.', '')}): {names}.", *rest]
    return list(rows.values())


def sections(kind: type[ConfigSection], path: str) -> Iterator[tuple[str, type[ConfigSection]]]:
    """(dotted path, section) of a section and of all sections inside it."""
    yield path, kind
    for key, info in kind.model_fields.items():
        below = f"{path}.{key}".lstrip(".")
        inside = next(sections_in(info.annotation), None)
        if inside is not None:
            yield from sections(inside, below)


def definition(content: Mapping[str, Any]) -> Mapping[str, Any]:
    """The object among what a section may be: a section that takes a bare text too is a list of both."""
    return next((each for each in content.get("anyOf", []) if "properties" in each), content)


def row(path: str, key: str, content: Mapping[str, Any], required: bool) -> str:
    """One line of a list: the key, what it takes and its default, what it means."""
    inside = f"{path}.{key}".lstrip(".")
    facts = ["*required*"] if required else []
    default = content.get("default")
    values = value_of(inside, content, default)
    facts += [each for each in (values, default_of(values, default)) if each]
    name, brackets = f"`{key}`", f" ({', '.join(facts)})" if facts else ""
    # The page says once what paths are relative to.
    return f"- {name}{brackets}: {content['description'].replace(', relative to this config', '')}"


def default_of(values: str, default: Any) -> str:
    """The value of a key that is left out, in bold; empty where it is nothing or among the listed values."""
    written = f"**`{default if isinstance(default, str) else json.dumps(default)}`**"
    return "" if default in (None, [], {}) or written in values else written


def value_of(path: str, content: Mapping[str, Any], default: Any = None) -> str:
    """What a key takes, in words; empty for a text, and for a truth value whose default says it."""
    if "const" in content:
        return f"**`{default}`**" if content["const"] == default else f"`{content['const']}`"
    if "enum" in content:
        return " ".join(f"**`{each}`**" if each == default else f"`{each}`" for each in content["enum"])
    if "$ref" in content:
        return f"[section](#{path.replace('.', '')})"
    for joined in ("anyOf", "allOf"):
        if joined in content:
            parts = [value_of(path, each, default) or "text" for each in content[joined]]
            found = [each for each in dict.fromkeys(parts) if each != NAMES["null"]]
            return " or ".join(found) if found != ["text"] else ""
    if content["type"] == "array":
        return f"list of {value_of(path, content['items']) or 'text'}"
    if content["type"] == "object":
        return "mapping"
    if content["type"] == "boolean":
        return "" if default is not None else NAMES["boolean"]
    if content["type"] == "string":
        return ""
    shown = isinstance(default, (int, float)) and bounds(content)  # the default says which kind of number
    return " ".join([*([] if shown else [NAMES[content["type"]]]), *bounds(content)])


def bounds(content: Mapping[str, Any]) -> list[str]:
    """The limits of a number, in words."""
    words = {"minimum": "from", "exclusiveMinimum": "above", "maximum": "to", "exclusiveMaximum": "below"}
    return [f"{word} {content[limit]}" for limit, word in words.items() if limit in content]
