"""The JSON Schema of a config, draft 7, which is what editors read to complete and check YAML.

What each key of a config means: the text below the field that it is, read from the source when it is needed
for it.

A config for people to begin with: what is set, and beside it every other key, commented out, with its default
and its meaning.
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterator, Mapping
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from psgrad.config.config import LOSS_OPTIONS, Config
from psgrad.config.plugin_options import Group, own_plugins
from psgrad.config.values import ConfigSection, sections_in
from psgrad.yaml12 import parse

FILLED_IN: Mapping[str, tuple[str, ...]] = {
    "Config": ("loss",),
    "PrivacyConfig": ("relation", "steps", "expected_batch_size"),
}
"""Keys without a default that validators fill in from others."""


def meanings(section: type[ConfigSection]) -> dict[str, str]:
    """key -> what it means in a sentence, of all keys of a section."""
    words = {name: " ".join((info.description or "").split()) for name, info in section.model_fields.items()}
    return {name: f"{text[:1].upper()}{text[1:].rstrip('.')}." for name, text in words.items()}


_PLACE = "#/definitions/"

_TEXT, _NULL, _AUTO = {"type": "string"}, {"type": "null"}, {"const": "auto"}
_TEXTS = {"type": "array", "items": _TEXT, "minItems": 1}
_PATHS = {"type": "array", "items": {"type": "string", "format": "path"}}
_CHECKPOINTS = {"type": "array", "items": {"$ref": f"{_PLACE}CheckpointConfig"}}
_SIZE = {"type": "string", "pattern": r"^\s*[0-9.]+\s*[A-Za-z]+\s*$"}

# Types that validators of single keys accept, in addition to the declared ones.
_ALSO_TAKEN: Mapping[str, Mapping[str, Any]] = {
    "EngineConfig.chunk_size": {"anyOf": [_AUTO, {"type": "integer", "minimum": 1}]},
    "EngineConfig.memory": {"anyOf": [_AUTO, {"type": "integer", "minimum": 1 << 20}, _SIZE]},
    "InfluenceConfig.parameters": {"anyOf": [_TEXT, _TEXTS, _NULL]},
    "AnalyzeConfig.checkpoints": {"anyOf": [_TEXT, _PATHS, _NULL]},
    "InfluenceConfig.checkpoints": {"anyOf": [_TEXT, _CHECKPOINTS, _NULL]},
    "PrivacyConfig.trainable": {"anyOf": [_TEXT, _TEXTS, _NULL]},
    "ModelConfig.adapter": {"anyOf": [_TEXT, _TEXTS, {"$ref": f"{_PLACE}NewAdapterConfig"}, _NULL]},
    "Config.version": {"const": 1},
}


def schema() -> dict[str, Any]:
    """What a config may hold, for editors: every key with its meaning, its default, and its values where they
    are few.

    It has single keys; rules that join several keys are checked by `psgrad validate`. Loss names are
    offered, not demanded, as a callable may stand in their place.
    """
    whole = Config.model_json_schema(ref_template=f"{_PLACE}{{model}}")
    definitions = whole.pop("$defs")
    _finish(Config, whole)
    for kind in sections():
        if kind.__name__ in definitions:
            _finish(kind, definitions[kind.__name__])
    definitions["LossConfig"]["properties"]["name"]["examples"] = list(LOSS_OPTIONS)
    for name, group in PLUGINS.items():
        definitions[name] = _with_plugins(definitions[name], group)
    for kind in sections():
        if kind.__name__ in definitions and kind.bare and kind.__name__ not in PLUGINS:
            bare = {**_TEXT, "examples": list(LOSS_OPTIONS)} if kind.__name__ == "LossConfig" else _TEXT
            definitions[kind.__name__] = {"anyOf": [bare, definitions[kind.__name__]]}
    head = {"$schema": "http://json-schema.org/draft-07/schema#", "title": "Config of psgrad"}
    found: dict[str, Any] = _for_draft_7({**whole, **head, "definitions": definitions})
    return found


PLUGINS: Mapping[str, Group] = {
    "MeasureConfig": "measures",
    "MethodConfig": "methods",
    "DetectorConfig": "detectors",
}
"""The sections that name a plugin, and its kind."""


def _with_plugins(content: dict[str, Any], group: Group) -> dict[str, Any]:
    """The definition of a section that names a plugin: a bare name, or the name with options."""
    own, name = own_plugins(group), content["properties"]["name"]
    outside = {**content, "properties": {"name": {**name, "not": {"enum": list(own)}}}, "required": ["name"]}
    known = [
        {
            "type": "object",
            "properties": {"name": {"const": each}, **plugin.options},
            "required": [] if each == name.get("default") else ["name"],
            "additionalProperties": False,
        }
        for each, plugin in own.items()
    ]
    return {"anyOf": [{**_TEXT, "examples": list(own)}, outside, *known]}


def sections(start: type[ConfigSection] = Config) -> list[type[ConfigSection]]:
    """A section and all sections inside it, each once."""
    found: list[type[ConfigSection]] = []
    waiting = [start]
    while waiting:
        kind = waiting.pop()
        if kind not in found:
            found.append(kind)
            waiting += [
                inside for info in kind.model_fields.values() for inside in sections_in(info.annotation)
            ]
    return found


def _finish(kind: type[ConfigSection], content: dict[str, Any]) -> None:
    content.pop("description", None)  # of the class, for programmers
    content["title"] = kind.__name__.removesuffix("Config") or "Config"
    for key, meaning in meanings(kind).items():
        found = content["properties"][key]
        also = _ALSO_TAKEN.get(f"{kind.__name__}.{key}")
        if also is not None:
            found = {**({"default": found["default"]} if "default" in found else {}), **also}
        found.pop("title", None)
        content["properties"][key] = {**found, "description": meaning}
    required = [key for key in content.get("required", []) if key not in FILLED_IN.get(kind.__name__, ())]
    content.pop("required", None)
    if required:
        content["required"] = required


def _for_draft_7(content: Any) -> Any:
    """Whatever stands beside a $ref is passed over in draft 7: the reference goes into a list of its own."""
    if isinstance(content, list):
        return [_for_draft_7(item) for item in content]
    if not isinstance(content, dict):
        return content
    inside = {key: _for_draft_7(value) for key, value in content.items()}
    if "$ref" in inside and len(inside) > 1:
        reference = inside.pop("$ref")
        return {**inside, "allOf": [{"$ref": reference}]}
    return inside


_WIDTH = 120
_INDENT = "  "


def commented(
    content: Mapping[str, Any], remarks: Mapping[str, str] | None = None, *, full: bool = True
) -> str:
    """The YAML text of a config with this content. `remarks` are sentences above its keys, by dotted name.

    With `full`, keys that are not in `content` stand in it as comments: without the first "# " a line sets
    that key to its default. A key that has no default stands without a value. All keys have their meaning.
    """
    if full:
        return "\n".join(_lines(Config, content, remarks or {}, "", "")).lstrip("\n") + "\n"
    lines: list[str] = []
    for key, value in content.items():
        lines += [f"## {line}" for line in textwrap.wrap((remarks or {}).get(key, ""), _WIDTH - 3)]
        inside = value.items() if isinstance(value, Mapping) else ()
        lines.append(f"{key}:" if inside else f"{key}: {_written(value)}")
        lines += [f"{_INDENT}{below}: {_written(each)}" for below, each in inside]
    return "\n".join(lines) + "\n"


def _lines(
    section: type[ConfigSection],
    content: Mapping[str, Any] | None,
    remarks: Mapping[str, str],
    above: str,
    indent: str,
) -> Iterator[str]:
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
        filled = key in FILLED_IN.get(section.__name__, ())
        meaning = told[key] if active else _meaning(told[key], info, filled)
        value = content[key] if active and content is not None else None
        if inside is None or (active and not isinstance(value, Mapping)):
            shown = _written(value) if active else _default(info)
            yield from _key(off, indent, f"{key}: {shown}".rstrip(), meaning)
            continue
        yield from _key(off, indent, f"{key}:", meaning)
        deeper = indent + _INDENT * (2 if listed else 1)
        below = list(_lines(inside, value if active else None, remarks, f"{dotted}.", deeper))
        yield from _as_item(below, indent) if listed else below


def _key(off: str, indent: str, text: str, meaning: str) -> Iterator[str]:
    line = f"{off}{indent}{text}"
    if len(line) + 4 + len(meaning) <= _WIDTH:
        yield f"{line}  # {meaning}"
        return
    width = _WIDTH - len(off) - len(indent) - 2
    yield from (f"{off}{indent}# {part}" for part in textwrap.wrap(meaning, width))
    yield line


def _as_item(lines: list[str], indent: str) -> Iterator[str]:
    """The lines of a section as the one item of a list."""
    comment = f"# {indent}{_INDENT * 2}#"
    first = next(place for place, line in enumerate(lines) if not line.startswith(comment))
    for place, line in enumerate(lines):
        start = len("# " + indent + _INDENT)
        yield f"{line[:start]}- {line[start + 2 :]}" if place == first else line


def _inside(annotation: Any) -> tuple[type[ConfigSection] | None, bool]:
    """(the section that a key holds or lists, whether it lists them); not one among a mapping's values."""
    kinds = _alternatives(annotation)
    found = next((each for kind in kinds if get_origin(kind) is not dict for each in sections_in(kind)), None)
    return found, found is not None and found not in kinds


