"""Chats as tokens by a tokenizer's chat template, with the tokens that the assistant wrote."""

from __future__ import annotations

from typing import Any

from psgrad.errors import DataError
from psgrad.inputs.models.hub import quiet
from psgrad.inputs.text.tokenizer import Tokenizer

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
