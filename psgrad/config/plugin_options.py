"""The plugins that a config can name, and their options, without importing them.

`plugin_options.json` describes those of psgrad; `python -m tools.pages` writes it from their classes. Those
of other packages are entry points, with the groups `psgrad.measures`, `psgrad.methods`, `psgrad.detectors`,
`psgrad.losses` and `psgrad.sources`. The name of an entry point is the name in a config; of a source, the
suffix of its files without the dot.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, reduce
from importlib.metadata import EntryPoint, entry_points
from operator import or_
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

Group = Literal["measures", "methods", "detectors", "losses", "sources"]
FILE = Path(__file__).with_suffix(".json")


@dataclass(frozen=True)
class Described:
    """A plugin of psgrad.

    Attributes:
        location: its class, as `module:Class`.
        options: option -> JSON Schema of its value, with `default`.
    """

    location: str
    options: Mapping[str, Mapping[str, Any]]


@cache
def own_plugins(group: Group) -> Mapping[str, Described]:
    """name -> plugin, of all that psgrad has of a kind, by name."""
    return {name: Described(**each) for name, each in json.loads(FILE.read_bytes())[group].items()}


@cache
def installed_plugins(group: Group) -> Mapping[str, EntryPoint]:
    """name -> entry point, of all that other packages have of a kind."""
    return {each.name: each for each in entry_points(group=f"psgrad.{group}")}


def plugin_names(group: Group) -> list[str]:
    """All names of a kind: those of psgrad first."""
    return list(dict.fromkeys([*own_plugins(group), *installed_plugins(group)]))


_TYPES: Mapping[str, type[Any] | None] = {
    "integer": int,
    "number": float,
    "string": str,
    "boolean": bool,
    "null": None,
}
_LIMITS = {"minimum": "ge", "exclusiveMinimum": "gt", "maximum": "le", "exclusiveMaximum": "lt"}


def type_of(schema: Mapping[str, Any]) -> Any:
    """The type, for pydantic, of the values that a JSON Schema describes; numbers are finite."""
    if "anyOf" in schema:
        return reduce(or_, map(type_of, schema["anyOf"]))
    if "enum" in schema:
        return Literal[tuple(schema["enum"])]
    if schema["type"] == "array":
        return list[type_of(schema["items"])]  # type: ignore[misc]
    limits: dict[str, Any] = {ours: schema[theirs] for theirs, ours in _LIMITS.items() if theirs in schema}
    if schema["type"] == "number":
        limits["allow_inf_nan"] = False
    kind = _TYPES[schema["type"]]
    return Annotated[kind, Field(**limits)] if limits else kind
