"""Ids as people read them: each position's piece of the text, in the colour of what it is attributed."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any

import numpy as np

from psgrad.reports.attribution_colours import level_of, scale_of, style_of
from psgrad.reports.words import printable

Array = np.ndarray[Any, Any]

MAX_POSITIONS = 160


@dataclass(frozen=True)
class Span:
    """Neighbouring pieces of one shade. level: -6 to 6, 0 for nothing. style: CSS, empty for nothing."""

    text: str
    level: int

    @property
    def style(self) -> str:
        return style_of(self.level)


@dataclass(frozen=True)
class Passage:
    """One sample's ids under one measure. title: of the measure. scale: what full colour is. note: what is left out, if anything."""

    measure: str
    title: str
    spans: list[Span]
    scale: str
    note: str


def pieces_of(ids: Array, text: str | None) -> tuple[list[str], list[int]]:
    """(pieces of text, how many positions each stands for): characters, UTF-8 bytes or words of the text, whichever there are as many of
    as positions [t]; else the ids themselves, each behind its position."""
    count = len(ids)
    if text is not None:
        if len(text) == count:
            return list(text), [1] * count
        sizes = [len(letter.encode("utf-8", "surrogatepass")) for letter in text]
        if sum(sizes) == count:
            return list(text), sizes
        words = re.findall(r"^\s*\S+\s*|\S+\s*", text)
        if len(words) == count:
            return words, [1] * count
    return [f"{position}:{value} " for position, value in enumerate(ids.tolist())], [1] * count


def spans_of(ids: Array, weights: Array, text: str | None) -> tuple[list[Span], float, str]:
    """(spans, what full colour stands for, what is left out) of positions [t]; a piece of several positions has their sum."""
    pieces, sizes = pieces_of(ids, text)
    ends = np.cumsum([0, *sizes])
    totals = np.array([weights[start:end].sum() for start, end in pairwise(ends)], dtype=np.float64)
    shown = int(np.searchsorted(ends, MAX_POSITIONS, side="right")) - 1
    scale = scale_of(totals)
    leveled = [(level_of(value, scale), piece) for value, piece in zip(totals[:shown].tolist(), pieces, strict=False)]
    spans = [
        Span(printable("".join(piece for _, piece in group), "\n\t"), level) for level, group in groupby(leveled, key=lambda each: each[0])
    ]
    return spans, scale, f"the first {ends[shown]:,} of {len(ids):,} positions" if shown < len(pieces) else ""
