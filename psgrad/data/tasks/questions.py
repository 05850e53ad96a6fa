"""Where the answer to a question stands in a text: the task question-answering."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import pyarrow as pa

from psgrad.config import DataConfig
from psgrad.data.loss import IGNORED
from psgrad.data.tasks.task import EncodedRow, TextRows, TextTask, require_kind
from psgrad.data.tokenizer import Encoding, Tokenizer
from psgrad.errors import ConfigError, DataError
from psgrad.models.pretrained import Pretrained


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
                f"data.text names one column for the task question-answering; expected {self.keys}"
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
            f"{where}: the answer has the characters {start} to {end}, and the context has {len(context)}",
            hint="characters are counted from 0",
        )
    found = context[start:end]
    if text is not None and found != text:
        raise DataError(
            f"{where}: the context has {found!r} at character {start}, and the answer is {text!r}",
            hint="count characters, not bytes, of the context as it is",
        )
    return start + len(found) - len(found.lstrip()), end - len(found) + len(found.rstrip())


def _first(value: Any) -> Any:
    return (value[0] if value else None) if isinstance(value, list) else value
