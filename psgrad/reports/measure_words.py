"""Nested facts as pairs of words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from psgrad.reports.tables import cell, listed, words_of
from psgrad.reports.words import brief, number
from psgrad.wording import listed_names


def flat_words(facts: Mapping[str, Any], limit: int, before: str = "") -> list[tuple[str, str]]:
    """Each fact that is no mapping as (name, value in words); a nested one's name has all names on its way. Matrices are left out:
    as figures they can be read."""
    found: list[tuple[str, str]] = []
    for key, value in facts.items():
        if key.endswith("_interval") and key.removesuffix("_interval") in facts:
            continue
        name = f"{before} {words_of(key)}".strip()
        if isinstance(value, Mapping):
            found += flat_words(value, limit, name)
        elif not _is_matrix(value):
            found.append((brief(name[:1].upper() + name[1:], 80), brief(_plain(value) + _interval(facts, key), limit)))
    return found


def _interval(facts: Mapping[str, Any], key: str) -> str:
    """What is told of a number's uncertainty beside it: its interval, at the level that is told once for all."""
    bounds = facts.get(f"{key}_interval")
    if not isinstance(bounds, list | tuple) or len(bounds) != 2:
        return ""
    low, high = bounds
    level = facts.get("level")
    ends = (
        f"{number(low)} to {number(high)}" if None not in bounds else f"from {number(low)} on" if high is None else f"up to {number(high)}"
    )
    said = f"{100 * level:.3g} % interval" if isinstance(level, float) else "interval"
    return f" ({said}: {ends})"


def _is_matrix(value: Any) -> bool:
    return isinstance(value, list | tuple) and len(value) > 0 and all(isinstance(row, list | tuple) for row in value)


def _plain(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, list | tuple) and value and all(isinstance(each, str) for each in value):
        return listed_names(value, most=12, limit=80)
    if isinstance(value, list | tuple) and value and isinstance(value[0], Mapping):
        return listed(value, lambda each: " ".join(f"{words_of(key)} {cell(inner)}" for key, inner in each.items()), most=6)
    return cell(value)
