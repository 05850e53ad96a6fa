"""Classes, or numbers, of texts, of pairs of texts, and of their words: the tasks
sequence-classification, regression and token-classification; and what a label, by name or number, means to a
pretrained model's head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa

from psgrad.config import DataConfig
from psgrad.data.loss import IGNORED
from psgrad.data.sources.arrow_types import is_list, require_numbers
from psgrad.data.targets import unknown_label
from psgrad.data.tasks.task import (
    Array,
    EncodedRow,
    TextRows,
    TextTask,
    is_texts,
    require_kind,
)
from psgrad.data.tokenizer import Encoding, Tokenizer
from psgrad.errors import ConfigError, DataError
from psgrad.models.pretrained import Pretrained
from psgrad.wording import first_of

_SHOWN = 20


def _require_one_order(config: Any, names: Sequence[str]) -> None:
    """Raises ConfigError where label2id of a model's config gives a name another number than id2label."""
    for name, number in (getattr(config, "label2id", None) or {}).items():
        if name in names and names.index(name) != int(number):
            raise ConfigError(
                f"the model's config has {name!r} as class {names.index(name)} in id2label, and as class"
                f" {number} in label2id; expected the same number in both, as the model was trained",
                hint="correct config.json in the model's folder",
            )


@dataclass(frozen=True)
class HeadLabels:
    """The classes of a head. names: of the classes 0, 1, ...; generic: whether they are LABEL_0, LABEL_1 and
    so on, which nobody gave.
    """

    names: tuple[str, ...]
    generic: bool

    @classmethod
    def of(cls, config: Any, data: DataConfig) -> HeadLabels:
        """The labels of a model's config. Where that has no names, data.class_names are taken.

        Raises ConfigError where class_names are not as many as the head has, where they have a name of the
        model's at another place, and where the model's config contradicts itself.
        """
        found = {int(key): str(name) for key, name in config.id2label.items()}
        names = tuple(found.get(place, f"LABEL_{place}") for place in range(config.num_labels))
        generic = names == tuple(f"LABEL_{place}" for place in range(len(names)))
        given = data.class_names
        if given is not None and len(given) != len(names):
            raise ConfigError(
                f"the length of data.class_names is {len(given)}, and that of the model's head {len(names)}",
                hint=None if generic else f"the model's are {first_of(names, _SHOWN)}",
            )
        _require_one_order(config, names)
        if given is not None and not generic:
            moved = [name for place, name in enumerate(given) if name in names and names[place] != name]
            if moved:
                raise ConfigError(
                    f"data.class_names has {moved[0]!r} as class {given.index(moved[0])}, and the model's"
                    f" config (id2label) as class {names.index(moved[0])}; expected the model's order:"
                    f" {first_of(names, _SHOWN)}",
                    hint="leave data.class_names out: labels by name are numbered as in the model",
                )
        return cls(names, generic) if given is None or not generic else cls(tuple(given), False)

    @property
    def given(self) -> tuple[str, ...] | None:
        """The names, unless nobody gave any."""
        return None if self.generic else self.names

    def number(self, value: Any) -> int | None:
        """The class of a label: its number, or its name; None for a value that is not a label of the head.
        -100 stays, a label that does not count.
        """
        if isinstance(value, str):
            return self._places.get(value)
        if isinstance(value, (bool, int)) or (isinstance(value, float) and value.is_integer()):
            number = int(value)
            return number if 0 <= number < len(self.names) or number == IGNORED else None
        return None

    @cached_property
    def _places(self) -> dict[str, int]:
        return {name: place for place, name in enumerate(self.names)}

    def require_known(self, rows: TextRows, values: Sequence[Any]) -> None:
        """Raises DataError, with row and count, unless each label, one or a list in a row, is of the head.
        values: of the rows.
        """
        lists = [each if isinstance(each, list) else [each] for each in values]
        wrong = [i for i, labels in enumerate(lists) if any(self.number(each) is None for each in labels)]
        if not wrong:
            return
        first = wrong[0]
        place = next(at for at, each in enumerate(lists[first]) if self.number(each) is None)
        position = f", position {place}" if isinstance(values[first], list) else ""
        raise self._unknown(lists[first][place], f"{rows.where(first)}{position}", (len(wrong), len(values)))

    def _unknown(self, value: Any, where: str, count: tuple[int, int]) -> DataError:
        if value is None or value != value:
            return DataError(f"{where} has no label; expected one of {first_of(self.names, _SHOWN)}")
        if not isinstance(value, str):
            numbers = f"a number from 0 to {len(self.names) - 1}"
            return DataError(
                f"{where} has the label {value!r}; expected {numbers}, or {IGNORED} for one to ignore"
            )
        error = unknown_label(value, where, count, self.names)
        if not self.generic:
            return error
        return DataError(
            error.message,
            hint="list the names in data.class_names, in the order of the model's outputs",
        )

    def numbers(self, rows: TextRows, column: str) -> Array:
        """[n]: the class of each row's label. Raises DataError."""
        values = rows.values(column)
        self.require_known(rows, values)
        return np.array(self.of_list(values), np.int64)

    def of_list(self, values: Sequence[Any]) -> list[int]:
        """The class of each label, all of which are known."""
        found = [self.number(value) for value in values]
        assert None not in found, "labels that were checked"
        return [number for number in found if number is not None]


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
            several = "lists of labels: the model's problem_type is multi_label_classification"
            raise DataError(
                f"{self.target!r} is of type {schema.field(self.target).type}; expected"
                f" {several if self.several else 'one label in each row'}"
            )

    def targets(self, rows: TextRows) -> Array | None:
        if not self.several:
            return self.labels.numbers(rows, self.target)
        self._lists(rows)
        return None

    def _targets(self, rows: TextRows) -> Array:
        if not self.several:
            return self.labels.numbers(rows, self.target)
        return np.stack(list(map(self._marked, self._lists(rows))))

    def _lists(self, rows: TextRows) -> list[list[Any]]:
        """The labels of each row, several. Raises DataError for one that is not known."""
        lists = [each or [] for each in rows.values(self.target)]
        self.labels.require_known(rows, [[] if self._is_whole(each) else each for each in lists])
        return lists

    def _is_whole(self, listed: list[Any]) -> bool:
        """Whether a list has a probability for each class."""
        whole = len(listed) == len(self.labels.names)
        return whole and all(isinstance(each, float | bool) for each in listed)

    def _marked(self, listed: list[Any]) -> Array:
        """[classes]: a list of names or numbers of classes, or of one probability for each, as numbers."""
        if self._is_whole(listed):
            return np.asarray(listed, np.float32)
        found = np.zeros(len(self.labels.names), np.float32)
        found[self.labels.of_list(listed)] = 1
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
                    f"{rows.where(i)}: the length of {self.target!r} is {len(numbers)}; expected {count}, as"
                    " many as the model returns",
                )
            found.append([np.nan if number is None else number for number in numbers])
        with np.errstate(over="ignore"):  # what float32 can not hold is infinite: its row is not finite
            array = np.asarray(found, np.float32)
        return array[:, 0] if count == 1 else array