def _alternatives(annotation: Any) -> list[Any]:
    """The types of a union, and of unions in it, without what else is said of them."""
    if get_origin(annotation) is Annotated:
        return _alternatives(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return [kind for part in get_args(annotation) for kind in _alternatives(part)]
    return [annotation]


def _meaning(meaning: str, info: FieldInfo, filled: bool) -> str:
    """What a key that is not set means, and which values it takes where they are few."""
    if info.is_required():
        return meaning if filled else f"Required. {meaning}"
    inside, listed = _inside(info.annotation)
    if inside is not None and (listed or info.default is None):
        return f"{'None' if listed else 'Left out'} by default. {meaning}"
    few = [
        value
        for kind in (info.annotation, *get_args(info.annotation))
        for value in get_args(kind)
        if isinstance(value, str)
    ]
    known = len(few) < 2 or all(re.search(rf"\b{re.escape(choice)}\b", meaning) for choice in few)
    return meaning if known else f"{meaning[:-1]} ({', '.join(few)})."


def _default(info: FieldInfo) -> str:
    default = info.get_default(call_default_factory=True)
    return "" if default is PydanticUndefined else _written(default)


def _written(value: Any) -> str:
    """A value as YAML in one line."""
    if isinstance(value, ConfigSection):
        value = value.model_dump(mode="json")
    if isinstance(value, str):
        plain = value and all(each.isalnum() or each in "._-/:" for each in value)
        # Text that YAML could read as another type is quoted.
        special = (
            value.startswith("-") or value.endswith(":") or not isinstance(parse(value, "").content, str)
        )
        return value if plain and not special else json.dumps(value, ensure_ascii=False)
    if isinstance(value, list):
        return f"[{', '.join(map(_written, value))}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{_written(key)}: {_written(item)}' for key, item in value.items())}}}"
    return json.dumps(value)
