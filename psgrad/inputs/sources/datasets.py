"""Datasets that a factory of the user's own returns."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from psgrad.config import DataConfig
from psgrad.errors import ConfigError, DataError
from psgrad.inputs.rows import Array, Block, Samples, row_numbers, to_tensor, unique_ids, unit_ids
from psgrad.inputs.sources.files import input_names, require_columns, require_rows
from psgrad.user_code import call_factory, describe_failure


def load_dataset(
    config: DataConfig, base: Path, unit: str | None = None, labels: Labels | None = None
) -> Samples:
    """The torch Dataset that the config's factory returns; the factory's file is relative to `base`."""
    assert config.factory is not None  # the config has a path or a factory
    dataset = call_factory(config.factory, base, config.kwargs, raises=DataError)
    if isinstance(dataset, IterableDataset) or not (
        hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    ):
        raise DataError(
            f"the factory {config.factory} returned an object of type {type(dataset).__name__}",
            expected="a map-style torch Dataset, with a length and items by number",
        )
    return DatasetSamples(dataset, config, unit, labels)


class DatasetSamples(Samples):
    """Items of a Dataset, each a tuple (input, ..., target) or a dict of columns, read one by one and
    stacked.
    """

    def __init__(self, dataset: Any, config: DataConfig, unit: str | None = None) -> None:
        self._dataset = dataset
        self._config = config
        self._source = f"the dataset of {config.factory}"
        count = self._length()
        require_rows(count, self._source)
        self._shapes = _shapes(*self._tensors(0))
        ids = (
            row_numbers(count)
            if config.id is None
            else unique_ids([self._id(row, config.id) for row in range(count)], config.id)
        )
        units = None if unit is None else unit_ids(self._unit_column(unit, count), unit)
        super().__init__(ids, None, self._digest(count, units), units)
        self.sources, self.code = tuple(each.__module__ for each in type(dataset).__mro__), (dataset,)

    def read(self, start: int, stop: int) -> Block:
        return self._stacked(range(start, stop))

    def take(self, rows: Array) -> Block:
        return self._stacked(self._existing(rows).tolist())

    def _stacked(self, rows: Sequence[int]) -> Block:
        items = [self._like_the_first(row) for row in rows]
        inputs = tuple(torch.stack(values) for values in zip(*(inputs for inputs, _ in items), strict=True))
        targets = [target for _, target in items if target is not None]
        return Block(inputs, torch.stack(targets) if targets else None)

    def content(self, count: int | None = None) -> str:
        """The SHA-256 of the rows, each of which is read for it; or of the dataset's own `fingerprint`, a
        text, if it has one.

        A row that can't be read counts as what is wrong with it: whoever comes to that row says so, and keeps
        the rows before it. What rows draw from the global generators is the same each time; a dataset with
        generators of its own is another one in each process.
        """
        digest = hashlib.sha256(self.fingerprint.encode())
        own = getattr(self._dataset, "fingerprint", None)
        if isinstance(own, str):
            digest.update(own.encode())
            return digest.hexdigest()
        with _drawing_the_same():
            for row in range(len(self) if count is None else count):
                try:
                    inputs, target = self._tensors(row)
                except DataError as error:
                    digest.update(f"{row} {error}".encode())
                    continue
                for tensor in (*inputs, *(() if target is None else (target,))):
                    digest.update(f"{row} {tensor.dtype} {list(tensor.shape)}".encode())
                    digest.update(tensor.contiguous().numpy().data)
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

    def pieces(self, ids: Sequence[int]) -> list[str] | None:
        """What the dataset's own `tokens(ids)` says, or its `tokenizer`, as Hugging Face has them, if it has
        one.
        """
        tokens, tokenizer = getattr(self._dataset, "tokens", None), getattr(self._dataset, "tokenizer", None)
        decode = getattr(tokenizer, "decode", None)
        if not callable(tokens) and not callable(decode):
            return None
        try:
            found = (
                tokens(list(ids))
                if callable(tokens)
                else map(decode, [[each] for each in ids])
                if callable(decode)
                else ()
            )
            return [str(each) for each in found]
        except Exception as error:
            how = "tokens(ids)" if callable(tokens) else "tokenizer.decode([id])"
            raise DataError(f"{how} of {self._source} raised {describe_failure(error)}") from error

    def _length(self) -> int:
        try:
            return len(self._dataset)
        except Exception as error:
            raise DataError(f"the length of {self._source} raised {describe_failure(error)}") from error

    def _item(self, row: int) -> Any:
        try:
            return self._dataset[row]
        except Exception as error:
            raise DataError(f"row {row} of {self._source} raised {describe_failure(error)}") from error

    def _like_the_first(self, row: int) -> tuple[list[Tensor], Tensor | None]:
        inputs, target = self._tensors(row)
        shapes = _shapes(inputs, target)
        if shapes != self._shapes:
            raise DataError(
                f"row {row} of {self._source} has the shapes {shapes}, row 0 {self._shapes}",
                expected="one shape in all rows",
                next_step="pad or cut the items to one length in the dataset",
            )
        return inputs, target

    def _tensors(self, row: int) -> tuple[list[Tensor], Tensor | None]:
        """The inputs of one item, and its target where it has one."""
        item = self._item(row)
        inputs, target = self._named(item) if isinstance(item, Mapping) else self._by_position(item)
        tensors = [to_tensor(_as_array(value, name, row), name) for name, value in inputs.items()]
        name = self._config.target or "target"
        return tensors, None if target is None else to_tensor(_as_array(target, name, row), name)

    def _named(self, item: Mapping[str, Any]) -> tuple[dict[str, Any], Any]:
        names = input_names(self._config)
        if not names:
            raise ConfigError(
                f"the items of {self._source} are dicts, and data.inputs does not say which columns the model"
                " reads",
                expected=f"one or more of {', '.join(map(str, item))}",
            )
        target = self._config.target
        require_columns(
            [*names, *([] if target is None else [target])], [str(name) for name in item], self._source
        )
        return {name: item[name] for name in names}, None if target is None else item[target]

    def _by_position(self, item: Any) -> tuple[dict[str, Any], Any]:
        given = [name for name in ("inputs", "target", "id") if getattr(self._config, name) is not None]
        if given:
            raise ConfigError(
                f"the items of {self._source} are of type {type(item).__name__} and have no names for"
                f" data.{given[0]} to select",
                next_step=(
                    f"leave out {', '.join(given)} (the last of several values is the target), or return"
                    " dicts"
                ),
            )
        values = list(item) if isinstance(item, tuple | list) else [item]
        target = values.pop() if len(values) > 1 else None
        return {f"input {position}": value for position, value in enumerate(values)}, target

    def _id(self, row: int, column: str) -> Any:
        item = self._item(row)
        if not isinstance(item, Mapping):
            self._by_position(item)
        require_columns([column], [str(name) for name in item], self._source)
        value = item[column]
        return value.item() if isinstance(value, Tensor | np.generic) and value.ndim == 0 else value

    def _unit_column(self, column: str, count: int) -> Sequence[Any] | Array:
        """The dataset's own list of that name, if it has one, which spares reading every item; else what its
        items hold.
        """
        listed = getattr(self._dataset, column, None)
        if listed is None:
            if not isinstance(self._item(0), Mapping):
                raise ConfigError(
                    f"privacy.unit.column: {self._source} has no list {column!r} that says whom each row"
                    " belongs to",
                    expected=(
                        f"an attribute {column} with one text or whole number per row, or items that are"
                        f" dicts with {column!r}"
                    ),
                )
            return [self._id(row, column) for row in range(count)]
        values = np.asarray(listed.cpu() if isinstance(listed, Tensor) else listed)
        if values.shape != (count,):
            raise DataError(
                f"{column!r} of {self._source} has the shape {list(values.shape)}",
                expected=f"one id for each of {count} rows",
            )
        return values

    def _digest(self, count: int, units: Array | None) -> str:
        """Of what is cheap to look at: what was called, the length, the first and the last item, whom the
        rows belong to.
        """
        digest = hashlib.sha256(
            json.dumps(
                [self._config.factory, self._config.kwargs, count], sort_keys=True, default=str
            ).encode()
        )
        with _drawing_the_same():
            for row in (0, count - 1):
                try:
                    inputs, target = self._tensors(row)
                except DataError as error:
                    digest.update(f"{row} {error}".encode())
                    continue
                for tensor in (*inputs, *(() if target is None else (target,))):
                    digest.update(tensor.numpy().tobytes())
        if units is not None:
            digest.update("\n".join(map(str, units.tolist())).encode())
        return digest.hexdigest()


@contextmanager
def _drawing_the_same() -> Iterator[None]:
    """Items that draw from the global generators are the same ones in every process; these are in the end as
    they were.
    """
    of_torch, of_numpy, of_python = torch.get_rng_state(), np.random.get_state(), random.getstate()
    try:
        torch.default_generator.manual_seed(0)
        np.random.seed(0)
        random.seed(0)
        yield
    finally:
        torch.set_rng_state(of_torch)
        np.random.set_state(of_numpy)
        random.setstate(of_python)


def _shapes(inputs: list[Tensor], target: Tensor | None) -> list[list[int]]:
    return [list(tensor.shape) for tensor in (*inputs, *(() if target is None else (target,)))]


def _as_array(value: Any, name: str, row: int) -> Array | Tensor:
    if isinstance(value, Tensor | np.ndarray):
        return value
    if isinstance(value, bool | int | float | np.generic | list):
        try:
            return np.asarray(value)
        except ValueError as error:  # a list of lists of unequal length
            raise DataError(f"{name!r} in row {row} is ragged", expected="lists of one length") from error
    raise DataError(
        f"{name!r} in row {row} is of type {type(value).__name__}",
        expected="a tensor, a numpy array, a number or a list of numbers",
        next_step="convert it in the dataset, for example a picture with numpy.asarray",
    )
