"""The kinds of values that a config holds: how each is read from plain YAML, and what is said of one that
does not fit. Among them are conditions on the columns of a table, such as `label == 3 and loss > 2`, which
run no code.

Something that a config names, with options of its own, which are checked where the thing is known.
"""

from __future__ import annotations

import ast
import difflib
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, get_args

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from psgrad.errors import ConfigError


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
            f"the {what} {path} is no regular file, but a pipe, a socket or a device",
            expected="a file, which can be read again",
            next_step="write its content into a file, and name that",
        )


def nearest(word: str, known: Sequence[str]) -> str | None:
    """The one of `known` that `word` was most likely meant to be; None where nothing comes close."""
    close = difflib.get_close_matches(word, known, n=1)
    return close[0] if close else None


def did_you_mean(word: str, known: Sequence[str], before: str = "; ", after: str = "") -> str:
    """`; did you mean X?` where one of the known words is close, else nothing."""
    close = nearest(word, known)
    return f"{before}did you mean {close}?{after}" if close else ""


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
ParameterPatterns = Annotated[list[str] | None, BeforeValidator(_patterns)]
Finite = Annotated[float, Field(allow_inf_nan=False)]


class ConfigSection(BaseModel):
    """A group of keys. `not_taken` are keys that people look for in it and that it does not have, each with
    the reason; `later` those of its keys that earlier versions did not have; `bare` is the key whose value a
    bare text is, empty where there is none.
    """

    not_taken: ClassVar[Mapping[str, str]] = {}
    later: ClassVar[frozenset[str]] = frozenset()
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

    def decisive(self) -> dict[str, Any]:
        """The values that indexes and ledgers compare, as JSON has them. A key of `later` is left out at its
        default, so that files of earlier versions still fit.
        """
        return self.model_dump(mode="json", exclude=set(self.later - self.not_default()))


def sections_in(annotation: object) -> Iterator[type[ConfigSection]]:
    """The sections that a type is made of: itself, those it may be, and those it lists."""
    if isinstance(annotation, type) and issubclass(annotation, ConfigSection):
        yield annotation
    for part in get_args(annotation):
        yield from sections_in(part)


class NamedSection(ConfigSection):
    """A name (a known one, or `module:Class`) with options. A bare string is the name alone."""

    bare: ClassVar[str] = "name"

    model_config = ConfigDict(extra="allow", frozen=True, strict=True)

    name: str
    """A known name, or module:Class; the other keys are its options."""

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
