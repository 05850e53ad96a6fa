"""A dataset once it is loaded: ids, targets where they are at hand, and rows read block by block."""

from __future__ import annotations

import hashlib
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import reduce
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch
from torch import Tensor

from psgrad.config import DataConfig
from psgrad.data.columns import not_numbers
from psgrad.errors import DataError
from psgrad.ragged import Block as Block
from psgrad.ragged import RaggedAxes, RowNumbers
from psgrad.run.input_files import Stamp

if TYPE_CHECKING:
    from psgrad.data.tokenizer import Tokenizer

Array = npt.NDArray[Any]


class Samples(ABC):
    """A dataset in its own order. Rows are counted from 0, in messages too.

    Attributes:
        ids: [n], text or int64, all different.
        targets: [n], int64 or float32, where the target is one number per row and cheap to read; else None.
        keywords: how the model calls its inputs; empty where it takes them by position.
        ragged: which axes differ in length from row to row, where some do; `take` then gives blocks with
            lengths.
        fingerprint: a SHA-256 that changes when the data does.
        units: [n], text or int64, whom each row belongs to, where a column for that was named; else None.
        weighted: whether the last input is the weight of each row's loss, which the model does not get.
        sources: the Python modules that make the rows, where code does. code: the objects that do.
        notes: sentences for the manifest.
        class_names: of the classes 0, 1, 2, ... where the data or the model's folder has them. names_found:
            'sorted' where they are only those that this dataset has, in sorted order, 'declared' where it
            says which names its numbers have, else empty.
        stamps: of the files that each pass reads.
        input_names: what the numbers of a row's inputs are called: a name a column, or a name an input.
        tokenizer: what made tokens of texts; None where rows hold none.
        reading: a lock to hold while reading, because a dataset need not support threads.
    """

    keywords: tuple[str, ...] = ()
    ragged: RaggedAxes | None = None
    weighted: bool = False
    sources: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    class_names: tuple[str, ...] | None = None
    names_found: str = ""
    code: tuple[object, ...] = ()
    stamps: tuple[Stamp, ...] = ()
    input_names: tuple[str, ...] = ()
    tokenizer: Tokenizer | None = None

    def __init__(
        self, ids: Array | None, targets: Array | None, fingerprint: str, units: Array | None = None
    ) -> None:
        """ids: None where a subclass has a property of that name."""
        if ids is not None:
            self.ids = ids
        self.targets = targets
        self.fingerprint = fingerprint
        self.units = units
        self.reading = threading.Lock()

    def __len__(self) -> int:
        return len(self.ids)

    @abstractmethod
    def take(self, rows: RowNumbers) -> Block:
        """Any rows, at least one, in the given order; [n] whole numbers, of which one may occur more than
        once. Raises IndexError for a row that is not there, DataError for one that can't be used.
        """

    def anew(self) -> Samples:
        """This dataset; rows that code makes are made each time they are read."""
        return self

    def read_ahead(self, rows: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Reads these rows where code makes them, and keeps them for later reads. After each: (how many are
        read, of how many). Nothing where rows are read from files.
        """
        return iter(())

    def content(self, count: int | None = None) -> str:
        """A SHA-256 of what the first `count` rows hold, None for all; or of the file that holds them."""
        return self.fingerprint

    def content_of(self, rows: Sequence[int]) -> str:
        """A SHA-256 of what these rows hold, at least; of the whole file, where one holds them."""
        digest = hashlib.sha256(self.content().encode())
        digest.update(np.array(rows, dtype=np.int64).data)
        return digest.hexdigest()

    def _existing(self, rows: RowNumbers) -> Array:
        found = np.asarray(rows, dtype=np.int64)
        if found.ndim != 1 or not len(found) or found.min() < 0 or found.max() >= len(self):
            raise IndexError(
                f"rows must be a list of at least one number from 0 to {len(self) - 1}, got {rows!r}"
            )
        return found

    def describe(self, row: int) -> str | None:
        """A row's input as text for people; None where numbers or a picture say it best."""
        return None

    def row_name(self, row: int) -> str:
        """A row in messages."""
        return f"row {row}"

    def picture(self, row: int) -> Any:
        """A row's image as it is in the data, of Pillow; None where rows are no images."""
        return None


def to_tensor(value: Array | Tensor, name: str) -> Tensor:
    """A copy in one of the three types that a block holds: bool, int64 and float32."""
    if isinstance(value, Tensor):
        if value.is_complex():
            raise not_numbers(name, value.dtype)
        kind = torch.float32 if value.is_floating_point() else torch.int64
        kind = torch.bool if value.dtype == torch.bool else kind
        return value.detach().to(device="cpu", dtype=kind, copy=True)
    types = {"b": np.bool_, "i": np.int64, "u": np.int64, "f": np.float32}
    if value.dtype.kind not in types:
        raise not_numbers(name, value.dtype)
    if value.dtype == np.uint64 and value.size and value.max() > np.iinfo(np.int64).max:
        raise DataError(f"{name!r} holds {value.max()}, more than a 64-bit signed integer can")
    with np.errstate(over="ignore"):  # what is beyond float32 is infinite, and its row reported as nonfinite
        return torch.from_numpy(np.array(value, dtype=types[value.dtype.kind]))


def stacked(tensors: Sequence[Tensor], names: Sequence[str], key: str) -> Tensor:
    """Columns along a new last axis; fractions where one of them has fractions. Raises DataError where their
    shapes differ; `key` is the config's that has them stacked.
    """
    if len({x.shape for x in tensors}) > 1:
        shapes = ", ".join(str(list(x.shape[1:])) for x in tensors)
        raise DataError(f"{key}: {', '.join(names)} have the shapes {shapes}; expected columns of one shape")
    kind = reduce(torch.promote_types, (x.dtype for x in tensors))
    return torch.stack([x.to(kind) for x in tensors], dim=-1)


def checked_weights(weights: Tensor, name: str, row_name: Callable[[int], str]) -> Tensor:
    """Weights [n] of rows, as float32. Raises DataError, with the row in the words of `row_name`."""
    if weights.dim() != 1:
        raise DataError(f"the weights {name!r} hold lists; expected one number a row")
    stored = weights.float()
    wrong = ~(stored.isfinite() & (stored >= 0))
    if wrong.any():
        place = int(wrong.nonzero()[0])
        raise DataError(
            f"the weight {name!r} is {weights[place].item():g} in {row_name(place)}; expected a finite"
            " number from 0, at most 3.4e+38",
        )
    return stored


def unit_ids(ids: Sequence[Any] | Array, name: str) -> Array:
    """Whom each row belongs to, as text or int64. Raises DataError where one is missing or is neither."""
    return _ids(pd.Series(ids), name)


def unique_ids(ids: Sequence[Any] | Array, name: str) -> Array:
    """The ids as an array of text or int64. Raises DataError where one is missing or occurs twice."""
    series = pd.Series(ids)
    found = _ids(series, name)
    twice = series[series.duplicated()].drop_duplicates()
    if len(twice):
        first = twice.tolist()[0]
        places = ", ".join(map(str, np.flatnonzero(series == first)[:3]))
        ids, occur = ("one id", "occurs") if len(twice) == 1 else (f"{len(twice)} ids", "occur")
        raise DataError(
            f"{ids} in {name!r} {occur} more than once: {first!r} in rows {places}; expected an id of its own"
            " for every row",
        )
    return found


def _ids(series: pd.Series[Any], name: str) -> Array:
    values = series.to_numpy()
    # A text of nothing but blanks is no id, as in csv: the rows of all who have none would be one person's.
    blank = [isinstance(value, str) and not value.replace("\0", "").strip() for value in values]
    missing = np.flatnonzero(series.isna().to_numpy() | np.array(blank, dtype=bool))
    if len(missing):
        raise DataError(f"row {missing[0]} of the column {name!r} is empty; expected a value in each row")
    if values.dtype.kind in "iu":
        return values.astype(np.int64)
    if all(isinstance(value, str) for value in values):
        found: Array = values.astype(np.str_)
        cut = np.flatnonzero(found != values)
        if len(cut):  # NumPy drops NUL characters at the end, and two ids might become one
            raise DataError(
                f"the id in row {cut[0]} of {name!r} ends with a NUL character; expected text without it"
            )
        return found
    kind = "lists" if isinstance(values[0], list | np.ndarray) else f"of type {type(values[0]).__name__}"
    raise DataError(f"the ids in {name!r} are {kind}; expected texts or whole numbers, one per row")


def ids_and_units(
    config: DataConfig, unit: str | None, count: int, column: Callable[[str], Any]
) -> tuple[Array, Array | None]:
    """(the ids of the rows, whom each belongs to), as a config names them. column: values of one by name."""
    ids = np.arange(count) if config.id is None else unique_ids(column(config.id), config.id)
    return ids, None if unit is None else unit_ids(column(unit), unit)
