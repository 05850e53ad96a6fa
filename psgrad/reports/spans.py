"""Text whose pieces have colours: orange raises, blue lowers. The two stay apart for every kind of colour
vision, and in grey they are dark.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any

import numpy as np

from psgrad.reports.words import count, number, printable

Array = np.ndarray[Any, Any]

RAISES, LOWERS = "#d9640f", "#2b66b0"
LEVELS = 6  # shades on either side of nothing
MAX_POSITIONS = 160
# How much of the full colour lies behind letters, at the end of the scale.
_BEHIND_TEXT = {1: 0.7, -1: 0.6}


@dataclass(frozen=True)
class Span:
    """Neighbouring pieces of one shade. level: -6 to 6, 0 for nothing. counts: whether they have a loss of
    their own; a prompt and padding have none. special: whether they are special tokens of a tokenizer.
    """

    text: str
    level: int
    counts: bool = True
    special: bool = False

    @property
    def classes(self) -> str:
        """Its classes of CSS."""
        quiet = "" if self.counts or self.level else "quiet"
        return " ".join(filter(None, (quiet, "special" if self.special else "")))

    @property
    def style(self) -> str:
        """CSS of its shade: a background that lets light or dark paper through, so that the page's own ink is
        read on it; empty for nothing.
        """
        red, green, blue = rgb(RAISES if self.level >= 0 else LOWERS).astype(int)
        share = _BEHIND_TEXT[1 if self.level >= 0 else -1] * abs(self.level) / LEVELS
        return f"background:rgba({red},{green},{blue},{share:.3g})" if self.level else ""


def rgb(colour: str) -> Array:
    """[3] floats, 0 to 255, of #rrggbb."""
    return np.array([int(colour[place : place + 2], 16) for place in (1, 3, 5)], dtype=np.float64)


def scale_of(values: Array) -> float:
    """What full colour stands for: the largest magnitude; 0 where there is nothing but zeros."""
    return float(np.abs(values).max(initial=0.0))


def level_of(value: float, scale: float) -> int:
    """Which of the shades, -LEVELS to LEVELS."""
    return int(np.clip(round(LEVELS * value / scale), -LEVELS, LEVELS)) if scale else 0


def pieces_of(ids: Array, text: str | None) -> tuple[list[str], list[int]]:
    """(pieces of text, how many positions each stands for): characters of the text, where there are as many
    of them, or of their UTF-8 bytes, as positions [t]; else the ids themselves, each behind its position.
    """
    positions = len(ids)
    if text is not None:
        if len(text) == positions:
            return list(text), [1] * positions
        sizes = [len(letter.encode("utf-8", "surrogatepass")) for letter in text]
        if sum(sizes) == positions:
            return list(text), sizes
    return _numbered(ids), [1] * positions


def _numbered(ids: Array) -> list[str]:
    return [f"{position}:{value} " for position, value in enumerate(ids.tolist())]


def unpadded(ids: Array, padding: int | None = None) -> tuple[int, int, int | None]:
    """(start, stop, padding id) of the positions that are no padding: a run at either end of the id
    `padding`, where that is known, or else of one id, three times or more.
    """
    positions = len(ids)
    for step in (-1, 1):  # nearly all models pad at the end
        edge = ids[::step]
        alike = int((np.cumprod(edge == edge[0]) if positions else np.empty(0)).sum())
        if positions > alike > 0 and (edge[0] == padding or (padding is None and alike > 2)):
            return (0, positions - alike, int(edge[0])) if step < 0 else (alike, positions, int(edge[0]))
    return 0, positions, None


def spans_of(
    ids: Array,
    weights: Array,
    text: str | None,
    vocabulary: Mapping[int, str] | None = None,
    padding: int | None = None,
    counted: Array | None = None,
    special: AbstractSet[int] = frozenset(),
) -> tuple[list[Span], float, str]:
    """(spans, what full colour stands for, what is left out) of positions [t]; a piece of several positions
    has their sum. counted: [t] bool, which positions have a loss of their own; None for all.
    special: the ids of special tokens.

    Ids that are no characters, bytes or words of the text are shown by their own texts, `vocabulary`, where
    these are known, and without padding.
    """
    pieces, sizes = pieces_of(ids, text)
    counted = np.ones(len(ids), bool) if counted is None else counted
    notes = []
    if pieces == _numbered(ids):
        start, stop, filler = unpadded(ids, padding)
        if filler is not None:
            rest = np.delete(weights, np.s_[start:stop])
            share = f", which together have {number(float(rest.sum()))}" if np.any(rest) else ""
            notes.append(f"{count(len(rest), 'position')} of padding (id {filler}) left out{share}")
        ids, weights, counted = ids[start:stop], weights[start:stop], counted[start:stop]
        pieces, sizes = pieces_of(ids, text)
        if pieces == _numbered(ids):
            if vocabulary:
                pieces = [vocabulary.get(each, f"[{each}]") for each in ids.tolist()]
                if not any(piece[:1].isspace() or piece[-1:].isspace() for piece in pieces):
                    pieces = [f"{piece} " for piece in pieces]  # tokens without spaces of their own
            else:
                notes.append("position:id, as the dataset has no tokenizer that tells the words")
    ends = np.cumsum([0, *sizes])
    totals = np.array([weights[start:end].sum() for start, end in pairwise(ends)], dtype=np.float64)
    shown = int(np.searchsorted(ends, MAX_POSITIONS, side="right")) - 1
    scale = scale_of(totals)
    counts = [bool(counted[start:end].any()) for start, end in pairwise(ends)]
    are_special = [int(ids[start]) in special and end - start == 1 for start, end in pairwise(ends)]
    shades = [
        (level_of(value, scale), counts[place], are_special[place])
        for place, value in enumerate(totals[:shown].tolist())
    ]
    spans = [
        Span(printable("".join(piece for _, piece in group), "\n\t"), *shade)
        for shade, group in groupby(zip(shades, pieces, strict=False), key=lambda each: each[0])
    ]
    if shown < len(pieces):
        notes.append(f"the first {ends[shown]:,} of {len(ids):,} positions")
    return spans, scale, "; ".join(notes)
