"""The next tokens of a text, the hidden ones, or a text that is written for another: the tasks causal-lm,
masked-lm and seq2seq-lm.
"""

from __future__ import annotations

import hashlib
from typing import ClassVar

import numpy as np
import pyarrow as pa

from psgrad.config import DataConfig
from psgrad.data.loss import IGNORED
from psgrad.data.sources.arrow_types import is_list
from psgrad.data.tasks.task import (
    TARGET,
    Array,
    EncodedRow,
    Field,
    TextRows,
    TextTask,
    require_kind,
    require_text,
)
from psgrad.data.tokenizer import Encoding, Tokenizer, chat_tokens, require_template
from psgrad.errors import ConfigError, DataError
from psgrad.models.pretrained import Pretrained, shift_of


class CausalLM(TextTask):
    """Each token's label is the next token: target[t] belongs to the logits at t, and the last one is -100.

    Of a text all tokens count, of prompt and completion those of the completion, of a chat those that the
    assistant wrote.
    """

    keys: ClassVar[str] = "one of text (a column), prompt and completion, and messages"
    needed: ClassVar[tuple[str, ...]] = ()
    label_per_token: ClassVar[bool] = True

    def __init__(self, data: DataConfig, tokenizer: Tokenizer, pretrained: Pretrained) -> None:
        super().__init__(data, tokenizer, pretrained)
        given = [name for name in ("text", "prompt", "messages") if getattr(data, name) is not None]
        if len(given) != 1 or len(self.texts) > 1 or data.target is not None:
            named = [*given, *(["target"] if data.target is not None else [])]
            columns = " (two columns of text)" if len(self.texts) > 1 else ""
            raise ConfigError(
                f"data names {', '.join(named) or 'no text'} for the task causal-lm{columns}; expected"
                f" {self.keys}",
                hint="leave target out: the labels are the text's own tokens" if data.target else None,
            )
        others = (data.prompt, data.completion, data.messages)
        self.columns = (*self.texts, *(name for name in others if name is not None))
        if data.messages is not None:
            require_template(self.tokenizer)

    def check(self, schema: pa.Schema) -> None:
        for name in self.columns:
            if name == self.data.messages:
                require_kind(schema, name, [_is_chat], "lists of messages, each with role and content")
                _require_role(schema, name)
            else:
                require_text(schema, name)

    def encode(self, rows: TextRows) -> list[EncodedRow]:
        if self.data.messages is not None:
            found = self._of_chats(rows, self.data.messages)
        elif self.data.prompt is not None and self.data.completion is not None:
            found = self._of_pairs(rows, self.data.prompt, self.data.completion)
        else:
            tokens = self.tokenizer.encode(rows.texts(self.texts[0]), where=rows.where)
            found = [(row, [True] * len(row.ids)) for row in tokens]
        for i, (row, _) in enumerate(found):
            if not row.ids:
                raise DataError(f"{rows.where(i)} has no tokens", hint="remove such rows")
        return [(*self.inputs_of(row), _shifted(row.ids, counts)) for row, counts in found]

    def describe(self, rows: TextRows) -> str:
        if self.data.messages is not None:
            (chat,) = rows.values(self.data.messages)
            return "\n".join(f"{turn.get('role')}: {turn.get('content')}" for turn in chat or [])
        return "".join(str(rows.values(name)[0]) for name in self.columns)

    def _of_chats(self, rows: TextRows, column: str) -> list[tuple[Encoding, list[bool]]]:
        found = []
        for i, chat in enumerate(rows.values(column)):
            ids, wrote = chat_tokens(self.tokenizer, chat, rows.where(i))
            self.tokenizer.require_known(ids, rows.where(i))
            self.tokenizer.require_short(len(ids), rows.where(i))
            kept = self.tokenizer.kept(len(ids))
            ids, wrote = ids[kept], wrote[kept]
            none = [None] * len(ids)
            found.append((Encoding(ids, [0] * len(ids), [False] * len(ids), none, none, []), wrote))
        return found

    def _of_pairs(self, rows: TextRows, prompt: str, completion: str) -> list[tuple[Encoding, list[bool]]]:
        """Prompt and completion are one text: the special tokens are those of the whole."""
        prompts = rows.texts(prompt, empty=True)
        wholes = [a + b for a, b in zip(prompts, rows.texts(completion, empty=True), strict=True)]
        tokens = self.tokenizer.encode(wholes, where=rows.where)
        starts = [_boundary(row, len(prompts[i])) for i, row in enumerate(tokens)]
        return [
            (row, [place >= start for place in range(len(row.ids))])
            for row, start in zip(tokens, starts, strict=True)
        ]


