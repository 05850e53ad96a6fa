"""The tokenizer of a config, and texts as tokens, no longer than the model takes: chats by its chat template,
with the tokens that the assistant wrote.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeGuard

from psgrad.config import DataConfig
from psgrad.errors import ConfigError, DataError
from psgrad.models.hub import library, located, quiet
from psgrad.models.pretrained import Pretrained, model_inputs
from psgrad.wording import first_line

Where = Callable[[int], str]
"""The number of a text in a call to where it is written, for messages."""
_SAVED = ("tokenizer*", "vocab*", "*.model")  # the files of a tokenizer

UNLIMITED = 1_000_000  # tokenizers without a limit of their own say 1e30
# Position embeddings of these begin after the pad token's id, which takes that many from the table.
_PADDED_POSITIONS = ("roberta", "xlm-roberta", "camembert", "longformer", "mpnet", "esm", "data2vec-text")


@dataclass(frozen=True)
class Encoding:
    """The tokens of one row.

    ids, types: of each token; types are what token_type_ids are. special: whether a tokenizer put it there.
    word: of a text in words, the number of the token's word. span: the characters [start, end) of its text.
    """

    ids: list[int]
    types: list[int]
    special: list[bool]
    word: Sequence[int | None]
    span: Sequence[tuple[int, int]]


@dataclass(frozen=True)
class Tokenizer:
    """A tokenizer, and how its rows are cut and padded.

    Attributes:
        inner: transformers' tokenizer.
        inputs: the model's inputs that it makes, in the model's order: input_ids first.
        pad: the token id behind the end of a row.
        limit: the largest number of tokens in a row; None for any.
        size: how many token ids the model has embeddings for; None where its config does not say.
        truncation: where longer rows are cut.
        fingerprint: a SHA-256 of all that decides its tokens.
        notes: sentences about it for the manifest.
    """

    inner: Any
    inputs: tuple[str, ...]
    pad: int
    limit: int | None
    truncation: Literal["right", "left", "error"]
    fingerprint: str
    notes: tuple[str, ...] = ()
    size: int | None = None

    def encode(
        self,
        first: Sequence[Any],
        second: Sequence[str] | None = None,
        *,
        where: Where,
        words: bool = False,
        target: bool = False,
    ) -> list[Encoding]:
        """The tokens of each text, or pair of texts, with the special tokens that the tokenizer adds.

        words: each of `first` is a list of words. target:
        the texts are what the model is to write, for tokenizers that tell the two apart. Raises DataError
        for a row that is too long where truncation is "error", and for one with a token that the model does
        not have.
        """
        options = {"is_split_into_words": words, "return_special_tokens_mask": True, "verbose": False}
        texts = {"text_target" if target else "text": list(first)}
        if second is not None:
            texts["text_pair"] = list(second)
        found = _encodings(self.inner(**texts, **options))
        for i, row in enumerate(found):
            self.require_known(row.ids, where(i))
        long = [] if self.limit is None else [i for i, row in enumerate(found) if len(row.ids) > self.limit]
        if not long:
            return found
        self.require_short(len(found[long[0]].ids), where(long[0]))
        few = {key: [values[i] for i in long] for key, values in texts.items()}
        shorter = self.inner(**few, **options, truncation="longest_first", max_length=self.limit)
        for i, row in zip(long, _encodings(shorter), strict=True):
            found[i] = row
        return found

    def require_short(self, length: int, where: str) -> None:
        """Raises DataError for a row of `length` tokens if that is too long and the row must not be cut."""
        if self.limit is not None and length > self.limit and self.truncation == "error":
            raise DataError(
                f"{where} has {length:,} tokens; expected at most {self.limit:,}, which is data.max_length"
                " or else what the model takes",
                hint="set data.truncation: right (or left) to cut such rows, or raise data.max_length",
            )

    def require_known(self, ids: Sequence[int], where: str) -> None:
        """Raises DataError for a row with a token id for which the model has no embedding."""
        if self.size is not None and ids and (largest := max(ids)) >= self.size:
            raise DataError(
                f"{where} has the token {self.inner.convert_ids_to_tokens(largest)!r} with the id"
                f" {largest:,}, and the model has embeddings for {self.size:,} tokens",
                hint="name the model's own tokenizer in data.tokenizer, or call resize_token_embeddings",
            )

    def kept(self, length: int) -> slice:
        """The tokens that stay of a row of `length` tokens, without special tokens around it."""
        if self.limit is None or length <= self.limit:
            return slice(None)
        return slice(length - self.limit, None) if self.truncation == "left" else slice(self.limit)

    @property
    def special_tokens(self) -> frozenset[int]:
        """The ids of special tokens, such as [CLS] and [PAD]."""
        return frozenset(map(int, self.inner.all_special_ids))

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """The text of each id; empty for -100, which stands where there is none."""
        return [str(self.inner.decode([each])) if each >= 0 else "" for each in ids]


def _encodings(batch: Any) -> list[Encoding]:
    """What a tokenizer returned, row by row."""
    return [
        Encoding(
            each.ids,
            each.type_ids,
            list(map(bool, each.special_tokens_mask)),
            each.word_ids,
            each.offsets,
        )
        for each in batch.encodings
    ]


def load_tokenizer(data: DataConfig, base: Path, pretrained: Pretrained) -> Tokenizer:
    """The tokenizer that a config names, or that in the model's folder. Raises ConfigError and DataError."""
    folder = pretrained.folder
    if data.tokenizer is not None:
        folder = located(data.tokenizer, base, key="data.tokenizer", holds=_SAVED).folder
    inner = _read(folder)
    if data.truncation != "error":
        inner.truncation_side = data.truncation
    size = _vocabulary_size(pretrained.config)
    pad, notes = _pad_token(inner, pretrained.config, size)
    limit = _limit(data.max_length, inner, pretrained.config)
    inputs = tuple(name for name in _inputs(inner, pretrained))
    fingerprint = _fingerprint(inner)
    return Tokenizer(inner, inputs, pad, limit, data.truncation, fingerprint, tuple(notes), size)


