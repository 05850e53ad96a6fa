"""How values are written for people, on the terminal and in HTML alike."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any

MISSING = "–"
LABEL_LIMIT = 40
ID_LIMIT = 80
PREFIX_FROM = 12  # a shorter common beginning stays where it is


def number(value: Any) -> str:
    """Four significant digits: 0.01234, 12.34, 1.2e-07; a dash where there is none."""
    if value is None or _is_missing(value):
        return MISSING
    return f"{value:.4g}"


def count(n: int, noun: str = "sample") -> str:
    """1 sample, 1,797 samples."""
    return f"{n:,} {noun}" if n == 1 else f"{n:,} {noun}s"


def percentile(value: float) -> str:
    """Two digits, and four where two would call it 100 too early."""
    return f"{value:.2f}" if value == 100 or value < 99.995 else f"{value:.4f}"


def label(value: Any, class_names: Sequence[str] | None = None) -> str:
    """A target or prediction: the class's name where there is one, else the value."""
    if value is None or _is_missing(value):
        return MISSING
    if isinstance(value, Real) and not isinstance(value, bool) and float(value).is_integer():
        index = int(float(value))
        if class_names and 0 <= index < len(class_names):
            return brief(class_names[index], LABEL_LIMIT)
        return str(index) if isinstance(value, Integral) else number(value)
    return number(value) if isinstance(value, Real) and not isinstance(value, bool) else brief(str(value), LABEL_LIMIT)


def identifier(value: Any) -> str:
    """A sample's id, on one line and of bounded length: a long one is cut in its middle."""
    text = str(value)
    return shorten_middle(printable(text if len(text) <= 2 * ID_LIMIT else f"{text[:ID_LIMIT]}…{text[-ID_LIMIT:]}"), ID_LIMIT)


def shorten(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"


def shorten_middle(text: str, limit: int) -> str:
    """The text, cut in its middle: of names that begin alike the end tells which one it is."""
    if len(text) <= limit:
        return text
    end = (limit - 1) * 2 // 3
    return f"{text[: limit - 1 - end]}…{text[len(text) - end :]}"


def common_prefix(names: Sequence[str]) -> str:
    """What all names begin with, up to a dot, where it is long and there are at least two: to be told once, above them."""
    if len(names) < 2:
        return ""
    first, last = min(names), max(names)  # what the two outermost share, all share
    alike = next((place for place, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), min(len(first), len(last)))
    whole = first[: first[:alike].rfind(".") + 1]
    return whole if len(whole) >= PREFIX_FROM else ""


def parameter_names(names: Sequence[str], limit: int, prefix: str | None = None) -> list[str]:
    """Each name without the prefix that all have (see `common_prefix`), on one line and at most `limit` letters, cut in the middle.

    Names that would be the same after the cut are numbered, so that no two rows read alike.
    """
    start = len(common_prefix(names) if prefix is None else prefix)
    cut = [shorten_middle(printable(name[start:]), limit) for name in names]
    if len(set(cut)) == len(set(names)):
        return cut
    twice = {short for short, times in Counter(cut).items() if times > 1}
    return [f"{shorten_middle(short, limit - 6)} #{place}" if short in twice else short for place, short in enumerate(cut, start=1)]


def prefix_note(prefix: str) -> str:
    """What stands above names whose common beginning is left out; empty where nothing is."""
    return f"Every name begins with {printable(prefix)}" if prefix else ""


def listed_names(names: Sequence[str], most: int = 5, limit: int = 60) -> str:
    """The first of several parameters in a sentence, and how many more there are: "a.weight, b.weight and 3 more"."""
    prefix = common_prefix(names)
    shown = ", ".join(parameter_names(names, limit, prefix)[:most]) + (f" and {len(names) - most:,} more" if len(names) > most else "")
    return f"{shown} (all below {printable(prefix.rstrip('.'))})" if prefix else shown


def brief(text: str, limit: int, keep: str = "") -> str:
    """Printable and of bounded length, at a bounded price: a text may be a whole book."""
    return shorten(printable(text[: limit + 1], keep), limit)


def printable(text: str, keep: str = "") -> str:
    """The text with control characters spelled out: text from a dataset may carry escape sequences for the terminal."""
    return "".join(letter if letter.isprintable() or letter in keep else repr(letter)[1:-1] for letter in text)


def _is_missing(value: Any) -> bool:
    # pandas' NA is neither a float nor equal to itself.
    return type(value).__name__ in ("NAType", "NaTType") or (isinstance(value, float) and math.isnan(value))
