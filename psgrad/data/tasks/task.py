"""A task: which columns of a dataset it needs, and how a row becomes the inputs and the target of a model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from psgrad.config import DataConfig
from psgrad.data.loss import IGNORED
from psgrad.data.sources.arrow_types import is_list, is_text
from psgrad.data.tokenizer import Encoding, Tokenizer
from psgrad.errors import ConfigError, DataError
from psgrad.models.pretrained import Pretrained

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Field:
    """A tensor of a row.

    name: the keyword of the model's input; TARGET for the target. axes: pairs (axis without the sample axis,
    column of lengths), of axes that differ in length from row to row. padding: what stands behind a row's own
    values.
    """

    name: str
    axes: tuple[tuple[int, int], ...] = ()
    padding: float | int = 0


TARGET = "target"
_POSITIONS = 0, 0  # the ragged axis of a row's tokens, and its column of lengths
EncodedRow = tuple[Array, ...]
"""The values of each field of a row, in the order of the task's fields."""


@dataclass(frozen=True)
class TextRows:
    """Some rows of a dataset. numbers: which ones; place: the place of one of them, for messages."""

    table: pa.Table
    numbers: Sequence[int]
    place: Callable[[int], str]

    def __len__(self) -> int:
        return len(self.numbers)

    def where(self, i: int) -> str:
        """The i-th of these rows in words."""
        return f"row {self.numbers[i]} ({self.place(self.numbers[i])})"

    def values(self, name: str) -> list[Any]:
        """The values of a column as Python has them."""
        found: list[Any] = self.table.column(name).to_pylist()
        return found

    def texts(self, name: str, *, empty: bool = False) -> list[str]:
        """The texts of a column. Raises DataError for a missing one, and unless `empty` for a blank one."""
        found = self.values(name)
        for i, text in enumerate(found):
            if text is None or (not empty and not text.strip()):
                what = "missing" if text is None else "empty"
                raise DataError(
                    f"{self.where(i)}: the text in {name!r} is {what}", hint="remove such rows from the data"
                )
        return found


class TextTask(ABC):
    """How rows of text become the inputs and the target of a model.

    Attributes:
        keys: the keys of data that it takes, for messages.
        needed: those of them that must be there. most: how many columns of text there may be.
        fields: the tensors of a row, the target last.
        label_per_token: whether the target has a label at each position of the inputs.
        class_names: of the classes that labels are; None where labels are not classes or have no names.
    """

    keys: ClassVar[str]
    needed: ClassVar[tuple[str, ...]] = ("text", "target")
    most: ClassVar[int] = 2
    label_per_token: ClassVar[bool] = False

    class_names: tuple[str, ...] | None = None

    def __init__(self, data: DataConfig, tokenizer: Tokenizer, pretrained: Pretrained) -> None:
        """Raises ConfigError for keys, DataError for a tokenizer that the task does not take."""
        self.data, self.tokenizer, self.pretrained = data, tokenizer, pretrained
        missing = [name for name in self.needed if getattr(data, name) is None]
        if missing or len(self.texts) > self.most:
            wrong = (
                f"data.{missing[0]} is missing" if missing else f"data.text names {len(self.texts)} columns"
            )
            raise ConfigError(f"{wrong} for the task {pretrained.task}; expected {self.keys}")
        padding = {"input_ids": self.tokenizer.pad}
        inputs = (Field(name, (_POSITIONS,), padding.get(name, 0)) for name in self.tokenizer.inputs)
        target = Field(TARGET, (_POSITIONS,), IGNORED) if self.label_per_token else Field(TARGET)
        self.fields = (*inputs, target)

    def check(self, schema: pa.Schema) -> None:
        """Raises DataError for a column of another type than the task takes."""
        for name in self.texts:
            require_text(schema, name)

    @abstractmethod
    def encode(self, rows: TextRows) -> list[EncodedRow]:
        """The tensors of each row. Raises DataError for a row that can't be used, with its place."""

    def targets(self, rows: TextRows) -> Array | None:
        """[n]: the targets of these rows, where each is one number that needs no tokens; else None."""
        return None

    def describe(self, rows: TextRows) -> str:
        """The text of one row, for people."""
        (values,) = zip(*(rows.values(name) for name in self.texts), strict=True)
        return "\n".join(value if isinstance(value, str) else " ".join(map(str, value)) for value in values)

    @property
    def texts(self) -> tuple[str, ...]:
        """The columns of text."""
        given = self.data.text
        return () if given is None else (given,) if isinstance(given, str) else tuple(given)

    @property
    def target(self) -> str:
        """The column of targets, of a task that needs one."""
        assert self.data.target_column is not None
        return self.data.target_column

    def inputs_of(self, row: Encoding) -> EncodedRow:
        """The values of what the tokenizer makes."""
        values = {"input_ids": row.ids, "attention_mask": [1] * len(row.ids), "token_type_ids": row.types}
        return tuple(np.asarray(values[name], np.int64) for name in self.tokenizer.inputs)


def is_texts(kind: pa.DataType) -> bool:
    """Whether a column holds lists of texts."""
    return is_list(kind) and is_text(kind.value_type)


def require_kind(
    schema: pa.Schema, name: str, kinds: Sequence[Callable[[pa.DataType], bool]], expected: str
) -> None:
    """Raises DataError unless a column is of one of these kinds."""
    kind = schema.field(name).type
    if not any(fits(kind) for fits in kinds):
        raise DataError(f"{name!r} is of type {kind}; expected {expected}")


def require_text(schema: pa.Schema, name: str) -> None:
    """Raises DataError unless a column holds texts."""
    require_kind(schema, name, [is_text], "a column of text")
