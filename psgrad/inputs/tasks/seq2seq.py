"""A text that is written for another: the task seq2seq-lm."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import pyarrow as pa

from psgrad.config import DataConfig
from psgrad.inputs.models.loaded import Pretrained
from psgrad.inputs.models.pretrained import shift_of
from psgrad.inputs.tasks.task import IGNORED, TARGET, EncodedRow, Field, TextRows, TextTask, require_text
from psgrad.inputs.text.tokenizer import Tokenizer


class Seq2SeqLM(TextTask):
    """The labels are the tokens of the target; the model's own function shifts them for the decoder."""

    keys: ClassVar[str] = "text, a column of texts, and target, a column of the texts to be written"

    most: ClassVar[int] = 1

    def __init__(self, data: DataConfig, tokenizer: Tokenizer, pretrained: Pretrained) -> None:
        super().__init__(data, tokenizer, pretrained)
        self.shift = shift_of(pretrained)
        decoder = Field("decoder_input_ids", ((0, 1),), tokenizer.pad)
        self.fields = (*self.fields[:-1], decoder, Field(TARGET, ((0, 1),), IGNORED))

    def check(self, schema: pa.Schema) -> None:
        super().check(schema)
        require_text(schema, self.target)

    def encode(self, rows: TextRows) -> list[EncodedRow]:
        tokens = self.tokenizer.encode(rows.texts(self.texts[0]), where=rows.where)
        written = self.tokenizer.encode(rows.texts(self.target), where=rows.where, target=True)
        return [
            (*self.inputs_of(row), np.asarray(self.shift(each.ids), np.int64), np.asarray(each.ids, np.int64))
            for row, each in zip(tokens, written, strict=True)
        ]

    def describe(self, rows: TextRows) -> str:
        return "\n".join(str(rows.values(name)[0]) for name in (*self.texts, self.target))
