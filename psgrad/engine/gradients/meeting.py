"""Where two terms of one parameter meet, if they stand in parts of it."""

from __future__ import annotations

from collections.abc import Sequence

from psgrad.engine.gradients.deferral.linear import narrowed
from psgrad.engine.gradients.layout import Run
from psgrad.engine.gradients.placed import Placed


def meet(a: Placed, b: Placed) -> list[tuple[Placed, Placed]] | None:
    """Both terms within the window that they share, of its shape; an empty list where they share none; None where it would take
    writing a term out to see.
    """
    if a.layout.window is None and b.layout.window is None:
        return [(a, b)]
    runs = [_runs(placed) for placed in (a, b)]
    if any(_miss(one, one_length, other, length) for (one, one_length), (other, length) in zip(*runs, strict=True)):
        return []
    found = [_within(placed, other) for placed, other in zip((a, b), reversed(runs), strict=True)]
    if None in found:
        return None
    return [(one, other) for one in found[0] or [] for other in found[1] or []]


def _runs(placed: Placed) -> list[tuple[Run, int]]:
    layout = placed.layout
    window = layout.window if layout.window is not None else [Run(0, 1, size) for size in layout.inner]
    return list(zip(window, layout.inner, strict=True))


def _miss(one: Run, one_length: int, other: Run, length: int) -> bool:
    """Whether two runs surely have no place in common."""
    if one.end(one_length) <= other.start or other.end(length) <= one.start:
        return True
    return one.step == other.step and (one.start - other.start) % one.step != 0


def _within(placed: Placed, runs: Sequence[tuple[Run, int]]) -> list[Placed] | None:
    """The part of a term that lies within a window, with no window of its own."""
    for dim, (run, length) in enumerate(runs):
        own, count = _runs(placed)[dim]
        if own == run and count == length:
            continue
        if own.step == run.step != 1:  # of steps that go together those that both have
            first, last = max(own.start, run.start), min(own.end(count), run.end(length))
            places = (first, own.step, len(range(first, last, own.step)))
        else:
            places = (run.start, run.step, length)
        found = narrowed(placed, dim, *places)
        if not found:
            return found
        (placed,) = found
    return [Placed(placed.term, placed.layout.bare)]
