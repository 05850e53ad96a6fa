"""Reads the plain values of YAML 1.2, each with its line; no tags that name objects, and no aliases.

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

_TAG = "tag:yaml.org,2002:"
# type -> (what a plain scalar of it looks like, the letters that it begins with, its value)
_SCALARS: Mapping[str, tuple[str, str, Callable[[str], Any]]] = {
    "null": (r"~|null|Null|NULL|", "~nN", lambda text: None),
    "bool": (r"true|True|TRUE|false|False|FALSE", "tTfF", lambda text: text.lower() == "true"),
    "int": (
        r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+",
        "-+0123456789",
        lambda text: int(text, 0) if text.startswith(("0o", "0x")) else int(text),
    ),
    "float": (
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        "-+.0123456789",
        lambda text: float(text.lower().replace(".inf", "inf").replace(".nan", "nan")),
    ),
    "str": (r".*", "", str),
}


class _Yaml12(yaml.SafeLoader):
    """Composes nodes with the types of YAML 1.2: `1e-3` is a float, `no` and `2024-01-01` are strings."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 (PyYAML fills it)

    def compose_node(self, parent: Any, index: Any) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):  # type: ignore[no-untyped-call]
            event = self.get_event()  # type: ignore[no-untyped-call]
            problem = f"the alias *{event.anchor}; write the value itself: aliases are not read"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=event.start_mark)
        node: yaml.Node | None = super().compose_node(parent, index)
        return node


for _kind, (_pattern, _first, _) in _SCALARS.items():
    if _first:
        _letters = [*_first, ""] if _kind == "null" else list(_first)
        _Yaml12.add_implicit_resolver(_TAG + _kind, re.compile(rf"^(?:{_pattern})$"), _letters)


@dataclass(frozen=True)
class Parsed:
    """A plain value, and the place (`source:line`) of each of its keys and items."""

    content: Any
    places: dict[KeyPath, str]


def parse(text: str, source: str) -> Parsed:
    """The value of one YAML document; `source` is its name in messages.

    Raises ConfigError for what is not valid YAML, a duplicate key, an alias, and a tag that names an object.
    """
    places: dict[KeyPath, str] = {}
    try:
        root = yaml.compose(text, Loader=_Yaml12)  # nodes only: PyYAML never makes an object
        content = None if root is None else _value(root, (), source, places)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{source}:{mark.line + 1}:{mark.column + 1}" if mark else source
        raise ConfigError(f"{place}: not valid YAML: {error.problem or error.context}") from error
    except (yaml.YAMLError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error).splitlines()[0]
        raise ConfigError(f"{source}: not valid YAML: {reason}") from error
    return Parsed(content, places)


def _value(node: yaml.Node, path: KeyPath, source: str, places: dict[KeyPath, str]) -> Any:
    """The plain value of a node; adds the places of what is inside."""
    if isinstance(node, yaml.SequenceNode) and node.tag == _TAG + "seq":
        for index, item in enumerate(node.value):
            places[*path, index] = f"{source}:{item.start_mark.line + 1}"
        return [_value(item, (*path, index), source, places) for index, item in enumerate(node.value)]
    if not isinstance(node, yaml.MappingNode) or node.tag != _TAG + "map":
        return _scalar(node)
    found: dict[Any, Any] = {}
    for key_node, value_node in node.value:
        key = _scalar(key_node)
        if key in found:
            line = places[*path, key].rpartition(":")[2]
            raise _error(key_node, f"the key {key!r} is already given in line {line}")
        places[*path, key] = f"{source}:{key_node.start_mark.line + 1}"
        found[key] = _value(value_node, (*path, key), source, places)
    return found


def _scalar(node: yaml.Node) -> Any:
    kind = node.tag.removeprefix(_TAG)
    if not isinstance(node, yaml.ScalarNode) or kind not in _SCALARS:
        raise _error(node, f"a plain value was expected here, not {node.tag.replace(_TAG, '!!')}")
    try:
        if kind == "bool" and not re.fullmatch(_SCALARS[kind][0], node.value):
            raise ValueError
        return _SCALARS[kind][2](node.value)
    except ValueError:
        raise _error(node, f"{node.value[:40]!r} is not a value of the type {kind}") from None


def _error(node: yaml.Node, problem: str) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)
