"""Dataclasses as the plain values of JSON files, and back, by their types."""

from __future__ import annotations

from functools import cache
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from psgrad.errors import DataError

T = TypeVar("T")


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def content_of(value: Any) -> Any:
    """The keys and values that are written of a dataclass, without those that are None."""
    kind: Any = type(value)
    return _adapter(kind).dump_python(value, exclude_none=True, warnings=False)


def read(kind: type[T], content: Any, name: str = "manifest.json") -> T:
    """A dataclass from what JSON holds; unknown keys are left out. name: of the file.

    Raises DataError for values of other types.
    """
    hashable: Any = kind
    try:
        found: T = _adapter(hashable).validate_python(content)
        return found
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "its content"
        raise DataError(
            f"{name} can't be read: {place}: {first['msg']}; expected the file as psgrad wrote it",
            hint="run the command again that wrote it",
        ) from error