class TokenClassification(TextTask):
    """A class for each word of a list of words.

    The first token of a word has the word's label, the others have -100, as have special tokens.
    """

    keys: ClassVar[str] = "text, a column of lists of words, and target, lists of their labels"

    most: ClassVar[int] = 1
    label_per_token: ClassVar[bool] = True

    def __init__(self, data: DataConfig, tokenizer: Tokenizer, pretrained: Pretrained) -> None:
        super().__init__(data, tokenizer, pretrained)
        (self.text,) = self.texts
        self.labels = HeadLabels.of(pretrained.config, data)
        self.class_names = self.labels.given

    def check(self, schema: pa.Schema) -> None:
        require_kind(schema, self.text, [is_texts], "a list of words in each row")
        require_kind(schema, self.target, [is_list], "a list of labels in each row")
        if not self.tokenizer.inner.is_fast:
            raise DataError(
                f"the tokenizer {type(self.tokenizer.inner).__name__} does not tell the word of a token",
                hint="name one with a tokenizer.json in data.tokenizer",
            )

    def targets(self, rows: TextRows) -> Array | None:
        self.labels.require_known(rows, [each or [] for each in rows.values(self.target)])
        return None

    def encode(self, rows: TextRows) -> list[EncodedRow]:
        texts, listed = rows.values(self.text), rows.values(self.target)
        for i, (text, labels) in enumerate(zip(texts, listed, strict=True)):
            _require_labels(text, labels, rows.where(i))
        self.labels.require_known(rows, listed)
        tokens = self.tokenizer.encode(texts, where=rows.where, words=True)
        found = []
        for row, labels in zip(tokens, listed, strict=True):
            target = _of_words(row, self.labels.of_list(labels))
            found.append((*self.inputs_of(row), np.asarray(target, np.int64)))
        return found


def _require_labels(words: Any, labels: Any, where: str) -> None:
    """Raises DataError unless a row has words, and a label for each of them."""
    if not words or None in words:
        what = f"the word at position {words.index(None)} is missing" if words else "there are no words"
        raise DataError(f"{where}: {what}", hint="remove such rows, or such words with their labels")
    if labels is None or len(labels) != len(words):
        count = "no" if labels is None else len(labels)
        raise DataError(f"{where} has {len(words)} words and {count} labels; expected a label for each word")


def _of_words(row: Encoding, labels: list[int]) -> list[int]:
    """The label of each token: of a word's first token that of the word, else -100."""
    assert row.word is not None
    before = [None, *row.word[:-1]]
    return [
        IGNORED if word is None or word == last else labels[word]
        for word, last in zip(row.word, before, strict=True)
    ]
