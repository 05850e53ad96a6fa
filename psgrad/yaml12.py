"""Reads the plain values of YAML 1.2, each with its line; no tags, and no aliases that expand without limit.

PyYAML parses; the table of plain scalars is our own. ruamel.yaml would not replace it: it reads `2024-01-01`
as a date, `1_000` as a number and `.5e2` as text, so that it needs the same table.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from psgrad.errors import ConfigError

KeyPath = tuple[str | int, ...]

_MAX_VALUES = (
    100_000  # after aliases are expanded; no config comes near, a bomb of nested aliases passes it at once
)
_MAX_DEPTH = 50
_TAG = "tag:yaml.org,2002:"


class _Yaml12Resolver(yaml.SafeLoader):
    """Reads plain scalars as YAML 1.2 does: `1e-3` is a float, and `no`, `1:30` and `2024-01-01` are
    strings.
    """

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 (PyYAML fills it)


for _kind, _pattern, _first in (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", list("-+0123456789")),
    ("float", r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?", list("-+.0123456789")),
    ("float", r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)", list("-+.")),
):
    _Yaml12Resolver.add_implicit_resolver(_TAG + _kind, re.compile(rf"^(?:{_pattern})$"), _first)


def _integer(text: str) -> int:
    return int(text, 0) if text.startswith(("0o", "0x")) else int(text)


def _float(text: str) -> float:
    return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))


_SCALARS: Mapping[str, Callable[[str], Any]] = {
    _TAG + "null": lambda text: None,
    _TAG + "bool": lambda text: {"true": True, "false": False}[text.lower()],
    _TAG + "int": _integer,
    _TAG + "float": _float,
    _TAG + "str": str,
}


@dataclass(frozen=True)
class Parsed:
    """A plain value, and the place (`source:line`) of each of its keys and items."""

    content: Any
    places: dict[KeyPath, str]


def parse(text: str, source: str) -> Parsed:
    """The value of one YAML document, aliases expanded; `source` is its name in messages.

    Raises ConfigError for what is not valid YAML, a duplicate key, a tag that names an object, and a bomb of
    aliases.
    """
    try:
        # The loader is SafeLoader's subclass, and only its composer runs: no object is ever constructed by
        # PyYAML.
        root = yaml.compose(text, Loader=_Yaml12Resolver)
        reader = _NodeReader(source)
        content = None if root is None else reader.read(root, ())
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{source}:{mark.line + 1}:{mark.column + 1}" if mark else source
        raise ConfigError(f"{place}: not valid YAML: {error.problem or error.context}") from error
    except (yaml.YAMLError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error).splitlines()[0]
        raise ConfigError(f"{source}: not valid YAML: {reason}") from error
    return Parsed(content, reader.places)


class _NodeReader:
    """Turns YAML nodes into plain values, and remembers where each stood."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.places: dict[KeyPath, str] = {}
        self.count = 0

    def read(self, node: yaml.Node, path: KeyPath) -> Any:
        self.count += 1
        if self.count > _MAX_VALUES or len(path) > _MAX_DEPTH:
            raise self._error(
                node,
                f"more than {_MAX_VALUES} values or {_MAX_DEPTH} levels once its aliases are expanded",
            )
        if isinstance(node, yaml.MappingNode) and node.tag == _TAG + "map":
            return self._mapping(node, path)
        if isinstance(node, yaml.SequenceNode) and node.tag == _TAG + "seq":
            return [self._item(item, item, (*path, index)) for index, item in enumerate(node.value)]
        return self._scalar(node)

    def _mapping(self, node: yaml.MappingNode, path: KeyPath) -> dict[Any, Any]:
        mapping: dict[Any, Any] = {}
        lines: dict[Any, int] = {}
        for key_node, value_node in node.value:
            key = self._scalar(key_node)
            if key in lines:
                raise self._error(key_node, f"the key {key!r} is already given in line {lines[key]}")
            lines[key] = key_node.start_mark.line + 1
            mapping[key] = self._item(key_node, value_node, (*path, key))
        return mapping

    def _item(self, marked: yaml.Node, value: yaml.Node, path: KeyPath) -> Any:
        self.places[path] = f"{self.source}:{marked.start_mark.line + 1}"
        return self.read(value, path)

    def _scalar(self, node: yaml.Node) -> Any:
        if not isinstance(node, yaml.ScalarNode):
            raise self._error(node, f"a plain value was expected here, not {_shown(node.tag)}")
        if node.tag not in _SCALARS:
            raise self._error(
                node, f"the tag {_shown(node.tag)} is not allowed; a config holds plain values only"
            )
        try:
            return _SCALARS[node.tag](node.value)
        except (ValueError, KeyError):
            kind = node.tag.removeprefix(_TAG)
            raise self._error(node, f"{node.value[:40]!r} is not a value of the type {kind}") from None

    def _error(self, node: yaml.Node, problem: str) -> yaml.MarkedYAMLError:
        return yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)


def _shown(tag: str) -> str:
    return tag.replace(_TAG, "!!")
