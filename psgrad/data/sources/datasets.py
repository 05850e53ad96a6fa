"""Datasets that a factory of the user's own returns."""

from __future__ import annotations

import copy
import hashlib
import json
import shutil
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from psgrad.config import DataConfig
from psgrad.data.columns import input_names, require_rows
from psgrad.data.kept import KeptBytes
from psgrad.data.rows import Array, Block, Samples, row_numbers, unique_ids, unit_ids
from psgrad.data.sources.items import Item, Items, seed_by_row
from psgrad.data.targets import Labels
from psgrad.errors import DataError, PsgradError
from psgrad.ragged import RaggedAxes, padded_and_stacked
from psgrad.random_state import restored
from psgrad.user_code import call_factory, describe_failure

_KEPT_BYTES = 8 << 30  # on the disk, of items that were read and are going to be read again
_KEPT_SHARE = 0.25  # the largest share for them of what is free in the temporary folder
_LOOKED_AT = 32  # items, by which a dataset is known to have rows of unequal length


def made_by_factory(config: DataConfig, base: Path) -> Any:
    """The Dataset that the config's factory returns; the factory's file is relative to `base`. Raises
    ConfigError and DataError.
    """
    assert config.factory is not None
    dataset = call_factory(config.factory, base, config.kwargs, raises=DataError)
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise DataError(
            f"the factory {config.factory} returned an object of type {type(dataset).__name__}; expected a"
            " map-style torch Dataset, with a length and items by number",
            hint="of a stream, return a list of its first rows: list(itertools.islice(stream, 10_000))",
        )
    return dataset


