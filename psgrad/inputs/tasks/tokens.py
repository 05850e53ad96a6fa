"""A class for each word, or for each token: the task token-classification."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import pyarrow as pa

from psgrad.config import DataConfig
from psgrad.errors import DataError
from psgrad.inputs.models.loaded import Pretrained
from psgrad.inputs.sources.arrow_columns import is_list
from psgrad.inputs.tasks.labels import HeadLabels
from psgrad.inputs.tasks.task import (
    IGNORED,
    EncodedRow,
    TextRows,
    TextTask,
    is_text,
    is_texts,
    require_kind,
)
from psgrad.inputs.tokenizer import Encoding, Tokenizer


class TokenClassification(TextTask):
    """A class for each word of a list of words, or for each token of a text.

    The first token of a word has the word's label, the others have -100, as have special tokens.
    """

    keys: ClassVar[str] = "text, a column of lists of words (or of texts), and target, lists of their labels"

    most: ClassVar[int] = 1
    label_per_token: ClassVar[bool] = True

    def __init__(self, data: DataConfig, tokenizer: Tokenizer, pretrained: Pretrained) -> None:
        super().__init__(data, tokenizer, pretrained)
        (self.text,) = self.texts
        self.labels = HeadLabels.of(pretrained.config, data)
        self.class_names = self.labels.given

    def check(self, schema: pa.Schema) -> None:
        require_kind(schema, self.text, [is_texts, is_text], "lists of words, or texts")
        require_kind(schema, self.target, [is_list], "a list of labels in each row")
        if is_texts(schema.field(self.text).type) and not self.tokenizer.inner.is_fast:
            raise DataError(
                f"the tokenizer {type(self.tokenizer.inner).__name__} does not tell the word of a token",
                expected="a tokenizer with a tokenizer.json",
                next_step="give texts with a label for each token in place of lists of words",
            )

    def encode(self, rows: TextRows) -> list[EncodedRow]:
        texts, listed = rows.values(self.text), rows.values(self.target)
        for i, (text, labels) in enumerate(zip(texts, listed, strict=True)):
            _require_labels(text, labels, rows.where(i))
        words = bool(texts) and isinstance(texts[0], list)
        tokens = self.tokenizer.encode(texts, where=rows.where, words=words)
        found = []
        for i, (row, labels) in enumerate(zip(tokens, listed, strict=True)):
            numbers = self.labels.of_list(labels, rows.where(i))
            target = (
                _of_words(row, numbers) if words else self._of_tokens(texts[i], row, numbers, rows.where(i))
            )
            found.append((*self.inputs_of(row), np.asarray(target, np.int64)))
        return found

    def _of_tokens(self, text: str, row: Encoding, labels: list[int], where: str) -> list[int]:
        count = row.special.count(False)
        whole = count
        if count != len(labels) and self.tokenizer.truncation != "error":
            whole = self.tokenizer.length_uncut(text)  # a row that was cut has more labels than tokens
        if whole != len(labels):
            raise DataError(
                f"{where} has {len(labels)} labels, and its text has {whole} tokens",
                expected="a label for each token, or a list of words with a label for each word",
            )
        if self.tokenizer.truncation == "left":
            labels = labels[len(labels) - count :]
        left = iter(labels)
        return [IGNORED if special else next(left) for special in row.special]


def _require_labels(text: Any, labels: Any, where: str) -> None:
    """Raises DataError unless a row has words, and a label for each of them."""
    if not text or (isinstance(text, str) and not text.strip()):
        raise DataError(
            f"{where}: there are no words", expected="words in every row", next_step="remove such rows"
        )
    if labels is None:
        raise DataError(f"{where} has no labels", expected="a list of labels in every row")
    if isinstance(text, list) and None in text:
        raise DataError(
            f"{where}: the word at position {text.index(None)} is missing",
            expected="a text for each word",
            next_step="remove such rows, or such words with their labels",
        )
    if isinstance(text, list) and len(labels) != len(text):
        raise DataError(
            f"{where} has {len(text)} words and {len(labels)} labels", expected="a label for each word"
        )


def _of_words(row: Encoding, labels: list[int]) -> list[int]:
    """The label of each token: of a word's first token that of the word, else -100."""
    assert row.word is not None
    before = [None, *row.word[:-1]]
    return [
        IGNORED if word is None or word == last else labels[word]
        for word, last in zip(row.word, before, strict=True)
    ]
