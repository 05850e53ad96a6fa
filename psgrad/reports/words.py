"""How values are written for people, on the terminal and in HTML alike."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral, Real
from typing import Any

from psgrad.wording import duration as duration
from psgrad.wording import listed_names
from psgrad.wording import printable as printable
from psgrad.wording import shorten_middle as shorten_middle

MISSING = "–"
LABEL_LIMIT = 40
ID_LIMIT = 80
VALUE_LIMIT = 120
FACT_LIMIT = 300
_BYTES = ("B", "kB", "MB", "GB", "TB")


def number(value: Any) -> str:
    """Four significant digits: 0.01234, 12.34, 1.2e-07; more where four would round it up to 1; a dash where
    there is none.
    """
    if value is None or _is_missing(value):
        return MISSING
    text = f"{value:.4g}"
    if text in ("1", "-1") and 1 - abs(value) > 1e-12:
        text = next(more for more in (f"{value:.{digits}g}" for digits in range(5, 14)) if more != text)
    return text


def percent(share: float, digits: int = 1) -> str:
    """61.2%, with more digits where these would call nearly all 100%, or a few 0%: 99.97%, 0.04%."""
    for enough in range(digits, 9):
        text = f"{share:.{enough}%}"
        if not 0 < share < 1 or 0 < float(text[:-1]) < 100:
            return text
    return f"{share:.{digits}%}"


def count(n: int, noun: str = "sample") -> str:
    """1 sample, 1,797 samples, 3 queries."""
    return f"{n:,} {plural(n, noun)}"


def plural(n: int, noun: str) -> str:
    """The noun for a number of things."""
    return noun if n == 1 else f"{noun[:-1]}ies" if noun.endswith("y") else f"{noun}s"


def percentile(value: float) -> str:
    """Two digits, and four where two would call it 100 too early."""
    return f"{value:.2f}" if value == 100 or value < 99.995 else f"{value:.4f}"


def label(value: Any, class_names: Sequence[str] | None = None) -> str:
    """A target or prediction: the class's name where there is one, else the value."""
    if value is None or _is_missing(value):
        return MISSING
    real = isinstance(value, Real) and not isinstance(value, bool)
    if real and float(value).is_integer():
        index = int(float(value))
        if class_names and 0 <= index < len(class_names):
            return brief(class_names[index], LABEL_LIMIT)
        return str(index) if isinstance(value, Integral) else number(value)
    return number(value) if real else brief(str(value), LABEL_LIMIT)


def values_line(values: Sequence[tuple[str, Any]]) -> str | None:
    """A table's row on one line: "age 39, hours 40"; None where there are no values."""
    return ", ".join(f"{brief(name, ID_LIMIT)} {value_words(value)}" for name, value in values) or None


def value_words(value: Any) -> str:
    """A value of the data as it stands there, with the seven digits that float32 keeps: a postcode is 94105,
    and no 9.41e+04 or 94,105.
    """
    if value is None or _is_missing(value):
        return MISSING
    if isinstance(value, str):
        return brief(value, VALUE_LIMIT)
    whole = float(value).is_integer() and abs(value) < 1e15
    return f"{value:.0f}" if whole else f"{value:.7g}"


def group_words(group: Any, by: Any, class_names: Sequence[str] | None) -> str:
    """A group of samples: the class's name where samples were grouped by class and it is known, else what the
    group is called.
    """
    known = by in ("class", "target", "prediction") and isinstance(group, str) and group.isdecimal()
    return label(int(group) if known else group, class_names if known else None)


def cell(value: Any) -> str:
    """Any value, as of a measure's table, in words."""
    if getattr(value, "shape", None) == ():
        value = value.item()
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float) or value is None or _is_missing(value):
        return number(value)
    if isinstance(value, list | tuple) or hasattr(value, "tolist"):
        return listed(value, cell)
    return brief(str(value), VALUE_LIMIT) or MISSING


def listed(values: Any, words: Callable[[Any], str], most: int = 12) -> str:
    """The first of several values, and how many more there are."""
    items = list(values)
    shown = ", ".join(words(each) for each in items[:most])
    return shown if len(items) <= most else f"{shown} and {len(items) - most:,} more"


def words_of(name: Any) -> str:
    """A column's or key's name as words."""
    return brief(str(name).replace("_", " "), 60)


def key_of(name: Any) -> str:
    """A column's name as the filter of a table takes it: without spaces."""
    return "_".join(brief(str(name), 60).split())


def flat_words(facts: Mapping[str, Any], limit: int, before: str = "") -> list[tuple[str, str]]:
    """Each fact that is no mapping as (name, value in words); a nested one's name has all names above it.
    Facts without a value (None) are left out, and matrices, which are in measures.json.
    """
    found: list[tuple[str, str]] = []
    for key, value in facts.items():
        name = f"{before} {words_of(key)}".strip()
        if isinstance(value, Mapping):
            found += flat_words(value, limit, name)
        elif value is not None and not (isinstance(value, list) and value and isinstance(value[0], list)):
            found.append((brief(name[:1].upper() + name[1:], 80), brief(_plain(value), limit)))
    return found


def _plain(value: Any) -> str:
    if isinstance(value, str):
        return value
    kinds = {type(each) for each in value} if isinstance(value, list | tuple) else set()
    if kinds == {str}:
        return listed_names(value, most=12, limit=80)
    if kinds == {dict}:
        return listed(value, lambda each: " ".join(f"{words_of(key)} {cell(each[key])}" for key in each), 6)
    return cell(value)


def amount(size: float) -> str:
    """Bytes with a unit: 512 B, 18.2 MB."""
    for unit in _BYTES:
        if size < 1000 or unit == _BYTES[-1]:
            break
        size /= 1000
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:.3g} {unit}"


def identifier(value: Any) -> str:
    """A sample's id, on one line and of bounded length: a long one is cut in its middle."""
    text = str(value)
    return shorten_middle(
        printable(text if len(text) <= 2 * ID_LIMIT else f"{text[:ID_LIMIT]}…{text[-ID_LIMIT:]}"), ID_LIMIT
    )


def shorten(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"


def brief(text: str, limit: int, keep: str = "") -> str:
    """Printable and of bounded length, at a bounded price: a text may be a whole book."""
    return shorten(printable(text[: limit + 1], keep), limit)


def _is_missing(value: Any) -> bool:
    # pandas' NA is neither a float nor equal to itself.
    return type(value).__name__ in ("NAType", "NaTType") or (isinstance(value, Real) and math.isnan(value))