def _read(folder: Path) -> Any:
    """transformers' tokenizer in a folder. Raises DataError where there is none that can be used."""
    transformers = library("transformers")
    # transformers makes an empty one of a model's config alone.
    if not any(any(folder.glob(pattern)) for pattern in _SAVED):
        raise DataError(
            f"there is no tokenizer in {folder}",
            hint="call tokenizer.save_pretrained with that folder, or name another folder in data.tokenizer",
        )
    try:
        with quiet():
            inner = transformers.AutoTokenizer.from_pretrained(
                str(folder), local_files_only=True, trust_remote_code=False
            )
    except Exception as error:  # missing libraries, damaged files, unknown classes: each has types of its own
        raise DataError(
            f"the tokenizer in {folder} can't be read: {first_line(error)}",
            hint="load it with transformers.AutoTokenizer.from_pretrained to see more",
        ) from error
    if not inner.is_fast:
        raise DataError(
            f"the tokenizer {type(inner).__name__} in {folder} does not tell the characters of its tokens",
            hint="save a fast one, with a tokenizer.json; or name columns of token ids in data.inputs",
        )
    return inner


def _vocabulary_size(config: Any) -> int | None:
    """How many token ids the model has embeddings for: of a model of two parts the larger number."""
    parts = (config, *(getattr(config, name, None) for name in ("text_config", "encoder", "decoder")))
    sizes = [getattr(part, "vocab_size", None) for part in parts]
    return max((size for size in sizes if isinstance(size, int)), default=None)


def _pad_token(inner: Any, config: Any, size: int | None) -> tuple[int, list[str]]:
    """(the id that pads a row, what is to be said of it). The model's own comes first, by which some models
    find a row's last token. An id for which the model has no embedding is not used.
    """
    own, pad, end = getattr(config, "pad_token_id", None), inner.pad_token_id, inner.eos_token_id

    def known(token: Any) -> TypeGuard[int]:
        return isinstance(token, int) and 0 <= token < (size or token + 1)

    if known(own):
        return own, []
    if known(pad):
        return pad, []
    name, value = (inner.eos_token, end) if known(end) else ("the token 0", 0)
    why = f"the model has no embedding for the pad token {inner.pad_token}"
    why = "the tokenizer has no pad token" if pad is None else why
    return value, [f"{why}: rows are padded with {name}"]


def _limit(wanted: int | None, inner: Any, config: Any) -> int | None:
    """How many tokens a row may have. Raises ConfigError where more are wanted than the model has."""
    text = config.get_text_config()
    positions = getattr(text, "max_position_embeddings", None)
    if positions is not None and text.model_type.startswith(_PADDED_POSITIONS):
        positions -= (text.pad_token_id or 0) + 1
    rotary = getattr(text, "rope_parameters", None) is not None
    if wanted is not None and positions is not None and wanted > positions and not rotary:
        raise ConfigError(
            f"data.max_length is {wanted:,}, and the model has {positions:,} positions",
        )
    if wanted is not None:
        return wanted
    own = inner.model_max_length if inner.model_max_length < UNLIMITED else None
    return min((each for each in (own, positions) if each is not None), default=None)


def _inputs(inner: Any, pretrained: Pretrained) -> list[str]:
    """The inputs that the tokenizer makes and the model takes."""
    taken = model_inputs(pretrained)
    found = [name for name in ("input_ids", *inner.model_input_names) if taken is None or name in taken]
    return list(dict.fromkeys(name for name in found if name in _MADE))


