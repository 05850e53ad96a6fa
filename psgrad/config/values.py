"""The kinds of values that a config holds: how each is read from plain YAML, and what is said of one that
does not fit. Among them are conditions on the columns of a table, such as `label == 3 and loss > 2`, which
run no code.

Something that a config names, with options of its own, which are checked where the thing is known.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    field_validator,
    model_validator,
)
from pydantic.fields import FieldInfo

from psgrad.config.plugin_names import Group, plugin_names
from psgrad.errors import ConfigError
from psgrad.wording import did_you_mean


def is_callable_spec(text: str) -> bool:
    """Whether `text` has the form `module:callable` or `file.py:callable`."""
    location, _, name = text.rpartition(":")
    dotted = r"[^\W\d]\w*(\.[^\W\d]\w*)*"
    known_place = location.endswith(".py") or re.fullmatch(dotted, location)
    return bool(known_place and re.fullmatch(dotted, name))


def require_regular(path: Path, what: str) -> None:
    """Raises ConfigError for a path that is there and neither a file nor a folder: a pipe has no end, and a
    device may have none. `what` names its part ("checkpoint").
    """
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise ConfigError(
            f"the {what} {path} is no regular file, but a pipe, a socket or a device; expected a file,"
            " which can be read again",
            hint="write its content into a file, and name that",
        )


def _callable_spec(value: str) -> str:
    if not is_callable_spec(value):
        raise ValueError(f"{value!r} does not name a callable; expected module:callable or file.py:callable")
    return value


def described(value: object) -> str:
    """A value as its writer would call it."""
    if value is None:
        return "nothing (an empty value)"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dict):
        return "a group of keys"
    if isinstance(value, list):
        return "a list" if value else "an empty list"
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def first_twice(names: Iterable[object]) -> Any:
    """The first of some names that is there more than once; None where each is there once."""
    return next((name for name, times in Counter(names).items() if times > 1), None)


def _patterns(value: object) -> object:
    if value is None:
        return None
    patterns = [value] if isinstance(value, str) else value
    if not isinstance(patterns, list) or not patterns or not all(isinstance(p, str) and p for p in patterns):
        raise ValueError(
            f"got {described(value)}, expected one pattern of parameter names or a list of them, such as"
            " [head.*]"
        )
    return patterns


CallableSpec = Annotated[str, AfterValidator(_callable_spec)]
FilePath = Annotated[Path, Field(strict=False)]
ParameterPatterns = Annotated[
    list[str] | None, BeforeValidator(_patterns, json_schema_input_type=str | list[str] | None)
]
Finite = Annotated[float, Field(allow_inf_nan=False)]


class ConfigSection(BaseModel):
    """A group of keys. `not_taken` are keys that people look for in it and that it does not have (any more),
    each with what to do instead; `filled_in` those without a default that follow from others; `bare` is the
    key whose value a bare text is, empty where there is none.
    """

    not_taken: ClassVar[Mapping[str, str]] = {}
    filled_in: ClassVar[tuple[str, ...]] = ()
    bare: ClassVar[str] = ""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True)

    @model_validator(mode="before")
    @classmethod
    def _of_bare_text(cls, value: object) -> object:
        return {cls.bare: value} if cls.bare and isinstance(value, str) else value

    def not_default(self) -> set[str]:
        """The keys whose values are not their defaults. A default says nothing: a resolved config, with all
        its defaults, must load again.
        """
        fields = type(self).model_fields.items()
        return {
            name
            for name, info in fields
            if getattr(self, name) != info.get_default(call_default_factory=True)
        }

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: Any, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """The section in the JSON Schema, or a bare text where it takes one."""
        found = handler(core_schema)
        content = handler.resolve_ref_schema(found)
        content.pop("description", None)  # of the class, for programmers
        for key, info in cls.model_fields.items():
            content["properties"][key]["description"] = meaning(info)
        content["required"] = [key for key in content.get("required", []) if key not in cls.filled_in]
        return {"anyOf": [{"type": "string"}, found]} if cls.bare else found


def meaning(info: FieldInfo) -> str:
    """What a key means, in a sentence: the text below the field that it is."""
    text = " ".join((info.description or "").split())
    return f"{text[:1].upper()}{text[1:].rstrip('.')}."


def sections_in(annotation: object) -> Iterator[type[ConfigSection]]:
    """The sections that a type is made of: itself, those it may be, and those it lists."""
    if isinstance(annotation, type) and issubclass(annotation, ConfigSection):
        yield annotation
    for part in get_args(annotation):
        yield from sections_in(part)


class NamedSection(ConfigSection):
    """A plugin of a kind by name (a known one, or `module:Class`) with its options. A bare string is the name
    alone. The options are checked where the plugin is made.
    """

    bare: ClassVar[str] = "name"
    group: ClassVar[Group]

    model_config = ConfigDict(extra="allow", frozen=True, strict=True)

    name: str
    """A known name, or module:Class; the other keys are its options."""

    @field_validator("name")
    @classmethod
    def _is_known(cls, value: str) -> str:
        known, kind = plugin_names(cls.group), cls.group.removesuffix("es" if cls.group == "losses" else "s")
        if value in known or is_callable_spec(value):
            return value
        meant = did_you_mean(value, known, before="", after=" ")
        own = "module:callable" if kind == "loss" else "module:Class"
        raise ValueError(f"there is no {kind} {value!r}; {meant}known: {', '.join(known)}; or {own}")

    @property
    def options(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


_ALLOWED = (
    ast.Expression,
    ast.BoolOp,
    ast.And,
    ast.Or,
    ast.UnaryOp,
    ast.Not,
    ast.USub,
    ast.Compare,
    ast.Eq,
    ast.NotEq,
    ast.Lt,
    ast.LtE,
    ast.Gt,
    ast.GtE,
    ast.In,
    ast.NotIn,
    ast.Name,
    ast.Load,
    ast.Constant,
    ast.List,
    ast.Tuple,
)
_EXPECTED = "comparisons of columns with values, joined by and, or, not, such as label == 3 and loss > 2"


def names_in_condition(text: str, columns: Collection[str] | None = None) -> list[str]:
    """The columns that a condition reads. Raises ValueError for a text that is not a condition, or that names
    a column which is not there.
    """
    try:
        tree = ast.parse(" ".join(text.split()), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        reason = error.msg if isinstance(error, SyntaxError) else str(error)
        raise ValueError(f"{text!r} is no condition ({reason}); expected {_EXPECTED}") from None
    for node in ast.walk(tree):
        plain = not isinstance(node, ast.Constant) or isinstance(node.value, str | int | float | bool)
        if not isinstance(node, _ALLOWED) or not plain:
            written = ast.get_source_segment(" ".join(text.split()), node) or type(node).__name__
            raise ValueError(
                f"{text!r} has {written!r}, which is no part of a condition; expected {_EXPECTED}"
            )
    names = list(dict.fromkeys(node.id for node in ast.walk(tree) if isinstance(node, ast.Name)))
    for name in names:
        if columns is not None and name not in columns:
            meant = did_you_mean(name, list(columns), before="", after=" ")
            raise ValueError(f"{text!r}: there is no column {name!r}; {meant}known: {', '.join(columns)}")
    return names
