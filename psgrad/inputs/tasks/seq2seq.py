"""A text that is written for another: the task seq2seq-lm."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import pyarrow as pa

from psgrad.inputs.tasks.task import (
    IGNORED,
    TARGET,
    EncodedRow,
    Field,
    TextRows,
    TextTask,
    is_text,
    require_kind,
)
from psgrad.inputs.text.forward import shift_of


class Seq2SeqLM(TextTask):
    """The labels are the tokens of the target, the decoder's inputs the same, shifted by the model's own
    function.
    """

    keys: ClassVar[str] = "text, a column of texts, and target, a column of the texts to be written"

    def _prepare(self) -> None:
        self.require_keys("text", "target", most=1)
        assert self.data.target_column is not None
        self.target: str = self.data.target_column
        self.columns = (*self.texts, self.target)
        self.shift = shift_of(self.pretrained)
        decoder = Field("decoder_input_ids", ((0, 1),), self.tokenizer.pad)
        self.fields = (*self.input_fields((0, 0)), decoder, Field(TARGET, ((0, 1),), IGNORED))

    def check(self, schema: pa.Schema) -> None:
        for name in self.columns:
            require_kind(schema, name, [is_text], "a column of text")

    def encode(self, rows: TextRows) -> list[EncodedRow]:
        tokens = self.tokenizer.encode(rows.texts(self.texts[0]), where=rows.where)
        written = self.tokenizer.encode(rows.texts(self.target), where=rows.where, target=True)
        return [
            (*self.inputs_of(row), np.asarray(shifted, np.int64), np.asarray(labels, np.int64))
            for row, labels, shifted in (
                (row, each.ids, self.shift(each.ids)) for row, each in zip(tokens, written, strict=True)
            )
        ]

    def describe(self, rows: TextRows) -> str:
        return "\n".join(str(rows.values(name)[0]) for name in self.columns)
