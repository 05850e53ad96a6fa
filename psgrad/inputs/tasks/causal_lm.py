"""The next token of a text, of a completion or of an assistant's turns: the task causal-lm."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import pyarrow as pa

from psgrad.config import DataConfig
from psgrad.errors import ConfigError, DataError
from psgrad.inputs.models.loaded import Pretrained
from psgrad.inputs.sources.arrow_columns import is_list
from psgrad.inputs.tasks.task import IGNORED, EncodedRow, TextRows, TextTask, require_kind, require_text
from psgrad.inputs.text.tokenizer import Encoding, Tokenizer, chat_tokens, require_template


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
            raise ConfigError(
                f"data names {', '.join(named) or 'no text'} for the task causal-lm"
                + (" (two columns of text)" if len(self.texts) > 1 else ""),
                expected=self.keys,
                next_step="leave target out: the labels are the text's own tokens" if data.target else None,
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
                raise DataError(
                    f"{rows.where(i)} has no tokens",
                    expected="at least one token",
                    next_step="remove such rows",
                )
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
            found.append((Encoding(ids, [0] * len(ids), [False] * len(ids)), wrote))
        return found

    def _of_pairs(self, rows: TextRows, prompt: str, completion: str) -> list[tuple[Encoding, list[bool]]]:
        """Prompt and completion are one text: the special tokens are those of the whole."""
        prompts = rows.texts(prompt, empty=True)
        wholes = [a + b for a, b in zip(prompts, rows.texts(completion, empty=True), strict=True)]
        tokens = self.tokenizer.encode(wholes, where=rows.where)
        found = []
        for i, row in enumerate(tokens):
            told = row.span is not None
            start = _boundary(row, len(prompts[i])) if told else self._prefix(rows, i, prompts[i], row)
            found.append((row, [place >= start for place in range(len(row.ids))]))
        return found

    def _prefix(self, rows: TextRows, i: int, prompt: str, row: Encoding) -> int:
        """How many tokens the prompt has, for a tokenizer that tells no characters: those of the prompt alone
        must begin those of the whole.
        """
        (alone,) = self.tokenizer.encode([prompt], where=rows.where) if prompt else [Encoding([], [], [])]
        ids = list(alone.ids)
        while ids and alone.special[len(ids) - 1]:
            ids.pop()
        if row.ids[: len(ids)] != ids:
            raise DataError(
                f"{rows.where(i)}: the tokens of the prompt alone do not begin those of the whole",
                expected="a completion that begins with a space or a line break, so that no token spans both",
            )
        return len(ids)


def _boundary(row: Encoding, characters: int) -> int:
    """The place of the first token with a character behind the prompt's; a token that spans both counts."""
    assert row.span is not None
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
            f"the messages in {name!r} have the keys {', '.join(keys) or 'none'}",
            expected="role (system, user, assistant) and content",
            cause="another form of chats, such as from and value",
            next_step="rename the keys: from is role, value is content, human is user, gpt is assistant"
            if {"from", "value"} <= set(keys)
            else None,
        )
