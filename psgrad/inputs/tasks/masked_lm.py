"""The hidden tokens of a text: the task masked-lm."""

from __future__ import annotations

import hashlib
from typing import ClassVar

import numpy as np
import pyarrow as pa

from psgrad.config import DataConfig
from psgrad.errors import DataError
from psgrad.inputs.models.loaded import Pretrained
from psgrad.inputs.tasks.task import IGNORED, Array, EncodedRow, TextRows, TextTask, require_text
from psgrad.inputs.text.tokenizer import Encoding, Tokenizer

_MASK, _RANDOM = 0.8, 0.9  # as BERT: 80 % become the mask token, 10 % another token, 10 % stay


class MaskedLM(TextTask):
    """The label of a hidden token is the token; all others have -100.

    With a target the text has mask tokens, and the target is the same text without them. Else tokens are
    hidden at random, the same ones each time: the draws are by the row's tokens and data.seed.
    """

    keys: ClassVar[str] = "text, a column of texts; and target where the text has mask tokens already"

    needed: ClassVar[tuple[str, ...]] = ("text",)
    most: ClassVar[int] = 1
    label_per_token: ClassVar[bool] = True

    def __init__(self, data: DataConfig, tokenizer: Tokenizer, pretrained: Pretrained) -> None:
        super().__init__(data, tokenizer, pretrained)
        self.mask = tokenizer.inner.mask_token_id
        if self.mask is None:
            raise DataError(
                "the tokenizer has no mask token, and the task masked-lm hides tokens with it",
                next_step="name the tokenizer of the model in data.tokenizer",
            )

    def check(self, schema: pa.Schema) -> None:
        super().check(schema)
        if self.data.target_column is not None:
            require_text(schema, self.data.target_column)

    def encode(self, rows: TextRows) -> list[EncodedRow]:
        tokens = self.tokenizer.encode(rows.texts(self.texts[0]), where=rows.where)
        if self.data.target_column is None:
            return [self._hidden(row) for row in tokens]
        whole = self.tokenizer.encode(rows.texts(self.data.target_column), where=rows.where)
        return [self._given(row, whole[i], rows.where(i)) for i, row in enumerate(tokens)]

    def _given(self, row: Encoding, whole: Encoding, where: str) -> EncodedRow:
        ids, wanted = np.asarray(row.ids, np.int64), np.asarray(whole.ids, np.int64)
        if len(ids) != len(wanted):
            raise DataError(
                f"{where} has {len(ids)} tokens in {self.texts[0]!r}, and {len(wanted)} in"
                f" {self.data.target_column!r}",
                expected="the same text, in which a mask token stands for each token that is hidden",
                cause="one mask token stands for a word of several tokens",
            )
        return (*self.inputs_of(row), np.where(ids == self.mask, wanted, IGNORED))

    def _hidden(self, row: Encoding) -> EncodedRow:
        ids = np.asarray(row.ids, np.int64)
        hidden, ids = self._draw(ids, np.asarray(row.special, bool))
        target = np.where(hidden, row.ids, IGNORED)
        inputs = dict(zip(self.tokenizer.inputs, self.inputs_of(row), strict=True)) | {"input_ids": ids}
        return (*inputs.values(), target)

    def _draw(self, ids: Array, special: Array) -> tuple[Array, Array]:
        """(which tokens [t] are hidden, at least one where one may be; all tokens as the model sees them)."""
        key = hashlib.blake2b(ids.tobytes(), digest_size=8, salt=str(self.data.seed).encode()[:16]).digest()
        draws = np.random.Generator(np.random.Philox(key=int.from_bytes(key, "little"))).random((3, len(ids)))
        chance = np.where(special, 1.0, draws[0])
        hidden = chance < self.data.masked
        if not special.all():
            hidden[chance.argmin()] = True
        size = min(len(self.tokenizer.inner), self.pretrained.config.get_text_config().vocab_size)
        shown = np.where(draws[1] < _MASK, self.mask, np.where(draws[1] < _RANDOM, draws[2] * size, ids))
        return hidden, np.where(hidden, shown.astype(np.int64), ids)