class DatasetSamples(Samples):
    """Items of a Dataset, read one by one and stacked; those that differ in length are padded.

    An item that was read is kept, as far as there is room: so each is made once, for its fingerprint, its id
    and all passes. Where there is no room it is made again, and draws the same from the global generators.
    """

    def __init__(
        self, dataset: Any, config: DataConfig, unit: str | None = None, labels: Labels | None = None
    ) -> None:
        self._dataset, self._config = dataset, config
        listed = None if unit is None else getattr(dataset, unit, None)
        self._labels = labels or Labels()
        self._items = Items(dataset, config, unit if listed is None else None, self._labels)
        self._source = self._items.source
        self._kept, self._anew = KeptBytes(_room()), False
        self._count = count = len(self._items)
        require_rows(count, self._source)
        with restored():
            self._first = self._looked_at(0)
            units = None if unit is None else self._units(unit, listed)
            self.ragged = self._ragged(count)
        super().__init__(None, None, self._digest(count, units), units)
        self.keywords = tuple(config.inputs) if isinstance(config.inputs, dict) else ()
        self.weighted = config.weight is not None
        self.sources, self.code = tuple(each.__module__ for each in type(dataset).__mro__), (dataset,)

    @cached_property
    def ids(self) -> Array:  # type: ignore[override]  # made when asked for: items may have to be read
        """The ids that the items hold, each of which is read for them; without such, the rows' numbers."""
        if self._config.id is None:
            return row_numbers(self._count)
        with restored():
            return unique_ids([self._looked_at(row).id for row in range(self._count)], self._config.id)

    def __len__(self) -> int:
        return self._count

    def take(self, rows: Array) -> Block:
        numbers = self._existing(rows).tolist()
        distinct = {row: self._item(row) for row in dict.fromkeys(numbers)}
        return self._stacked(numbers, [distinct[row] for row in numbers])

    def anew(self) -> Samples:
        found = copy.copy(self)
        found._kept, found._anew, found.reading = KeptBytes(0), True, threading.Lock()
        return found

    def read_ahead(self, rows: Sequence[int]) -> Iterator[tuple[int, int]]:
        """See Samples: these items, or all where ids are in them."""
        rows = rows if self._config.id is None else range(self._count)
        with restored():
            for done, row in enumerate(rows, 1):
                with suppress(PsgradError):  # of a row that is not read: raised when it is used
                    self._looked_at(row)
                yield done, len(rows)

    def content(self, count: int | None = None) -> str:
        """The SHA-256 of the rows, each of which is read for it.

        For a row that can't be read the error is hashed; it is raised when that row is used, after the rows
        before it. Rows draw the same numbers from the global generators each time. A dataset with generators
        of its own has another hash in each process.
        """
        return self.content_of(range(len(self) if count is None else count))

    def content_of(self, rows: Sequence[int]) -> str:
        digest = hashlib.sha256(self.fingerprint.encode())
        with restored():
            for row in rows:
                self._add(digest, row)
        return digest.hexdigest()

    def describe(self, row: int) -> str | None:
        """What the dataset's own `describe(row)` says, if it has one."""
        if not hasattr(self._dataset, "describe"):
            return None
        try:
            return str(self._dataset.describe(row))
        except Exception as error:
            raise DataError(f"describe({row}) of {self._source} raised {describe_failure(error)}") from error

    def input_names(self) -> list[str]:
        return list(map(str, input_names(self._config)))

    def special_tokens(self) -> frozenset[int]:
        tokenizer = getattr(self._dataset, "tokenizer", None)
        return frozenset(map(int, getattr(tokenizer, "all_special_ids", None) or ()))

    def pieces(self, ids: Sequence[int]) -> list[str] | None:
        """What the dataset's own `tokenizer` says, as Hugging Face has them."""
        decode = getattr(getattr(self._dataset, "tokenizer", None), "decode", None)
        if not callable(decode):
            return None
        try:
            return [str(decode([each])) for each in ids]
        except Exception as error:
            how = "tokenizer.decode([id])"
            raise DataError(f"{how} of {self._source} raised {describe_failure(error)}") from error

    def _looked_at(self, row: int) -> Item:
        """An item that draws by its row, and is kept."""
        kept = self._kept.get(row)
        if kept is not None:
            return Item.of_content(kept)
        seed_by_row(row)
        found = self._items(row)
        self._kept.put(row, found.content())
        return found

    def _item(self, row: int) -> Item:
        if self._anew:
            return self._items(row)
        with restored():
            return self._looked_at(row)

    def _stacked(self, rows: Sequence[int], items: Sequence[Item]) -> Block:
        for row, item in zip(rows, items, strict=True):
            self._require_like_the_first(row, item)
        columns = list(zip(*(item.tensors for item in items), strict=True))
        if self.ragged is None:
            tensors, lengths = [torch.stack(column) for column in columns], None
        else:
            padding = self.ragged.padding
            tensors = [padded_and_stacked(x, value) for x, value in zip(columns, padding, strict=False)]
            lengths = torch.tensor([self._lengths_of(item) for item in items])
        target = tensors.pop() if self._first.has_target else None
        return Block(tuple(tensors), target, lengths, self.ragged)

    def _lengths_of(self, item: Item) -> list[int]:
        assert self.ragged is not None
        ragged = zip(item.tensors, self.ragged.axes, strict=False)
        return [x.shape[axis] for x, axes in ragged for axis, _ in axes]

    def _require_like_the_first(self, row: int, item: Item) -> None:
        ours, firsts = item.shapes, self._first.shapes
        for place, axes in enumerate(() if self.ragged is None else self.ragged.axes):
            for axis, _ in axes if place < min(len(ours), len(firsts)) else ():
                ours[place][axis : axis + 1] = firsts[place][axis : axis + 1]
        if ours != firsts:
            raise DataError(
                f"row {row} of {self._source} has the shapes {item.shapes}, row 0 {self._first.shapes}",
                hint="pad or cut the items to one length in the dataset",
            )

    def _ragged(self, count: int) -> RaggedAxes | None:
        """Which axes differ among some items of the dataset, which are read for it."""
        differing: set[tuple[int, int]] = set()
        for row in sorted({*np.linspace(0, count - 1, min(count, _LOOKED_AT)).astype(int).tolist()}):
            try:
                item = self._looked_at(row)
            except PsgradError:
                continue  # whoever comes to that row says so
            for place, (mine, first) in enumerate(zip(item.shapes, self._first.shapes, strict=False)):
                if len(mine) == len(first):
                    differing |= {(place, axis) for axis, size in enumerate(mine) if size != first[axis]}
        if not differing:
            return None
        column = {each: number for number, each in enumerate(sorted(differing))}
        inputs = len(self._first.tensors) - self._first.has_target
        axes = tuple(
            tuple((axis, number) for (where, axis), number in column.items() if where == place)
            for place in range(inputs + 1)
        )
        return RaggedAxes(axes, (*[0] * inputs, self._labels.padding), masked=False)

    def _units(self, unit: str, listed: Any) -> Array:
        """Whom each row belongs to: the dataset's own list, or what its items hold."""
        if listed is None:
            return unit_ids([self._looked_at(row).unit for row in range(self._count)], unit)
        values = np.asarray(listed.cpu() if isinstance(listed, Tensor) else listed)
        if values.shape != (self._count,):
            raise DataError(
                f"{unit!r} of {self._source} has the shape {list(values.shape)}; expected one id for each"
                f" of {self._count} rows",
            )
        return unit_ids(values, unit)

    def _add(self, digest: Any, row: int) -> None:
        """Adds an item, or what is wrong with it, to a digest."""
        try:
            found = self._looked_at(row)
        except PsgradError as error:
            digest.update(f"{row} {error}".encode())
            return
        for tensor in found.tensors:
            digest.update(f"{row} {tensor.dtype} {list(tensor.shape)}".encode())
            digest.update(tensor.contiguous().numpy().data)

    def _digest(self, count: int, units: Array | None) -> str:
        """A hash of the factory and its arguments, the length, the first and last item, and the units."""
        made_by = [self._config.factory, self._config.kwargs, count]
        digest = hashlib.sha256(json.dumps(made_by, sort_keys=True, default=str).encode())
        with restored():
            for row in (0, count - 1):
                self._add(digest, row)
        if units is not None:
            digest.update("\n".join(map(str, units.tolist())).encode())
        return digest.hexdigest()


def _room() -> int:
    """How many bytes of items may be kept."""
    try:
        return min(_KEPT_BYTES, int(_KEPT_SHARE * shutil.disk_usage(tempfile.gettempdir()).free))
    except OSError:
        return 0
