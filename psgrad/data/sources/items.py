"""Items of a factory's Dataset: what of them are the inputs, the target and the id, as tensors. What they
draw from the global generators follows from their row, and nothing else moves on.
"""

from __future__ import annotations

import pickle
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from psgrad.config import DataConfig
from psgrad.data.columns import input_names, length_inputs, require_columns, target_names
from psgrad.data.rows import Array, checked_weights, stacked, to_tensor
from psgrad.data.targets import Labels
from psgrad.errors import ConfigError, DataError
from psgrad.user_code import describe_failure


@dataclass(frozen=True)
class Item:
    """What is used of an item.

    Attributes:
        tensors: the inputs, and the target where there is one.
        has_target: whether there is one.
        id, unit: what the columns hold that name the row, and say whom it belongs to.
    """

    tensors: tuple[Tensor, ...]
    has_target: bool
    id: Any = None
    unit: Any = None

    @property
    def shapes(self) -> list[list[int]]:
        """The shape of each tensor."""
        return [list(x.shape) for x in self.tensors]

    def content(self) -> bytes:
        """This item for `of_content`."""
        arrays = tuple(x.contiguous().numpy() for x in self.tensors)
        return pickle.dumps((arrays, self.has_target, self.id, self.unit), pickle.HIGHEST_PROTOCOL)

    @classmethod
    def of_content(cls, content: bytes) -> Item:
        """The item that `content` was made of, by this process."""
        arrays, *others = pickle.loads(content)
        return cls(tuple(map(torch.from_numpy, arrays)), *others)


class Items:
    """The items of a Dataset, each a tuple (input, ..., target) or a dict of columns.

    Args:
        unit: the column of a dict that says whom a row belongs to; None where no column does.
    """

    def __init__(self, dataset: Any, config: DataConfig, unit: str | None, labels: Labels) -> None:
        self._dataset, self._config, self._unit, self._labels = dataset, config, unit, labels
        self._lengths = length_inputs(config)
        self.source = f"the dataset of {config.factory}"

    def __len__(self) -> int:
        try:
            return len(self._dataset)
        except Exception as error:
            raise DataError(f"the length of {self.source} raised {describe_failure(error)}") from error

    def __call__(self, row: int) -> Item:
        """One item. Raises DataError where it can't be made or used, ConfigError where names do not fit."""
        item = self.raw(row)
        if not isinstance(item, Mapping):
            return self._by_position(item, row)
        known = [str(name) for name in item]
        ids = [name for name in (self._config.id, self._unit) if name is not None]
        require_columns(ids, known, self.source)
        tensors, has_target = self._of_columns(item, known, row)
        found = [None if name is None else _plain(item[name]) for name in (self._config.id, self._unit)]
        return Item(tensors, has_target, *found)

    def raw(self, row: int) -> Any:
        """One item, as the dataset makes it. Raises DataError."""
        try:
            return self._dataset[row]
        except Exception as error:
            raise DataError(f"row {row} of {self.source} raised {describe_failure(error)}") from error

    def _of_columns(
        self, item: Mapping[str, Any], known: list[str], row: int
    ) -> tuple[tuple[Tensor, ...], bool]:
        config = self._config
        names, targets = input_names(config), target_names(config)
        if not names:
            raise ConfigError(
                f"the items of {self.source} are dicts, and data.inputs does not say which columns the"
                f" model reads; expected one or more of {', '.join(known)}",
            )
        weight = [] if config.weight is None else [config.weight]
        require_columns([*names, *targets, *weight], known, self.source)
        inputs = []
        for place, name in enumerate(names):
            value = len(item[name]) if place in self._lengths else item[name]
            inputs.append(to_tensor(_as_array(value, name, row), name))
        for name in weight:
            value = to_tensor(_as_array(item[name], name, row), name).reshape(1)
            inputs.append(checked_weights(value, name, lambda _: f"row {row} of {self.source}")[0])
        found = [self._target(item[name], name, row) for name in targets]
        if len(found) > 1:
            found = [stacked([x.unsqueeze(0) for x in found], targets, "data.target")[0]]
        return (*inputs, *found), bool(found)

    def _by_position(self, item: Any, row: int) -> Item:
        keys = ("inputs", "target", "weight", "id")
        given = [name for name in keys if getattr(self._config, name) is not None]
        if given:
            raise ConfigError(
                f"the items of {self.source} are of type {type(item).__name__} and have no names for"
                f" data.{given[0]} to select",
                hint=f"leave out {', '.join(given)}: the last value is the target; or return dicts",
            )
        if self._unit is not None:
            raise ConfigError(
                f"privacy.unit.column: {self.source} has no list {self._unit!r} that says whom each row"
                f" belongs to; expected such an attribute, or items that are dicts with {self._unit!r}",
            )
        values = list(item) if isinstance(item, tuple | list) else [item]
        target = [self._target(values.pop(), "target", row)] if len(values) > 1 else []
        named = [(f"input {place}", value) for place, value in enumerate(values)]
        inputs = [to_tensor(_as_array(value, name, row), name) for name, value in named]
        return Item((*inputs, *target), bool(target))

    def _target(self, value: Any, name: str, row: int) -> Tensor:
        if isinstance(value, str) and self._labels.names is None:
            raise ConfigError(
                f"the target {name!r} in row {row} of {self.source} is {value!r}, the name of a class;"
                " expected data.class_names with all names, in the order of the labels 0, 1, 2, ...",
            )
        array = np.array(value, dtype=object) if isinstance(value, str) else _as_array(value, name, row)
        if array.ndim == 0:
            plain = array.numpy() if isinstance(array, Tensor) else array
            where = f"row {row} of {self.source}"
            array = self._labels.encoded(plain.reshape(1), name, lambda _: where).values[0:1].reshape(())
        return to_tensor(array, name)


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


def seed_by_row(row: int) -> None:
    """An item that draws from the global generators is the same one in every process."""
    torch.default_generator.manual_seed(row)
    np.random.seed(row)
    random.seed(row)
