"""What every dataset looks like once it is loaded: ids, targets where they are at hand, and rows read block by block."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch
from torch import Tensor

from psgrad.config import DataConfig, nearest
from psgrad.errors import ConfigError, DataError

Array = npt.NDArray[Any]

_SHOWN = 5


@dataclass(frozen=True)
class Block:
    """Neighbouring rows, stacked: every tensor is [n, ...] on the CPU. Whole numbers are int64, all others float32."""

    inputs: tuple[Tensor, ...]
    target: Tensor | None


class Samples(ABC):
    """A dataset in its own order.

    ids: [n], text or int64, all different. targets: [n], int64 or float32, where the target is one number per row and was cheap
    to read; else None. fingerprint: a SHA-256 that changes when the data does. Rows are counted from 0, in messages too.
    """

    def __init__(self, ids: Array, targets: Array | None, fingerprint: str) -> None:
        self.ids = ids
        self.targets = targets
        self.fingerprint = fingerprint

    def __len__(self) -> int:
        return len(self.ids)

    @abstractmethod
    def read(self, start: int, stop: int) -> Block:
        """The rows start, ..., stop - 1, which must exist. Raises DataError where one of them can't be used."""

    def describe(self, row: int) -> str | None:
        """A row's input as text for people; None where numbers or a picture say it best."""
        return None


def to_tensor(value: Array | Tensor, name: str) -> Tensor:
    """A copy in one of the three types that a block holds: bool, int64 and float32."""
    if isinstance(value, Tensor):
        if value.is_complex():
            raise not_numbers(name, value.dtype)
        kind = torch.float32 if value.is_floating_point() else torch.bool if value.dtype == torch.bool else torch.int64
        return value.detach().to(device="cpu", dtype=kind, copy=True)
    types = {"b": np.bool_, "i": np.int64, "u": np.int64, "f": np.float32}
    if value.dtype.kind not in types:
        raise not_numbers(name, value.dtype)
    if value.dtype == np.uint64 and value.size and value.max() > np.iinfo(np.int64).max:
        raise DataError(f"{name!r} holds {value.max()}, more than a 64-bit signed integer can")
    with np.errstate(over="ignore"):  # beyond float32's range is infinite, and its row is reported as nonfinite
        return torch.from_numpy(np.array(value, dtype=types[value.dtype.kind]))


def not_numbers(name: str, kind: object, example: str | None = None) -> DataError:
    """The error for a column of text, dates, objects or anything else that is no number."""
    return DataError(
        f"{name!r} is of type {kind}" + (f"; {example}" if example else ""),
        expected="numbers",
        next_step="encode classes as 0, 1, 2, ... and texts as token numbers before they are saved",
    )


def unique_ids(ids: Sequence[Any] | Array, name: str) -> Array:
    """The ids as an array of text or int64. Raises DataError where one is missing or occurs twice."""
    series = pd.Series(ids)
    if series.isna().any():
        raise DataError(f"the id in row {int(np.flatnonzero(series.isna())[0])} of {name!r} is missing", expected="one id per row")
    values = series.to_numpy()
    if values.dtype.kind in "iu":
        found: Array = values.astype(np.int64)
    elif all(isinstance(value, str) for value in values):
        found = values.astype(np.str_)
    else:
        raise DataError(f"the ids in {name!r} are of type {type(values[0]).__name__}", expected="texts or whole numbers")
    twice = series[series.duplicated()].drop_duplicates()
    if len(twice):
        shown = "; ".join(f"{value!r} in rows {', '.join(map(str, np.flatnonzero(series == value)[:3]))}" for value in twice[:_SHOWN])
        more = f"; and {len(twice) - _SHOWN} more" if len(twice) > _SHOWN else ""
        raise DataError(f"{len(twice)} ids in {name!r} occur more than once: {shown}{more}", expected="an id of its own for every row")
    return found


def input_names(config: DataConfig) -> list[str]:
    """The columns that a file's config names as inputs."""
    return [config.inputs] if isinstance(config.inputs, str) else list(config.inputs or ())


def named_columns(config: DataConfig) -> list[str]:
    """All columns that a config names, each once: inputs, target, id."""
    return list(dict.fromkeys([*input_names(config), *(name for name in (config.target, config.id) if name is not None)]))


def row_numbers(count: int) -> Array:
    """The ids of a dataset that has none."""
    return np.arange(count, dtype=np.int64)


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
