"""What each key of a config means: the text below the field that it is, read from the source when somebody asks for it."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator, Mapping
from functools import cache
from typing import get_args

from psgrad.config.values import Section

FILLED_IN: Mapping[str, tuple[str, ...]] = {"PrivacyConfig": ("relation",)}
"""Keys without a default that validators fill in from others."""


@cache
def meanings(section: type[Section]) -> dict[str, str]:
    """key -> what it means, of all keys of a section, those of the sections that it derives from included."""
    found = {name: _sentence(info.description) for name, info in section.model_fields.items() if info.description}
    for kind in section.__mro__:
        if issubclass(kind, Section) and kind is not Section:
            found = {**_documented(kind), **found}
    return {name: found[name] for name in section.model_fields if name in found}


def takes_bare_text(section: type[Section]) -> bool:
    """Whether a text may stand for the whole section: it has a validator `_bare_...` for that."""
    return any(name.startswith("_bare_") for name in section.__pydantic_decorators__.model_validators)


def sections_in(annotation: object) -> Iterator[type[Section]]:
    """The sections that a type is made of: itself, those it may be, and those it lists."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        yield annotation
    for part in get_args(annotation):
        yield from sections_in(part)


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}{'' if text.endswith('.') else '.'}"


def _documented(section: type[Section]) -> dict[str, str]:
    body = ast.parse(textwrap.dedent(inspect.getsource(section))).body[0]
    assert isinstance(body, ast.ClassDef)
    found = {}
    for field, below in zip(body.body, body.body[1:], strict=False):
        if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name) or not isinstance(below, ast.Expr):
            continue
        if isinstance(below.value, ast.Constant) and isinstance(below.value.value, str):
            found[field.target.id] = " ".join(below.value.value.split())
    return found
