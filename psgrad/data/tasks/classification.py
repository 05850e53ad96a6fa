"""Classes, or numbers, of texts, of pairs of texts, and of their words: the tasks
sequence-classification, regression and token-classification; and what a label, by name or number, means to a
pretrained model's head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
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


def names_of_head(config: Any, data: DataConfig) -> tuple[str, ...] | None:
    """The names of the classes of a head: those of the model's config, else data.class_names; None where
    nobody gave any. config: of transformers.

    Raises ConfigError where class_names are not as many as the head has, where they have a name of the
    model's at another place, and where the model's config contradicts itself.
    """
    saved = {int(key): str(name) for key, name in config.id2label.items()}
    names = tuple(saved.get(place, f"LABEL_{place}") for place in range(config.num_labels))
    generic = names == tuple(f"LABEL_{place}" for place in range(len(names)))
    given = data.class_names
    if given is not None and len(given) != len(names):
        raise ConfigError(
            f"the length of data.class_names is {len(given)}, and that of the model's head {len(names)}",
            hint=None if generic else f"the model's are {first_of(names, _SHOWN)}",
        )
    _require_one_order(config, names)
    if generic:
        return None if given is None else tuple(given)
    moved = [name for place, name in enumerate(given or ()) if name in names and names[place] != name]
    if moved:
        raise ConfigError(
            f"data.class_names has {moved[0]!r} at another place than the model's config (id2label), where it"
            f" is class {names.index(moved[0])}; expected the model's order: {first_of(names, _SHOWN)}",
            hint="leave data.class_names out: labels by name are numbered as in the model",
        )
    return names


class HeadLabels:
    """What a label, by name or number, means to a head. names: of the classes; None without any."""

    def __init__(self, config: Any, data: DataConfig) -> None:
        """Raises ConfigError as `names_of_head` does."""
        self.names = names_of_head(config, data)
        self.count: int = config.num_labels
        self._places = {name: place for place, name in enumerate(self.names or ())}

    def number(self, value: Any) -> int | None:
        """The class of a label; None for a value that is not a label of the head. -100 stays, a label that
        does not count.
        """
        if isinstance(value, str):
            return self._places.get(value)
        if isinstance(value, (bool, int)) or (isinstance(value, float) and value.is_integer()):
            return int(value) if 0 <= value < self.count or value == IGNORED else None
        return None

    def numbers(self, labels: Sequence[Any], where: Callable[[int], str], rows: bool = True) -> list[int]:
        """The class of each label. where: in words, of the i-th. rows: whether each is of a row of its own.
        Raises DataError for one that is not of the head.
        """
        found = [self.number(label) for label in labels]
        wrong = [i for i, number in enumerate(found) if number is None]
        if wrong:
            count = (len(wrong), len(labels)) if rows else (1, 1)
            raise self._unknown(labels[wrong[0]], where(wrong[0]), count)
        return [number for number in found if number is not None]

    def _unknown(self, value: Any, where: str, count: tuple[int, int]) -> DataError:
        numbers = f"a number from 0 to {self.count - 1}"
        if value is None or value != value:
            known = numbers if self.names is None else f"one of {first_of(self.names, _SHOWN)}"
            return DataError(f"{where} has no label; expected {known}")
        if isinstance(value, str) and self.names is not None:
            return unknown_label(value, where, count, self.names)
        of_names = isinstance(value, str)
        return DataError(
            f"{where} has the label {value!r}; expected {numbers}, or {IGNORED} for one to ignore",
            hint="list the names in data.class_names, in the order of the model's outputs"
            if of_names
            else None,
        )


def _position(where: str, place: int) -> str:
    return f"{where}, position {place}"


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
        self.labels = HeadLabels(pretrained.config, data)
        self.class_names = self.labels.names
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
        found = self._targets(rows)
        return None if self.several else found

    def _targets(self, rows: TextRows) -> Array:
        values = rows.values(self.target)
        if not self.several:
            return np.array(self.labels.numbers(values, rows.where), np.int64)
        return np.stack([self._marked(listed or [], rows.where(i)) for i, listed in enumerate(values)])

    def _marked(self, listed: list[Any], where: str) -> Array:
        """[classes]: a list of names or numbers of classes, or of one probability for each, as numbers."""
        if len(listed) == self.labels.count and all(isinstance(each, float | bool) for each in listed):
            return np.asarray(listed, np.float32)
        found = np.zeros(self.labels.count, np.float32)
        found[self.labels.numbers(listed, partial(_position, where), rows=False)] = 1
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
        self.labels = HeadLabels(pretrained.config, data)
        self.class_names = self.labels.names

    def check(self, schema: pa.Schema) -> None:
        require_kind(schema, self.text, [is_texts], "a list of words in each row")
        require_kind(schema, self.target, [is_list], "a list of labels in each row")

    def targets(self, rows: TextRows) -> Array | None:
        self._numbers(rows)
        return None

    def _numbers(self, rows: TextRows) -> list[list[int]]:
        """The classes of the labels of each row. Raises DataError."""
        return [
            self.labels.numbers(labels or [], partial(_position, rows.where(i)), rows=False)
            for i, labels in enumerate(rows.values(self.target))
        ]

    def encode(self, rows: TextRows) -> list[EncodedRow]:
        texts = rows.values(self.text)
        for i, (text, labels) in enumerate(zip(texts, rows.values(self.target), strict=True)):
            _require_labels(text, labels, rows.where(i))
        tokens = self.tokenizer.encode(texts, where=rows.where, words=True)
        return [
            (*self.inputs_of(row), np.asarray(_of_words(row, labels), np.int64))
            for row, labels in zip(tokens, self._numbers(rows), strict=True)
        ]


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
    before = [None, *row.word[:-1]]
    return [
        IGNORED if word is None or word == last else labels[word]
        for word, last in zip(row.word, before, strict=True)
    ]
