"""The tokenizer of a config, and texts as tokens, no longer than the model takes: chats by its chat template,
with the tokens that the assistant wrote.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from psgrad.config import DataConfig
from psgrad.errors import ConfigError, DataError
from psgrad.inputs.models.hub import library, located, quiet
from psgrad.inputs.models.loaded import Pretrained
from psgrad.inputs.sources.files import sha256_of
from psgrad.inputs.text.forward import model_inputs

Where = Callable[[int], str]
"""The number of a text in a call to where it is written, for messages."""
Cut = Literal["longest_first", "only_second"]

UNLIMITED = 1_000_000  # tokenizers without a limit of their own say 1e30
# Position embeddings of these begin after the pad token's id, which takes that many from the table.
_PADDED_POSITIONS = ("roberta", "xlm-roberta", "camembert", "longformer", "mpnet", "esm", "data2vec-text")


@dataclass(frozen=True)
class Encoding:
    """The tokens of one row.

    ids, types: of each token; types are what token_type_ids are. special: whether a tokenizer put it there.
    part: 0 or 1 for the first or the second text, None for a special token. word: of a text in words, the
    number of the token's word. span: the characters [start, end) of its text. The last three are None for a
    tokenizer that does not tell them.
    """

    ids: list[int]
    types: list[int]
    special: list[bool]
    part: list[int | None] | None = None
    word: list[int | None] | None = None
    span: list[tuple[int, int]] | None = None


@dataclass(frozen=True)
class Tokenizer:
    """A tokenizer, and how its rows are cut and padded.

    Attributes:
        inner: transformers' tokenizer.
        inputs: the model's inputs that it makes, in the model's order: input_ids first.
        pad: the token id behind the end of a row.
        limit: the largest number of tokens in a row; None for any.
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

    def encode(
        self,
        first: Sequence[Any],
        second: Sequence[str] | None = None,
        *,
        where: Where,
        words: bool = False,
        cut: Cut = "longest_first",
        target: bool = False,
    ) -> list[Encoding]:
        """The tokens of each text, or pair of texts, with the special tokens that the tokenizer adds.

        words: each of `first` is a list of words. cut: of a pair, what is cut where it is too long. target:
        the texts are what the model is to write, for tokenizers that tell the two apart. Raises DataError
        for a row that is too long where truncation is "error".
        """
        options = {"is_split_into_words": words, "return_special_tokens_mask": True, "verbose": False}
        texts = {"text_target" if target else "text": list(first)}
        if second is not None:
            texts["text_pair"] = list(second)
        found = _encodings(self.inner(**texts, **options))
        long = [] if self.limit is None else [i for i, row in enumerate(found) if len(row.ids) > self.limit]
        if not long:
            return found
        self.require_short(len(found[long[0]].ids), where(long[0]))
        few = {key: [values[i] for i in long] for key, values in texts.items()}
        shorter = self.inner(**few, **options, truncation=cut, max_length=self.limit)
        for i, row in zip(long, _encodings(shorter), strict=True):
            found[i] = row
        return found

    def require_short(self, length: int, where: str) -> None:
        """Raises DataError for a row of so many tokens where it is too long and must not be cut."""
        if self.limit is not None and length > self.limit and self.truncation == "error":
            raise DataError(
                f"{where} has {length:,} tokens",
                expected=f"at most {self.limit:,}, which is data.max_length or else what the model takes",
                next_step="set data.truncation: right (or left) to cut such rows, or raise data.max_length"
                " where the model takes more",
            )

    def kept(self, length: int) -> slice:
        """The tokens that stay of a row of so many, without special tokens around it."""
        if self.limit is None or length <= self.limit:
            return slice(None)
        return slice(length - self.limit, None) if self.truncation == "left" else slice(self.limit)

    def length_uncut(self, text: str) -> int:
        """How many tokens a text has, without special tokens, whatever the limit."""
        return len(self.inner(text, add_special_tokens=False, verbose=False)["input_ids"])

    @property
    def special_tokens(self) -> frozenset[int]:
        """The ids of special tokens, such as [CLS] and [PAD]."""
        return frozenset(map(int, self.inner.all_special_ids))

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """The text of each id; empty for -100, which stands where there is none."""
        return [str(self.inner.decode([each])) if each >= 0 else "" for each in ids]


def _encodings(batch: Any) -> list[Encoding]:
    """What a tokenizer returned, row by row."""
    rows = range(len(batch["input_ids"]))
    fast = batch.encodings
    if fast is None:
        return [
            Encoding(
                batch["input_ids"][i],
                batch["token_type_ids"][i] if "token_type_ids" in batch else [0] * len(batch["input_ids"][i]),
                list(map(bool, batch["special_tokens_mask"][i])),
            )
            for i in rows
        ]
    return [
        Encoding(
            each.ids,
            each.type_ids,
            list(map(bool, each.special_tokens_mask)),
            each.sequence_ids,
            each.word_ids,
            each.offsets,
        )
        for each in fast
    ]


def load_tokenizer(data: DataConfig, base: Path, pretrained: Pretrained) -> Tokenizer:
    """The tokenizer that a config names, or the one in the model's folder. Raises ConfigError and
    DataError.
    """
    notes: list[str] = []
    folder = pretrained.folder
    if data.tokenizer is not None:
        place = located(
            data.tokenizer,
            base,
            key="data.tokenizer",
            holds=("tokenizer*", "vocab*", "*.model"),
            allow_download=pretrained.allow_download,
        )
        folder = place.folder
        notes += [place.downloaded] if place.downloaded else []
    inner = _read(folder)
    if data.truncation != "error":
        inner.truncation_side = data.truncation
    pad, said = _pad_token(inner, pretrained.config)
    limit = _limit(data.max_length, inner, pretrained.config)
    inputs = tuple(name for name in _inputs(inner, pretrained))
    return Tokenizer(inner, inputs, pad, limit, data.truncation, _fingerprint(inner, folder), (*notes, *said))


