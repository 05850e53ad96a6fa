"""Results in a line: their tables and arrays by their sizes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from psgrad.wording import told

_VALUE = 60
_ITEMS = 4


class ShortRepr:
    """A dataclass whose repr is short, whatever it holds; to be declared with `repr=False`."""

    def __repr__(self) -> str:
        fields = dataclasses.fields(self)  # type: ignore[arg-type]
        return f"{type(self).__name__}({', '.join(f'{field.name}={_brief(getattr(self, field.name))}' for field in fields)})"


def _brief(value: Any) -> str:
    shape = getattr(value, "shape", None)
    if isinstance(shape, tuple) and shape:
        rows = " x ".join(f"{size:,}" for size in shape)
        return f"<{type(value).__name__} {rows}>"
    if isinstance(value, Path):
        return told(str(value), _VALUE)
    if isinstance(value, Mapping) and value:
        names = ", ".join(str(key)[:_VALUE] for key in list(value)[:_ITEMS])
        return "{" + names + (f", and {len(value) - _ITEMS:,} more" if len(value) > _ITEMS else "") + "}"
    if isinstance(value, list | tuple) and value:
        return f"<{type(value).__name__} of {len(value):,}>"
    if isinstance(value, str | bytes):
        return told(value[: 4 * _VALUE], _VALUE)
    return told(value, 4 * _VALUE)
