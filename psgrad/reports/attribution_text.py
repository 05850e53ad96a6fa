"""Ids as people read them: each position's piece of the text, in the colour of what it is attributed."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any

import numpy as np

from psgrad.reports.attribution_colours import level_of, scale_of, style_of
from psgrad.reports.words import count, number, printable

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
    positions = len(ids)
    if text is not None:
        if len(text) == positions:
            return list(text), [1] * positions
        sizes = [len(letter.encode("utf-8", "surrogatepass")) for letter in text]
        if sum(sizes) == positions:
            return list(text), sizes
        words = re.findall(r"^\s*\S+\s*|\S+\s*", text)
        if len(words) == positions:
            return words, [1] * positions
    return _numbered(ids), [1] * positions


def _numbered(ids: Array) -> list[str]:
    return [f"{position}:{value} " for position, value in enumerate(ids.tolist())]


def _apart(tokens: list[str]) -> list[str]:
    """Each token with a space behind it, unless it ends in one or the next begins with one: of tokens in a row none tells where it ends."""
    following = [*tokens[1:], " "]
    return [token if token[-1:].isspace() or after[:1].isspace() else f"{token} " for token, after in zip(tokens, following, strict=True)]


def unpadded(ids: Array, padding: int | None = None) -> tuple[int, int, int | None]:
    """(start, stop, padding id) of the positions that are no padding: a run at either end of the id `padding`, where that is known, or
    else of one id, three times or more."""
    positions = len(ids)
    for step in (-1, 1):  # nearly all models pad at the end
        edge = ids[::step]
        alike = int((np.cumprod(edge == edge[0]) if positions else np.empty(0)).sum())
        if positions > alike > 0 and (edge[0] == padding or (padding is None and alike > 2)):
            return (0, positions - alike, int(edge[0])) if step < 0 else (alike, positions, int(edge[0]))
    return 0, positions, None


def spans_of(
    ids: Array, weights: Array, text: str | None, vocabulary: Mapping[int, str] | None = None, padding: int | None = None
) -> tuple[list[Span], float, str]:
    """(spans, what full colour stands for, what is left out) of positions [t]; a piece of several positions has their sum.

    Ids that are no characters, bytes or words of the text are shown by their own texts, `vocabulary`, where these are known, and without
    padding.
    """
    pieces, sizes = pieces_of(ids, text)
    notes = []
    if pieces == _numbered(ids):
        start, stop, filler = unpadded(ids, padding)
        if filler is not None:
            rest = np.delete(weights, np.s_[start:stop])
            share = f", which together have {number(float(rest.sum()))}" if np.any(rest) else ""
            notes.append(f"{count(len(rest), 'position')} of padding (id {filler}) left out{share}")
        ids, weights = ids[start:stop], weights[start:stop]
        pieces, sizes = pieces_of(ids, text)
        if pieces == _numbered(ids):
            if vocabulary:
                pieces = _apart([vocabulary.get(int(each), f"[{each}]") for each in ids.tolist()])
            else:
                notes.append("position:id, as the dataset has neither tokens(ids) nor a tokenizer that tells the words")
    ends = np.cumsum([0, *sizes])
    totals = np.array([weights[start:end].sum() for start, end in pairwise(ends)], dtype=np.float64)
    shown = int(np.searchsorted(ends, MAX_POSITIONS, side="right")) - 1
    scale = scale_of(totals)
    leveled = [(level_of(value, scale), piece) for value, piece in zip(totals[:shown].tolist(), pieces, strict=False)]
    spans = [
        Span(printable("".join(piece for _, piece in group), "\n\t"), level) for level, group in groupby(leveled, key=lambda each: each[0])
    ]
    if shown < len(pieces):
        notes.append(f"the first {ends[shown]:,} of {len(ids):,} positions")
    return spans, scale, "; ".join(notes)