def _read(folder: Path) -> Any:
    """transformers' tokenizer in a folder. Raises DataError where there is none: transformers makes an empty
    one of a model's config alone.
    """
    transformers = library("transformers")
    missing = DataError(
        f"there is no tokenizer in {folder}",
        expected="tokenizer.json, or the vocabulary of a tokenizer, as its save_pretrained writes it",
        cause="the model was saved without its tokenizer",
        next_step="save it with tokenizer.save_pretrained into that folder, or name another folder in"
        " data.tokenizer",
    )
    try:
        with quiet():
            inner = transformers.AutoTokenizer.from_pretrained(
                str(folder), local_files_only=True, trust_remote_code=False
            )
    except Exception as error:  # missing libraries, damaged files, unknown classes: each has types of its own
        if not any((folder / name).exists() for name in ("tokenizer.json", *_SAVED)):
            raise missing from error
        raise DataError(
            f"the tokenizer in {folder} can't be read: {next(iter(str(error).splitlines()), '')}",
            cause="a damaged file, code of its own that psgrad does not run, or a library that is missing",
            next_step="load it with transformers.AutoTokenizer.from_pretrained to see more",
        ) from error
    # Of bytes or characters there is no vocabulary to be saved.
    files = (
        "tokenizer.json",
        *inner.vocab_files_names.values(),
        *(() if inner.vocab_files_names else _SAVED),
    )
    if not any((folder / name).exists() for name in files):
        raise missing
    return inner


_SAVED = ("tokenizer_config.json",)


def _pad_token(inner: Any, config: Any) -> tuple[int, list[str]]:
    """(the id that pads a row, what is to be said of it). The model's own comes first, by which some models
    find a row's last token.
    """
    own, size = getattr(config, "pad_token_id", None), getattr(config, "vocab_size", None)
    if isinstance(own, int) and 0 <= own < (size or own + 1):
        return own, []
    if inner.pad_token_id is not None:
        return int(inner.pad_token_id), []
    name, value = ("the token 0", 0) if inner.eos_token_id is None else (inner.eos_token, inner.eos_token_id)
    return int(value), [f"the tokenizer has no pad token: rows are padded with {name}"]


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
            expected=f"at most {positions:,}",
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


def _fingerprint(inner: Any, folder: Path) -> str:
    """A SHA-256 of a tokenizer's tokens, its special tokens and its chat template."""
    if inner.is_fast:
        content = [hashlib.sha256(inner.backend_tokenizer.to_str().encode()).hexdigest()]
    else:
        files = [folder / name for name in sorted(inner.vocab_files_names.values())]
        content = [sha256_of(path) for path in files if path.exists()]
    content += [type(inner).__name__, json.dumps(inner.special_tokens_map, sort_keys=True, default=str)]
    content.append(json.dumps(inner.chat_template, sort_keys=True))
    return hashlib.sha256("\n".join(content).encode()).hexdigest()


Chat = list[dict[str, Any]]


def require_template(tokenizer: Tokenizer) -> None:
    """Raises DataError for a tokenizer without a chat template."""
    if not tokenizer.inner.chat_template:
        raise DataError(
            "the tokenizer has no chat template, and data.messages needs one",
            cause="a base model, which was not trained on chats",
            next_step="name the tokenizer of a chat model in data.tokenizer, or give prompt and completion",
        )


def chat_tokens(tokenizer: Tokenizer, chat: Chat | None, where: str) -> tuple[list[int], list[bool]]:
    """(the tokens of a chat, whether the assistant wrote each of them).

    By the template's {% generation %} where it has that; else by the tokens that each turn of the assistant
    adds to those before it. Raises DataError for a chat without a turn of the assistant, and where the tokens
    of a part of the chat do not begin those of the whole.
    """
    if not chat or not any(_role(turn) == "assistant" for turn in chat):
        roles = ", ".join(dict.fromkeys(_role(turn) for turn in chat or []))
        raise DataError(
            f"{where}: the chat has no turn of the assistant" + (f"; its roles: {roles}" if roles else ""),
            expected="at least one message with the role assistant: the loss is of what it says",
        )
    if "generation" in _template_text(tokenizer) and tokenizer.inner.is_fast:
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
                f"{where}: the chat template does not tell the tokens of message {place}",
                expected="a template that renders the first messages of a chat as in the whole chat",
                cause="it changes or leaves out earlier turns, as templates of reasoning models do",
                next_step="put {% generation %} and {% endgeneration %} around the assistant's words in the"
                " tokenizer's template, or give prompt and completion",
            )
        mask[len(start) : len(end)] = [True] * (len(end) - len(start))
    return whole, mask


def _rendered(tokenizer: Tokenizer, chat: Chat, where: str, **options: Any) -> Any:
    try:
        with quiet():
            return tokenizer.inner.apply_chat_template(chat, tokenize=True, return_dict=True, **options)
    except Exception as error:  # templates raise what they want
        raise DataError(
            f"{where}: the chat template raised {type(error).__name__}:"
            f" {next(iter(str(error).splitlines()), '')}",
            expected="messages of the roles and in the order that the template takes",
        ) from error


def _role(turn: Any) -> str:
    return str(turn.get("role")) if isinstance(turn, dict) else ""


def _template_text(tokenizer: Tokenizer) -> str:
    template = tokenizer.inner.chat_template
    return " ".join(template.values()) if isinstance(template, dict) else str(template)
