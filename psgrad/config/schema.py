"""The JSON Schema of a config, which is what editors read to complete and check YAML; and the text of a
config for people to begin with.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any, get_args, get_origin

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from psgrad.config.config import Config
from psgrad.config.values import ConfigSection, meaning, sections_in
from psgrad.yaml12 import parse


def schema() -> dict[str, Any]:
    """What a config may hold, for editors: every key with its meaning, its default, and its values where they
    are few.

    It has single keys; rules that join several keys, and the options of plugins, are checked by `psgrad
    validate`.
    """
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema"}
    return {**head, **Config.model_json_schema(), "title": "Config of psgrad"}


def sections(start: type[ConfigSection] = Config) -> list[type[ConfigSection]]:
    """A section and all sections inside it, each once."""
    found: list[type[ConfigSection]] = []
    waiting = [start]
    while waiting:
        kind = waiting.pop()
        if kind not in found:
            found.append(kind)
            waiting += [each for info in kind.model_fields.values() for each in sections_in(info.annotation)]
    return found


_WIDTH = 110


def commented(content: Mapping[str, Any], remarks: Mapping[str, str], *, full: bool = True) -> str:
    """The YAML text of a config with this content. `remarks` are sentences above its outermost keys.

    With `full`, keys that are not in `content` stand in it as comments: without the first "# " a line sets
    that key to its default. A key that has no default stands without a value. All keys have their meaning.
    """
    if full:
        return "\n".join(_all_keys(Config, content, remarks, "")) + "\n"
    lines: list[str] = []
    for key, value in content.items():
        lines += [f"# {line}" for line in textwrap.wrap(remarks.get(key, ""), _WIDTH)]
        if isinstance(value, Mapping):
            lines += [f"{key}:", *(f"  {below}: {_written(each)}" for below, each in value.items())]
        else:
            lines.append(f"{key}: {_written(value)}")
    return "\n".join(lines) + "\n"


def _all_keys(
    section: type[ConfigSection], content: Mapping[str, Any] | None, remarks: Mapping[str, str], indent: str
) -> Iterator[str]:
    """The lines of a section's keys, each below its meaning; those that `content` has not are comments."""
    for key, info in section.model_fields.items():
        active = content is not None and key in content
        value = content[key] if active and content is not None else None
        inside = _inside(info.annotation)
        if not indent:
            yield from ["", *(f"## {line}" for line in textwrap.wrap(remarks.get(key, ""), _WIDTH))]
        yield from (
            f"{indent}## {line}"
            for line in textwrap.wrap(_with_default(info, key in section.filled_in), _WIDTH)
        )
        start = f"{'' if active else '# '}{indent}{key}:"
        if inside is None or (active and not isinstance(value, Mapping)):
            yield f"{start} {_written(value) if active else _default(info)}".rstrip()
            continue
        yield start
        yield from _all_keys(inside, value if active else None, {}, f"{indent}  ")


def _inside(annotation: Any) -> type[ConfigSection] | None:
    """The section that a key holds; None for a list of sections, and for a mapping to them."""
    if isinstance(annotation, type) and issubclass(annotation, ConfigSection):
        return annotation
    if get_origin(annotation) in (list, dict):
        return None
    return next(filter(None, map(_inside, get_args(annotation))), None)


def _with_default(info: FieldInfo, filled: bool) -> str:
    """What a key means, and that it has to be given where its section is."""
    return f"{meaning(info)}{' Required.' if info.is_required() and not filled else ''}"


def _default(info: FieldInfo) -> str:
    default = info.get_default(call_default_factory=True)
    return "" if default is PydanticUndefined else _written(default)


def _written(value: Any) -> str:
    """A value as YAML in one line."""
    if isinstance(value, str):
        plain = value and all(each.isalnum() or each in "._-/: " for each in value)
        # Text that YAML could read as another type is quoted.
        special = value.startswith("-") or value.endswith(":") or parse(value, "").content != value
        return value if plain and not special else json.dumps(value, ensure_ascii=False)
    if isinstance(value, list):
        return f"[{', '.join(map(_written, value))}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{_written(key)}: {_written(item)}' for key, item in value.items())}}}"
    return json.dumps(value)
