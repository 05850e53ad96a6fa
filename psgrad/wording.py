"""Shortens long values and names so that they can still be told apart, and formats numbers and units.

Results in a line: their tables and arrays by their sizes. Values as every reader of JSON has them.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

# The losses of psgrad's own that are logarithms of probabilities.
LOSSES_IN_NATS = ("cross_entropy", "token_cross_entropy", "nll", "bce_with_logits")
_OVER_TOKENS = {"mean": "nats per token", "sum": "nats (sum over tokens)"}
PREFIX_FROM = 12  # a shorter common beginning stays where it is


def unit_of_loss(name: object, reduction: object = "mean") -> str | None:
    """The unit of one of psgrad's own losses that are logarithms of probabilities; None for any other one.

    reduction: of token_cross_entropy.
    """
    if name not in LOSSES_IN_NATS:
        return None
    return _OVER_TOKENS.get(str(reduction), "nats") if name == "token_cross_entropy" else "nats"


def nearest(word: str, known: Sequence[str]) -> str | None:
    """The one of `known` that `word` was most likely meant to be; None where nothing comes close."""
    close = difflib.get_close_matches(word, known, n=1)
    return close[0] if close else None


def did_you_mean(word: str, known: Sequence[str], before: str = "; ", after: str = "") -> str:
    """`; did you mean X?` where one of the known words is close, else nothing."""
    close = nearest(word, known)
    return f"{before}did you mean {close}?{after}" if close else ""


def short_repr(value: object, limit: int = 80) -> str:
    """A value as Python writes it; a long one is cut in its middle, so that quotes and brackets are closed
    and both ends are seen.
    """
    return shorten_middle(repr(value), limit)


def shorten_middle(text: str, limit: int, sixths: int = 4) -> str:
    """The text, cut in its middle: of names that begin alike the end tells which one it is. sixths: how much
    of what stays is the end.
    """
    if len(text) <= limit:
        return text
    end = (limit - 1) * sixths // 6
    return f"{text[: limit - 1 - end]}…{text[len(text) - end :]}"


def common_prefix(names: Sequence[str]) -> str:
    """What all names begin with, up to a dot, where that is long and there are at least two names."""
    if len(names) < 2:
        return ""
    first, last = min(names), max(names)
    same = next((place for place, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first))
    whole = first[: first.rfind(".", 0, same) + 1]
    return whole if len(whole) >= PREFIX_FROM else ""


def parameter_names(names: Sequence[str], limit: int, prefix: str | None = None) -> list[str]:
    """Each name without the prefix that all have (see `common_prefix`), on one line and at most `limit`
    letters; no two are alike, see `shorten_apart`.
    """
    start = len(common_prefix(names) if prefix is None else prefix)
    return shorten_apart([printable(name[start:]) for name in names], limit)


def shorten_apart(texts: Sequence[str], limit: int) -> list[str]:
    """Each text in at most `limit` letters, cut where those that differ stay apart; where there is no such
    place, those that would be the same are numbered, so that no two read alike.
    """
    cuts = [[shorten_middle(text, limit, sixths) for text in texts] for sixths in (4, 3, 2, 1, 5)]
    for cut in cuts:
        if len(set(cut)) == len(set(texts)):
            return cut
    cut = cuts[0]
    twice = {short for short, times in Counter(cut).items() if times > 1}
    return [
        f"{shorten_middle(short, limit - 6)} #{place}" if short in twice else short
        for place, short in enumerate(cut, start=1)
    ]


def prefix_note(prefix: str) -> str:
    """What stands above names whose common beginning is left out; empty where nothing is."""
    return f"All names are below {printable(prefix.rstrip('.'))}" if prefix else ""


def listed_names(names: Sequence[str], most: int = 5, limit: int = 60) -> str:
    """The first parameters in a sentence, and how many more there are: "a.weight, b.weight and 3 more"."""
    prefix = common_prefix(names)
    shown = ", ".join(parameter_names(names, limit, prefix)[:most]) + (
        f" and {len(names) - most:,} more" if len(names) > most else ""
    )
    return f"{shown} (all below {printable(prefix.rstrip('.'))})" if prefix else shown


def first_of(names: Sequence[str], most: int) -> str:
    """The first names, and how many more there are: "a, b and 3 more"."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def first_line(error: BaseException) -> str:
    """The first line of an error's message; its type where it has none."""
    return next(iter(str(error).splitlines()), type(error).__name__)


def printable(text: str, keep: str = "") -> str:
    """The text with control characters, which may be sequences for the terminal, spelled out."""
    return "".join(
        letter if letter.isprintable() or letter in keep else repr(letter)[1:-1] for letter in text
    )


def duration(seconds: float, whole: bool = False) -> str:
    """Seconds with a unit that suits them: 12.3 ms, 4.56 s, 3 min 20 s, 2 h 5 min. whole: 0 s, 5 s."""
    if whole:
        seconds = round(seconds)
    elif seconds < 1:
        return f"{1e3 * seconds:.3g} ms"
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def correlation(value: float | None) -> str:
    """Four decimals, never rounded away from zero: 0.99996 is not shown as 1, which stands for exactly the
    same order; a dash where there is none.
    """
    if value is None or math.isnan(value):
        return "–"
    if 1 - abs(value) < 1e-12:
        return f"{value:.0f}"
    return f"{math.trunc(value * 1e4) / 1e4:.4f}"


def json_values(value: Any) -> Any:
    """The value as every reader of JSON accepts it: paths are texts, numbers and arrays of numpy are plain
    ones, and numbers that are not finite are null.
    """
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {str(key): json_values(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [json_values(each) for each in value]
    if isinstance(value, Path):
        return str(value)
    return None if isinstance(value, float) and not math.isfinite(value) else value


_VALUE = 60
_ITEMS = 4


class ShortRepr:
    """A dataclass whose repr is short, whatever it holds; to be declared with `repr=False`."""

    def __repr__(self) -> str:
        fields = dataclasses.fields(self)  # type: ignore[arg-type]
        values = ", ".join(f"{field.name}={_brief(getattr(self, field.name))}" for field in fields)
        return f"{type(self).__name__}({values})"


def _brief(value: Any) -> str:
    shape = getattr(value, "shape", None)
    if isinstance(shape, tuple) and shape:
        return f"<{type(value).__name__} {' x '.join(f'{size:,}' for size in shape)}>"
    if isinstance(value, Mapping) and value:
        names = ", ".join(str(key)[:_VALUE] for key in list(value)[:_ITEMS])
        return "{" + names + (f", and {len(value) - _ITEMS:,} more" if len(value) > _ITEMS else "") + "}"
    if isinstance(value, list | tuple) and value:
        return f"<{type(value).__name__} of {len(value):,}>"
    return short_repr(str(value) if isinstance(value, Path) else value, _VALUE)
