"""A config for people to begin with: what is set, and beside it every other key, commented out, with its default and its meaning."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any, get_args, get_origin

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from psgrad.config.describing import FILLED_IN, meanings, sections_in
from psgrad.config.values import Section
from psgrad.config.whole import Config
from psgrad.yaml12 import parse

_WIDTH = 120
_INDENT = "  "


def commented(content: Mapping[str, Any], remarks: Mapping[str, str] | None = None) -> str:
    """The YAML text of a config with this content.

    Keys that are not in `content` stand in it as comments: whoever takes the first "# " off a line sets that key to its default. A key
    that has no default stands without a value. `remarks` are sentences above the keys at the top, by name.
    """
    return "\n".join(_lines(Config, content, remarks or {}, "", "")).lstrip("\n") + "\n"


def _lines(section: type[Section], content: Mapping[str, Any] | None, remarks: Mapping[str, str], above: str, indent: str) -> Iterator[str]:
    """The lines of a section's keys; those of one that is not set (`content` None) are all comments."""
    told = meanings(section)
    for key, info in section.model_fields.items():
        dotted, active = f"{above}{key}", content is not None and key in content
        off = "" if active else "# "
        if not above:
            yield ""
        if dotted in remarks:
            yield from (f"## {line}" for line in textwrap.wrap(remarks[dotted], _WIDTH - 3))
        inside, listed = _inside(info.annotation)
        meaning = told[key] if active else _meaning(told[key], info, key in FILLED_IN.get(section.__name__, ()))
        value = content[key] if active and content is not None else None
        if inside is None or (active and not isinstance(value, Mapping)):
            shown = _written(value) if active else _default(info)
            yield from _key(off, indent, f"{key}: {shown}".rstrip(), meaning)
            continue
        yield from _key(off, indent, f"{key}:", meaning)
        below = list(_lines(inside, value if active else None, remarks, f"{dotted}.", indent + _INDENT * (2 if listed else 1)))
        yield from _as_item(below, indent) if listed else below


def _key(off: str, indent: str, text: str, meaning: str) -> Iterator[str]:
    line = f"{off}{indent}{text}"
    if len(line) + 4 + len(meaning) <= _WIDTH:
        yield f"{line}  # {meaning}"
        return
    yield from (f"{off}{indent}# {part}" for part in textwrap.wrap(meaning, _WIDTH - len(off) - len(indent) - 2))
    yield line


def _as_item(lines: list[str], indent: str) -> Iterator[str]:
    """The lines of a section as the one item of a list."""
    first = next(place for place, line in enumerate(lines) if not line.startswith(f"# {indent}{_INDENT * 2}#"))
    for place, line in enumerate(lines):
        start = len("# " + indent + _INDENT)
        yield f"{line[:start]}- {line[start + 2 :]}" if place == first else line


def _inside(annotation: Any) -> tuple[type[Section] | None, bool]:
    """(the section that a key holds or lists, whether it lists them)."""
    direct = [kind for kind in (annotation, *(() if get_origin(annotation) is list else get_args(annotation))) if isinstance(kind, type)]
    found = next(sections_in(annotation), None)
    return found, found is not None and found not in direct


def _meaning(meaning: str, info: FieldInfo, filled: bool) -> str:
    """What a key that is not set means, and which values it takes where they are few."""
    if info.is_required():
        return meaning if filled else f"Required. {meaning}"
    inside, listed = _inside(info.annotation)
    if inside is not None and (listed or info.default is None):
        return f"{'None' if listed else 'Left out'} by default. {meaning}"
    few = [value for kind in (info.annotation, *get_args(info.annotation)) for value in _choices(kind)]
    known = len(few) < 2 or all(re.search(rf"\b{re.escape(choice)}\b", meaning) for choice in few)
    return meaning if known else f"{meaning[:-1]} ({', '.join(few)})."


def _choices(kind: object) -> list[str]:
    return [value for value in get_args(kind) if isinstance(value, str)]


def _default(info: FieldInfo) -> str:
    default = info.get_default(call_default_factory=True)
    return "" if default is PydanticUndefined else _written(default)


def _written(value: Any) -> str:
    """A value as YAML in one line."""
    if isinstance(value, Section):
        value = value.model_dump(mode="json")
    if isinstance(value, str):
        plain = value and all(character.isalnum() or character in "._-/:" for character in value) and not value.startswith("-")
        # What YAML could take for something else than text is quoted.
        return value if plain and not _looks_special(value) else json.dumps(value, ensure_ascii=False)
    if isinstance(value, list):
        return f"[{', '.join(map(_written, value))}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{_written(key)}: {_written(item)}' for key, item in value.items())}}}"
    return json.dumps(value)


def _looks_special(text: str) -> bool:
    return text.endswith(":") or not isinstance(parse(text, "value").content, str)