def _boundary(row: Encoding, characters: int) -> int:
    """The place of the first token with a character behind the prompt's; a token that spans both counts."""
    return next(
        (
            place
            for place, (special, (start, end)) in enumerate(zip(row.special, row.span, strict=True))
            if not special and end > characters and end > start
        ),
        len(row.ids),
    )


def _shifted(ids: list[int], counts: list[bool]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """The label of each position: the next token where that counts, else -100."""
    labels = [token if count else IGNORED for token, count in zip(ids, counts, strict=True)]
    return np.asarray([*labels[1:], IGNORED], np.int64)


def _is_chat(kind: pa.DataType) -> bool:
    return is_list(kind) and pa.types.is_struct(kind.value_type)


def _require_role(schema: pa.Schema, name: str) -> None:
    """Raises DataError for messages without the key role."""
    keys = [field.name for field in schema.field(name).type.value_type]
    if "role" not in keys:
        raise DataError(
            f"the messages in {name!r} have the keys {', '.join(keys) or 'none'}; expected role (system,"
            " user, assistant) and content",
            hint="rename the keys: from is role, value is content, human is user, gpt is assistant",
        )


_HIDDEN = 0.15  # the share of tokens that are hidden
_MASK, _RANDOM = 0.8, 0.9  # as BERT: 80 % become the mask token, 10 % another token, 10 % stay


class MaskedLM(TextTask):
    """The label of a hidden token is the token; all others have -100. Tokens are hidden at random, the same
    ones each time: the draws are by the row's tokens.
    """

    keys: ClassVar[str] = "text, a column of texts, and no target: the labels are the text's own tokens"

    needed: ClassVar[tuple[str, ...]] = ("text",)
    most: ClassVar[int] = 1
    label_per_token: ClassVar[bool] = True

    def __init__(self, data: DataConfig, tokenizer: Tokenizer, pretrained: Pretrained) -> None:
        super().__init__(data, tokenizer, pretrained)
        self.mask = tokenizer.inner.mask_token_id
        if data.target is not None:
            raise ConfigError(f"data.target is given for the task masked-lm; expected {self.keys}")
        if self.mask is None:
            raise DataError(
                "the tokenizer has no mask token, and the task masked-lm hides tokens with it",
                hint="name the tokenizer of the model in data.tokenizer",
            )

    def encode(self, rows: TextRows) -> list[EncodedRow]:
        tokens = self.tokenizer.encode(rows.texts(self.texts[0]), where=rows.where)
        return [self._hidden(row) for row in tokens]

    def _hidden(self, row: Encoding) -> EncodedRow:
        ids = np.asarray(row.ids, np.int64)
        hidden, ids = self._draw(ids, np.asarray(row.special, bool))
        target = np.where(hidden, row.ids, IGNORED)
        inputs = dict(zip(self.tokenizer.inputs, self.inputs_of(row), strict=True)) | {"input_ids": ids}
        return (*inputs.values(), target)

    def _draw(self, ids: Array, special: Array) -> tuple[Array, Array]:
        """(which tokens [t] are hidden, at least one where one may be; all tokens as the model sees them)."""
        key = hashlib.blake2b(ids.tobytes(), digest_size=8, salt=b"0").digest()
        draws = np.random.Generator(np.random.Philox(key=int.from_bytes(key, "little"))).random((3, len(ids)))
        chance = np.where(special, 1.0, draws[0])
        hidden = chance < _HIDDEN
        if not special.all():
            hidden[chance.argmin()] = True
        size = min(len(self.tokenizer.inner), self.pretrained.config.get_text_config().vocab_size)
        shown = np.where(draws[1] < _MASK, self.mask, np.where(draws[1] < _RANDOM, draws[2] * size, ids))
        return hidden, np.where(hidden, shown.astype(np.int64), ids)


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
