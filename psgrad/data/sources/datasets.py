"""Datasets that a factory of the user's own returns: their items, as tensors, and blocks of them."""

from __future__ import annotations

import copy
import hashlib
import json
import pickle
import random
import shutil
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from psgrad.config import DataConfig
from psgrad.data.columns import input_names, length_inputs, require_columns, require_rows, target_names
from psgrad.data.kept import KeptBytes
from psgrad.data.rows import (
    Array,
    Block,
    Samples,
    checked_weights,
    stacked,
    to_tensor,
    unique_ids,
    unit_ids,
)
from psgrad.data.targets import Labels
from psgrad.errors import ConfigError, DataError, PsgradError
from psgrad.ragged import RaggedAxes, RowNumbers, padded_and_stacked
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


@dataclass(frozen=True)
class Item:
    """What is used of an item: the inputs, and the target where there is one, as tensors; what the columns
    hold that name the row, and say whom it belongs to.
    """

    tensors: tuple[Tensor, ...]
    has_target: bool
    id: Any = None
    unit: Any = None

    @property
    def shapes(self) -> list[list[int]]:
        """The shape of each tensor."""
        return [list(x.shape) for x in self.tensors]


class DatasetSamples(Samples):
    """Items of a Dataset, each a tuple (input, ..., target) or a dict of columns, read one by one and
    stacked; those that differ in length are padded.

    An item that was read is kept, as far as there is room: so each is made once, for its fingerprint, its id
    and all passes. Where there is no room it is made again, and draws the same from the global generators.
    """

    def __init__(
        self, dataset: Any, config: DataConfig, unit: str | None = None, labels: Labels | None = None
    ) -> None:
        self._dataset, self._config, self._unit = dataset, config, unit
        self._labels = labels or Labels()
        self._source = f"the dataset of {config.factory}"
        self._kept, self._anew = KeptBytes(_room()), False
        try:
            self._count = len(dataset)
        except Exception as error:
            raise DataError(f"the length of {self._source} raised {describe_failure(error)}") from error
        require_rows(self._count, self._source)
        with restored():
            self._first = self._looked_at(0)
            listed = [] if unit is None else [self._looked_at(row).unit for row in range(self._count)]
            units = None if unit is None else unit_ids(listed, unit)
            self.ragged = self._ragged()
        super().__init__(None, None, self._digest(units), units)
        self.keywords = tuple(config.inputs) if isinstance(config.inputs, dict) else ()
        self.weighted, self.input_names = config.weight is not None, tuple(input_names(config))
        self.sources, self.code = tuple(each.__module__ for each in type(dataset).__mro__), (dataset,)

    @cached_property
    def ids(self) -> Array:  # type: ignore[override]  # made when asked for: items may have to be read
        """The ids that the items hold, each of which is read for them; without such, the rows' numbers."""
        if self._config.id is None:
            return np.arange(self._count)
        with restored():
            return unique_ids([self._looked_at(row).id for row in range(self._count)], self._config.id)

    def __len__(self) -> int:
        return self._count

    def take(self, rows: RowNumbers) -> Block:
        numbers = self._existing(rows).tolist()
        distinct = {row: self._item(row) for row in dict.fromkeys(numbers)}
        for row, item in distinct.items():
            if self._fixed(item) != self._fixed(self._first):
                raise DataError(
                    f"row {row} of {self._source} has the shapes {item.shapes}, row 0 {self._first.shapes}",
                    hint="pad or cut the items to one length in the dataset",
                )
        return self._stacked([distinct[row] for row in numbers])

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
        before it. A dataset with generators of its own has another hash in each process.
        """
        return self.content_of(range(len(self) if count is None else count))

    def content_of(self, rows: Sequence[int]) -> str:
        return self._with_rows(hashlib.sha256(self.fingerprint.encode()), rows)

    def describe(self, row: int) -> str | None:
        """What the dataset's own `describe(row)` says, if it has one."""
        if not hasattr(self._dataset, "describe"):
            return None
        try:
            return str(self._dataset.describe(row))
        except Exception as error:
            raise DataError(f"describe({row}) of {self._source} raised {describe_failure(error)}") from error

    # -- items -----------------------------------------------------------------------------------------------

    def _item(self, row: int) -> Item:
        if self._anew:
            return self._made(row)
        with restored():
            return self._looked_at(row)

    def _looked_at(self, row: int) -> Item:
        """An item that draws by its row from the global generators, in every process, and is kept."""
        kept = self._kept.get(row)
        if kept is not None:
            arrays, *others = pickle.loads(kept)
            return Item(tuple(map(torch.from_numpy, arrays)), *others)
        torch.default_generator.manual_seed(row)
        np.random.seed(row)
        random.seed(row)
        found = self._made(row)
        arrays = tuple(x.contiguous().numpy() for x in found.tensors)
        self._kept.put(row, pickle.dumps((arrays, found.has_target, found.id, found.unit)))
        return found

    def _made(self, row: int) -> Item:
        """One item. Raises DataError where it can't be made or used, ConfigError where names do not fit."""
        try:
            item = self._dataset[row]
        except Exception as error:
            raise DataError(f"row {row} of {self._source} raised {describe_failure(error)}") from error
        return self._of_columns(item, row) if isinstance(item, Mapping) else self._by_position(item, row)

    def _of_columns(self, item: Mapping[str, Any], row: int) -> Item:
        config, known = self._config, [str(name) for name in item]
        names, targets = input_names(config), target_names(config)
        if not names:
            raise ConfigError(
                f"the items of {self._source} are dicts, and data.inputs does not say which columns the"
                f" model reads; expected one or more of {', '.join(known)}",
            )
        others = [name for name in (config.weight, config.id, self._unit) if name is not None]
        require_columns([*names, *targets, *others], known, self._source)
        lengths, tensors = length_inputs(config), []
        for place, name in enumerate(names):
            value = len(item[name]) if place in lengths else item[name]
            tensors.append(to_tensor(_as_array(value, name, row), name))
        if config.weight is not None:
            weight = to_tensor(_as_array(item[config.weight], config.weight, row), config.weight).reshape(1)
            tensors.append(
                checked_weights(weight, config.weight, lambda _: f"row {row} of {self._source}")[0]
            )
        found = [self._target(item[name], name, row) for name in targets]
        if len(found) > 1:
            found = [stacked([x.unsqueeze(0) for x in found], targets, "data.target")[0]]
        about = (None if name is None else _plain(item[name]) for name in (config.id, self._unit))
        return Item((*tensors, *found), bool(found), *about)

    def _by_position(self, item: Any, row: int) -> Item:
        keys = ("inputs", "target", "weight", "id")
        given = [f"data.{name}" for name in keys if getattr(self._config, name) is not None]
        given += [] if self._unit is None else ["privacy.unit.column"]
        if given:
            raise ConfigError(
                f"the items of {self._source} are of type {type(item).__name__} and have no names for"
                f" {given[0]} to select",
                hint=f"leave out {', '.join(given)}: the last value is the target; or return dicts",
            )
        values = list(item) if isinstance(item, tuple | list) else [item]
        target = [self._target(values.pop(), "target", row)] if len(values) > 1 else []
        named = [(f"input {place}", value) for place, value in enumerate(values)]
        inputs = [to_tensor(_as_array(value, name, row), name) for name, value in named]
        return Item((*inputs, *target), bool(target))

    def _target(self, value: Any, name: str, row: int) -> Tensor:
        if isinstance(value, str) and self._labels.names is None:
            raise ConfigError(
                f"the target {name!r} in row {row} of {self._source} is {value!r}, the name of a class;"
                " expected data.class_names with all names, in the order of the labels 0, 1, 2, ...",
            )
        array = np.array(value, dtype=object) if isinstance(value, str) else _as_array(value, name, row)
        if array.ndim == 0:
            plain = array.numpy() if isinstance(array, Tensor) else array
            where = f"row {row} of {self._source}"
            array = self._labels.encoded(plain.reshape(1), name, lambda _: where).values[0:1].reshape(())
        return to_tensor(array, name)

    # -- blocks of them --------------------------------------------------------------------------------------

    def _stacked(self, items: Sequence[Item]) -> Block:
        columns = list(zip(*(item.tensors for item in items), strict=True))
        padding = (0,) * len(columns) if self.ragged is None else self.ragged.padding
        tensors = [padded_and_stacked(x, value) for x, value in zip(columns, padding, strict=False)]
        lengths = None
        if self.ragged is not None:
            axes = [(place, axis) for place, pairs in enumerate(self.ragged.axes) for axis, _ in pairs]
            lengths = torch.tensor([[item.shapes[place][axis] for place, axis in axes] for item in items])
        target = tensors.pop() if self._first.has_target else None
        return Block(tuple(tensors), target, lengths, self.ragged)

    def _fixed(self, item: Item) -> list[list[int]]:
        """The shapes of an item, without the lengths that differ from row to row."""
        found = item.shapes
        for shape, pairs in zip(found, () if self.ragged is None else self.ragged.axes, strict=False):
            for axis, _ in pairs if len(shape) > max((axis for axis, _ in pairs), default=0) else ():
                shape[axis] = -1
        return found

    def _ragged(self) -> RaggedAxes | None:
        """Which axes differ among some items of the dataset, which are read for it."""
        differing: set[tuple[int, int]] = set()
        looked_at = np.linspace(0, self._count - 1, min(self._count, _LOOKED_AT)).astype(int)
        for row in sorted({*looked_at.tolist()}):
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

    # -- identity --------------------------------------------------------------------------------------------

    def _digest(self, units: Array | None) -> str:
        """A hash of the factory and its arguments, the length, the first and last item, and the units."""
        made_by = [self._config.factory, self._config.kwargs, self._count]
        digest = hashlib.sha256(json.dumps(made_by, sort_keys=True, default=str).encode())
        digest.update(b"" if units is None else "\n".join(map(str, units.tolist())).encode())
        return self._with_rows(digest, (0, self._count - 1))

    def _with_rows(self, digest: Any, rows: Sequence[int]) -> str:
        """A digest with these items, or what is wrong with them."""
        with restored():
            for row in rows:
                try:
                    found = self._looked_at(row)
                except PsgradError as error:
                    digest.update(f"{row} {error}".encode())
                    continue
                for tensor in found.tensors:
                    digest.update(f"{row} {tensor.dtype} {list(tensor.shape)}".encode())
                    digest.update(tensor.contiguous().numpy().data)
        found_so: str = digest.hexdigest()
        return found_so


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor | np.generic) and value.ndim == 0 else value


def _as_array(value: Any, name: str, row: int) -> Array | Tensor:
    if isinstance(value, Tensor | np.ndarray):
        return value
    if isinstance(value, bool | int | float | np.generic | list):
        try:
            return np.asarray(value)
        except ValueError as error:  # a list of lists of unequal length
            raise DataError(f"{name!r} in row {row} is ragged; expected lists of one length") from error
    raise DataError(
        f"{name!r} in row {row} is of type {type(value).__name__}; expected numbers, as a tensor, an array"
        " or a list",
        hint="convert it in the dataset, for example a picture with numpy.asarray",
    )


def _room() -> int:
    """How many bytes of items may be kept."""
    try:
        return min(_KEPT_BYTES, int(_KEPT_SHARE * shutil.disk_usage(tempfile.gettempdir()).free))
    except OSError:
        return 0
