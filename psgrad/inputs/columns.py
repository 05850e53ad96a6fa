"""Which columns a config names, and whether a dataset has them. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from psgrad.config import DataConfig, nearest
from psgrad.errors import ConfigError, DataError


def input_names(config: DataConfig) -> list[str]:
    """The columns that a file's config names as inputs."""
    return [config.inputs] if isinstance(config.inputs, str) else list(config.inputs or ())


def named_columns(config: DataConfig, unit: str | None = None) -> list[str]:
    """All columns that a config names, each once: inputs, target, id, and the one that says whom a row belongs to."""
    return list(dict.fromkeys([*input_names(config), *(name for name in (config.target, config.id, unit) if name is not None)]))


def not_numbers(name: str, kind: object, example: str | None = None) -> DataError:
    """The error for a column of text, dates, objects or anything else that is no number."""
    return DataError(
        f"{name!r} is of type {kind}" + (f"; {example}" if example else ""),
        expected="numbers",
        next_step="encode classes as 0, 1, 2, ... and texts as token numbers before they are saved",
    )


def require_rows(count: int, source: str) -> None:
    """Raises DataError for an empty dataset."""
    if count == 0:
        raise DataError(f"{source} has no rows", expected="at least one sample")


def require_columns(wanted: Iterable[str], known: Sequence[str], source: str) -> None:
    """Raises ConfigError for the first of the wanted columns that is not there."""
    for name in wanted:
        if name not in known:
            close = nearest(name, known)
            listed = ", ".join(known[:20]) + (f" and {len(known) - 20} more" if len(known) > 20 else "")
            raise ConfigError(
                f"{source} has no column {name!r}" + (f"; did you mean {close}?" if close else ""),
                expected=f"one of its columns: {listed}" if known else None,
            )


def require_single_names(names: Sequence[str], wanted: Sequence[str], path: Path) -> None:
    """Raises DataError where a wanted column is there more than once."""
    for name in wanted:
        if names.count(name) > 1:
            raise DataError(f"{path} has {names.count(name)} columns named {name!r}", expected="a name of its own for every column")