_MADE = ("input_ids", "attention_mask", "token_type_ids")


def _fingerprint(inner: Any) -> str:
    """A SHA-256 of a tokenizer's tokens, its special tokens and its chat template."""
    content = [hashlib.sha256(inner.backend_tokenizer.to_str().encode()).hexdigest()]
    content += [type(inner).__name__, json.dumps(inner.special_tokens_map, sort_keys=True, default=str)]
    content.append(json.dumps(inner.chat_template, sort_keys=True))
    return hashlib.sha256("\n".join(content).encode()).hexdigest()


Chat = list[dict[str, Any]]


def chat_tokens(tokenizer: Tokenizer, messages: Chat | None, where: str) -> tuple[list[int], list[bool]]:
    """(the tokens of a chat, whether the assistant wrote each of them).

    By the template's {% generation %} where it has that; else by the tokens that each turn of the assistant
    adds to those before it. Keys without a value, which a column of objects has for keys of other rows, are
    left out. Raises DataError for a chat without a turn of the assistant, for a message without content, and
    where the tokens of a part of the chat do not begin those of the whole.
    """
    chat = [_without_nulls(message) for message in messages or []]
    _require_contents(tokenizer, chat, where)
    if not chat or not any(_role(turn) == "assistant" for turn in chat):
        roles = ", ".join(dict.fromkeys(_role(turn) or "none" for turn in chat))
        known = f"; its roles: {roles}" if roles else ""
        raise DataError(
            f"{where}: the chat has no turn of the assistant{known}",
            hint="the loss is of what a message with the role assistant says",
        )
    if "generation" in _template_text(tokenizer):
        found = _rendered(tokenizer, chat, where, return_assistant_tokens_mask=True)
        mask = list(map(bool, found["assistant_masks"]))
        if any(mask):
            return list(found["input_ids"]), mask
    return _by_prefixes(tokenizer, chat, where)


def _by_prefixes(tokenizer: Tokenizer, chat: Chat, where: str) -> tuple[list[int], list[bool]]:
    whole = list(_rendered(tokenizer, chat, where)["input_ids"])
    mask = [False] * len(whole)
    for place, turn in enumerate(chat):
        if _role(turn) != "assistant":
            continue
        before = _rendered(tokenizer, chat[:place], where, add_generation_prompt=True) if place else None
        start = [] if before is None else list(before["input_ids"])
        end = list(_rendered(tokenizer, chat[: place + 1], where)["input_ids"])
        if end[: len(start)] != start or whole[: len(end)] != end:
            raise DataError(
                f"{where}: the chat template changes earlier turns, so that the tokens of message {place}"
                " are not known",
                hint="put {% generation %} around the assistant's words in the template, or give prompt and"
                " completion",
            )
        mask[len(start) : len(end)] = [True] * (len(end) - len(start))
    return whole, mask


def _rendered(tokenizer: Tokenizer, chat: Chat, where: str, **options: Any) -> Any:
    given = {"tokenize": True, "return_dict": True, **options}
    try:
        with quiet():
            return tokenizer.inner.apply_chat_template(chat, **given)
    except Exception as error:  # templates raise what they want
        raise DataError(
            f"{where}: the chat template raised {type(error).__name__}: {first_line(error)}",
        ) from error


def _role(turn: Any) -> str:
    return str(turn.get("role") or "") if isinstance(turn, dict) else ""


def _without_nulls(value: Any) -> Any:
    """A message without the keys that have no value, in its parts, too."""
    if isinstance(value, dict):
        return {key: _without_nulls(each) for key, each in value.items() if each is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value


def _require_contents(tokenizer: Tokenizer, chat: Chat, where: str) -> None:
    """Raises DataError for a message that says nothing, of which a template would make a text of its own, and
    for one of several parts, of which a template for plain texts would print Python's list.
    """
    for place, turn in enumerate(chat):
        content = turn.get("content") if isinstance(turn, dict) else None
        if content is None and not (isinstance(turn, dict) and set(turn) - {"role", "name"}):
            raise DataError(
                f"{where}: message {place} of the chat has no content",
                hint="put a text there, which may be empty, or remove the message or the row",
            )
        if isinstance(content, list) and str(content) in _rendered(tokenizer, [turn], where, tokenize=False):
            raise DataError(
                f"{where}: message {place} of the chat has its content in parts, and the tokenizer's"
                " template takes one text",
                hint="join the texts of its parts into one text",
            )


def _template_text(tokenizer: Tokenizer) -> str:
    template = tokenizer.inner.chat_template
    return " ".join(template.values()) if isinstance(template, dict) else str(template)
