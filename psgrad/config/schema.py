"""The JSON Schema of a config, draft 7, which is what editors read to complete and check YAML."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from psgrad.config.describing import FILLED_IN, meanings, sections_in, takes_bare_text
from psgrad.config.sections import LOSS_OPTIONS
from psgrad.config.values import Section
from psgrad.config.whole import Config

_PLACE = "#/definitions/"

# What validators of single keys take besides the types that they are declared with.
_ALSO_TAKEN: Mapping[str, Mapping[str, Any]] = {
    "EngineConfig.chunk_size": {"anyOf": [{"const": "auto"}, {"type": "integer", "minimum": 1}]},
    "EngineConfig.memory": {
        "anyOf": [{"const": "auto"}, {"type": "integer", "minimum": 1 << 20}, {"type": "string", "pattern": r"^\s*[0-9.]+\s*[A-Za-z]+\s*$"}]
    },
    "InfluenceConfig.parameters": {
        "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}, "minItems": 1}, {"type": "null"}]
    },
    "PrivacyConfig.trainable": {
        "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}, "minItems": 1}, {"type": "null"}]
    },
    "Config.version": {"const": 1},
}


def schema() -> dict[str, Any]:
    """What a config may hold, for editors: every key with its meaning, its default, and its values where they are few.

    It knows single keys; rules that join several keys are checked by `psgrad validate`. Loss names are offered, not demanded, as a
    callable may stand in their place.
    """
    whole = Config.model_json_schema(ref_template=f"{_PLACE}{{model}}")
    definitions = whole.pop("$defs")
    _finish(Config, whole)
    for kind in sections():
        if kind.__name__ in definitions:
            _finish(kind, definitions[kind.__name__])
    definitions["LossConfig"]["properties"]["name"]["examples"] = list(LOSS_OPTIONS)
    for kind in sections():
        if kind.__name__ in definitions and takes_bare_text(kind):
            bare = {"type": "string", "examples": list(LOSS_OPTIONS)} if kind.__name__ == "LossConfig" else {"type": "string"}
            definitions[kind.__name__] = {"anyOf": [bare, definitions[kind.__name__]]}
    head = {"$schema": "http://json-schema.org/draft-07/schema#", "title": "Config of psgrad"}
    found: dict[str, Any] = _for_draft_7({**whole, **head, "definitions": definitions})
    return found


def sections(start: type[Section] = Config) -> list[type[Section]]:
    """A section and all sections inside it, each once."""
    found: list[type[Section]] = []
    waiting = [start]
    while waiting:
        kind = waiting.pop()
        if kind not in found:
            found.append(kind)
            waiting += [inside for info in kind.model_fields.values() for inside in sections_in(info.annotation)]
    return found


def _finish(kind: type[Section], content: dict[str, Any]) -> None:
    content.pop("description", None)  # of the class, for programmers
    content["title"] = kind.__name__.removesuffix("Config") or "Config"
    for key, meaning in meanings(kind).items():
        found = content["properties"][key]
        also = _ALSO_TAKEN.get(f"{kind.__name__}.{key}")
        if also is not None:
            found = {**({"default": found["default"]} if "default" in found else {}), **also}
        found.pop("title", None)
        content["properties"][key] = {"description": meaning, **found}
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
