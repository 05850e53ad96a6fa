"""One of several continuations of a text: the task multiple-choice."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import pyarrow as pa

from psgrad.config import DataConfig
from psgrad.errors import ConfigError, DataError
from psgrad.inputs.models.loaded import Pretrained
from psgrad.inputs.tasks.task import (
    IGNORED,
    Array,
    EncodedRow,
    TextRows,
    TextTask,
    is_texts,
    require_kind,
    require_text,
)
from psgrad.inputs.tokenizer import Tokenizer


class MultipleChoice(TextTask):
    """The place of the right choice, counted from 0.

    Each choice is a pair of the question and itself: inputs are [choices, positions], padded to the row's
    longest choice. All rows have as many choices as the first one.
    """

    keys: ClassVar[str] = (
        "text: [question, choices], where the second column holds lists of texts, or [question, choice,"
        " choice, ...]; and target, the place of the right one from 0"
    )

    most: ClassVar[int] = 99
    axis: ClassVar[tuple[int, int]] = (1, 0)

    def __init__(self, data: DataConfig, tokenizer: Tokenizer, pretrained: Pretrained) -> None:
        super().__init__(data, tokenizer, pretrained)
        if len(self.texts) < 2:
            raise ConfigError("data.text names one column for the task multiple-choice", expected=self.keys)
        self.count: int | None = None

    def check(self, schema: pa.Schema) -> None:
        question, *choices = self.texts
        for name in (question, *(choices if len(choices) > 1 else ())):
            require_text(schema, name)
        if len(choices) == 1:
            require_kind(schema, choices[0], [is_texts], "a list of choices in each row")

    def encode(self, rows: TextRows) -> list[EncodedRow]:
        questions, choices = rows.texts(self.texts[0]), self._choices(rows)
        count = len(choices[0])
        flat = [choice for each in choices for choice in each]
        tokens = self.tokenizer.encode(
            [question for question in questions for _ in range(count)],
            flat,
            where=lambda place: rows.where(place // count),
            cut="only_second",
        )
        targets = self._targets(rows, count)
        values = [self.inputs_of(row) for row in tokens]
        padding = [field.padding for field in self.fields[:-1]]
        found: list[EncodedRow] = []
        for i in range(len(rows)):
            inputs = zip(zip(*values[i * count : (i + 1) * count], strict=True), padding, strict=True)
            found.append((*(_stacked(parts, value) for parts, value in inputs), targets[i]))
        return found

    def _choices(self, rows: TextRows) -> list[list[str]]:
        names = self.texts[1:]
        columns = [rows.values(name) for name in names]
        found = columns[0] if len(names) == 1 else [list(row) for row in zip(*columns, strict=True)]
        for i, row in enumerate(found):
            if not row or None in row or not all(choice.strip() for choice in row):
                raise DataError(
                    f"{rows.where(i)}: a choice is missing or empty", expected="texts in every row"
                )
            self.count = self.count or len(row)
            if len(row) != self.count:
                raise DataError(
                    f"{rows.where(i)} has {len(row)} choices, other rows have {self.count}",
                    expected="the same number of choices in all rows",
                )
        return found

    def _targets(self, rows: TextRows, count: int) -> Array:
        values = enumerate(rows.values(self.target))
        return np.array([self._number(value, count, rows.where(i)) for i, value in values], np.int64)

    def _number(self, value: Any, count: int, where: str) -> int:
        number = int(value) if isinstance(value, str) and value.strip().isdigit() else value
        if isinstance(number, bool | int) and (0 <= number < count or number == IGNORED):
            return int(number)
        raise DataError(
            f"{where} has the target {value!r}",
            expected=f"the place of the right choice, from 0 to {count - 1}",
            cause="places that count from 1" if number == count else None,
        )


def _stacked(parts: tuple[Array, ...], padding: float | int) -> Array:
    """[choices, positions], padded to the longest."""
    found = np.full((len(parts), max(map(len, parts))), padding, parts[0].dtype)
    for place, part in enumerate(parts):
        found[place, : len(part)] = part
    return found
