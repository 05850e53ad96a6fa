"""Which parameters of a model are trained: those that patterns of names choose, and no others."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from torch import nn

from psgrad.config import did_you_mean
from psgrad.errors import ConfigError, ModelError
from psgrad.wording import first_of

_SHOWN = 8


def choose_trainable(model: nn.Module, patterns: Sequence[str], key: str) -> list[str]:
    """Has the parameters that match one of the patterns require a gradient, and no others; the names of the
    chosen ones.

    Patterns are shell globs over whole names, such as `head.*` or `*lora*`; case counts. A parameter with
    several names (tied weights) is chosen by any of them, and frozen only if none matches. What the factory
    had frozen is trained where a pattern names it.

    `key` is the config's name for the patterns. Raises ConfigError for a pattern that no parameter matches,
    and where there is none; ModelError where a chosen one can't have a gradient.
    """
    named = list(model.named_parameters(remove_duplicate=False))
    names = [name for name, _ in named]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise _no_match(pattern, names, key)
    matching = {name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)}
    chosen = {name: parameter for name, parameter in named if name in matching}
    if not chosen:
        raise ConfigError(
            f"{key} chooses no parameter",
            expected="at least one pattern, such as head.*",
            next_step="leave it out to train all that the model's factory left trainable",
        )
    for name, parameter in chosen.items():
        if not parameter.is_floating_point():
            raise ModelError(
                f"{key} chooses {name}, which is of type {parameter.dtype} and can't have a gradient",
                next_step=(
                    "choose parameters of floating-point numbers, such as adapters beside quantised weights"
                ),
            )
    identities = {id(parameter) for parameter in chosen.values()}
    for _, parameter in named:
        parameter.requires_grad_(id(parameter) in identities)
    return list(chosen)


def _no_match(pattern: str, names: list[str], key: str) -> ConfigError:
    """Near to a pattern are names, and whole modules written as it is written."""
    modules = dict.fromkeys(
        ".".join(name.split(".")[:depth]) + ".*" for name in names for depth in range(1, name.count(".") + 1)
    )
    return ConfigError(
        f"{key}: no parameter matches {pattern!r}{did_you_mean(pattern, [*names, *modules])}",
        expected=f"patterns of the model's parameters: {first_of(names, _SHOWN)}",
        next_step="a pattern is matched with the whole name: head.* is all inside head",
    )
