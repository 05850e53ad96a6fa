"""Classes, or numbers, of a text or of a pair of texts: the tasks sequence-classification and regression."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import pyarrow as pa

from psgrad.config import DataConfig
from psgrad.errors import DataError
from psgrad.inputs.models.loaded import Pretrained
from psgrad.inputs.sources.arrow_columns import is_list, require_numbers
from psgrad.inputs.tasks.labels import HeadLabels
from psgrad.inputs.tasks.task import Array, EncodedRow, TextRows, TextTask
from psgrad.inputs.tokenizer import Tokenizer


class _OfTexts(TextTask):
    """A target of one or two texts."""

    def encode(self, rows: TextRows) -> list[EncodedRow]:
        first, *second = (rows.texts(name) for name in self.texts)
        tokens = self.tokenizer.encode(first, *second, where=rows.where)
        targets = self._targets(rows)
        return [(*self.inputs_of(row), targets[i]) for i, row in enumerate(tokens)]

    def _targets(self, rows: TextRows) -> Array:
        """[n, ...]"""
        raise NotImplementedError


class SequenceClassification(_OfTexts):
    """A class of one or two texts; of a multi-label head a list of classes, as ones and zeros."""

    keys: ClassVar[str] = "text, one column or two, and target, a column of labels"

    def __init__(self, data: DataConfig, tokenizer: Tokenizer, pretrained: Pretrained) -> None:
        super().__init__(data, tokenizer, pretrained)
        self.labels = HeadLabels.of(pretrained.config, data)
        self.class_names = self.labels.given
        self.several = pretrained.config.problem_type == "multi_label_classification"

    def check(self, schema: pa.Schema) -> None:
        super().check(schema)
        listed = is_list(schema.field(self.target).type)
        if listed != self.several:
            raise DataError(
                f"{self.target!r} is of type {schema.field(self.target).type}",
                expected="lists of labels: the model's problem_type is multi_label_classification"
                if self.several
                else "one label in each row",
            )

    def targets(self, rows: TextRows) -> Array | None:
        return None if self.several else self._targets(rows)

    def _targets(self, rows: TextRows) -> Array:
        if not self.several:
            return self.labels.numbers(rows, self.target)
        return np.stack(
            [self._marked(value, rows.where(i)) for i, value in enumerate(rows.values(self.target))]
        )

    def _marked(self, value: list[object] | None, where: str) -> Array:
        """[classes]: a list of names or numbers of classes, or of one probability for each, as numbers."""
        count = len(self.labels.names)
        listed = [] if value is None else value
        if len(listed) == count and all(isinstance(each, float | bool) for each in listed):
            return np.asarray(listed, np.float32)
        found = np.zeros(count, np.float32)
        found[self.labels.of_list(listed, where)] = 1
        return found


class Regression(_OfTexts):
    """A number, or several, of one or two texts."""

    keys: ClassVar[str] = "text, one column or two, and target, a column of numbers"

    def check(self, schema: pa.Schema) -> None:
        super().check(schema)
        require_numbers(self.target, schema.field(self.target).type)

    def targets(self, rows: TextRows) -> Array | None:
        return self._targets(rows) if self.pretrained.config.num_labels == 1 else None

    def _targets(self, rows: TextRows) -> Array:
        count, found = self.pretrained.config.num_labels, []
        for i, value in enumerate(rows.values(self.target)):
            numbers = value if isinstance(value, list) else [value]
            if len(numbers) != count:
                raise DataError(
                    f"{rows.where(i)} has {len(numbers)} numbers in {self.target!r}",
                    expected=f"{count}, as many as the model returns",
                )
            found.append([np.nan if number is None else number for number in numbers])
        with np.errstate(over="ignore"):  # what float32 can not hold is infinite: its row is not finite
            array = np.asarray(found, np.float32)
        return array[:, 0] if count == 1 else array
