"""Tasks that find an answer: one of several continuations of a text, the task multiple-choice; and where the
answer to a question stands in a text, the task question-answering.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa

from psgrad.config import DataConfig
from psgrad.data.loss import IGNORED
from psgrad.data.tasks.task import (
    Array,
    EncodedRow,
    TextRows,
    TextTask,
    is_texts,
    require_kind,
    require_text,
)
from psgrad.data.tokenizer import Encoding, Tokenizer
from psgrad.errors import ConfigError, DataError, one_line
from psgrad.models.pretrained import Pretrained


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
            raise ConfigError(
                one_line("data.text names one column for the task multiple-choice", "expected " + (self.keys))
            )
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
                raise DataError(f"{rows.where(i)}: a choice is missing or empty; expected texts in every row")
            self.count = self.count or len(row)
            if len(row) != self.count:
                raise DataError(
                    f"{rows.where(i)} has {len(row)} choices, other rows have {self.count}; expected the"
                    " same number of choices in all rows",
                )
        return found

    def _targets(self, rows: TextRows, count: int) -> Array:
        values = enumerate(rows.values(self.target))
        return np.array([self._number(value, count, partial(rows.where, i)) for i, value in values], np.int64)

    def _number(self, value: Any, count: int, where: Callable[[], str]) -> int:
        number = int(value) if isinstance(value, str) and value.strip().isdigit() else value
        if isinstance(number, bool | int) and (0 <= number < count or number == IGNORED):
            return int(number)
        raise DataError(
            f"{where()} has the target {value!r}; expected the place of the right choice, from 0 to"
            f" {count - 1}",
            hint="places that count from 1" if number == count else None,
        )


def _stacked(parts: tuple[Array, ...], padding: float | int) -> Array:
    """[choices, positions], padded to the longest."""
    found = np.full((len(parts), max(map(len, parts))), padding, parts[0].dtype)
    for place, part in enumerate(parts):
        found[place, : len(part)] = part
    return found


class QuestionAnswering(TextTask):
    """The first and the last token of the answer, of the first one where there are several.

    A question without an answer has the first token ([CLS]) twice; an answer that was cut away has -100.
    """

    keys: ClassVar[str] = (
        "text: [question, context], and target, a column of answers as SQuAD has them: {answer_start: [17],"
        " text: [the answer]}, or {start: 17, end: 27} in characters of the context"
    )
    masked: ClassVar[bool] = False  # the logits of padding would be positions that the answer may have
    labels_are_positions: ClassVar[bool] = True

    def __init__(self, data: DataConfig, tokenizer: Tokenizer, pretrained: Pretrained) -> None:
        super().__init__(data, tokenizer, pretrained)
        if len(self.texts) != 2:
            raise ConfigError(
                one_line(
                    "data.text names one column for the task question-answering", "expected " + (self.keys)
                )
            )
        if not tokenizer.inner.is_fast:
            raise DataError(
                f"the tokenizer {type(tokenizer.inner).__name__} tells no characters of tokens; expected a"
                " tokenizer with a tokenizer.json",
            )

    def check(self, schema: pa.Schema) -> None:
        super().check(schema)
        require_kind(schema, self.target, [pa.types.is_struct], self.keys)

    def encode(self, rows: TextRows) -> list[EncodedRow]:
        questions, contexts = (rows.texts(name) for name in self.texts)
        tokens = self.tokenizer.encode(questions, contexts, where=rows.where, cut="only_second")
        answers = rows.values(self.target)
        found = []
        for i, row in enumerate(tokens):
            span = _characters(answers[i], contexts[i], rows.where(i))
            found.append((*self.inputs_of(row), np.asarray(self._tokens(row, span), np.int64)))
        return found

    def _tokens(self, row: Encoding, span: tuple[int, int] | None) -> tuple[int, int]:
        """The first and last token with a character of the answer."""
        if span is None:
            cls = self.tokenizer.inner.cls_token_id
            place = row.ids.index(cls) if cls in row.ids else 0
            return place, place
        assert row.part is not None
        assert row.span is not None
        inside = [
            place
            for place, (part, (start, end)) in enumerate(zip(row.part, row.span, strict=True))
            if part == 1 and start < span[1] and end > span[0]
        ]
        if not inside:
            return IGNORED, IGNORED
        cut = len(row.ids) == self.tokenizer.limit
        whole = row.span[inside[0]][0] <= span[0] and row.span[inside[-1]][1] >= span[1]
        return (inside[0], inside[-1]) if whole or not cut else (IGNORED, IGNORED)


def _characters(answer: Any, context: str, where: str) -> tuple[int, int] | None:
    """The characters [start, end) of an answer without space around it; None where there is no answer."""
    if answer is None:
        return None
    start = _first(answer.get("answer_start", answer.get("start")))
    text, end = _first(answer.get("text")), _first(answer.get("end"))
    if start is None or start < 0 or (text is None and end is None) or text == "":
        return None
    end = start + len(text) if end is None else end
    if not start < end <= len(context):
        raise DataError(
            f"{where}: the answer has the characters {start} to {end}, and the context has {len(context)};"
            " expected characters of the context, counted from 0",
        )
    found = context[start:end]
    if text is not None and found != text:
        raise DataError(
            f"{where}: the context has {found!r} at character {start}, and the answer is {text!r};"
            " expected the answer as it stands in the context",
            hint="characters that were counted in bytes, or a context that was changed afterwards",
        )
    return start + len(found) - len(found.lstrip()), end - len(found) + len(found.rstrip())


def _first(value: Any) -> Any:
    return (value[0] if value else None) if isinstance(value, list) else value
