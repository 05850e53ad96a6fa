"""Rows in pieces that fit in memory: the one place where rows on which memory ran out are computed again,
fewer at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from typing import TypeVar

from psgrad.engine.execution.memory import is_out_of_memory

Piece = TypeVar("Piece", bound=Sized)
Found = TypeVar("Found")


def in_pieces(
    pieces: Iterable[Piece],
    compute: Callable[[Piece], Found],
    smaller: Callable[[Piece], Sequence[Piece]],
    *,
    ready: Callable[[Piece], Sequence[Piece]] = lambda piece: [piece],
    final: Callable[[Piece], bool] = lambda piece: len(piece) < 2,
) -> Iterator[tuple[Piece, Found]]:
    """(piece, what `compute` finds of it) of all rows, in order. Where memory runs out, smaller pieces come
    in a piece's place; those that are done stay done.

    Args:
        pieces: asked for the next one when all rows before it are done.
        smaller: from a piece that failed to those in its place. The attempt's memory is free when it is
            called.
        ready: from a piece to itself, read and ready to be computed; or to smaller ones, where it has more
            rows than are computed at once by now.
        final: whether the error is raised for a piece, and not tried again.
    """
    for whole in pieces:
        waiting = [whole]
        while waiting:
            piece = waiting.pop()
            try:
                parts = ready(piece)
                if len(parts) == 1:
                    piece = parts[0]
                    found = compute(piece)
            except Exception as error:
                if not is_out_of_memory(error) or final(piece):
                    raise
                parts = []
            # Outside the handler: the traceback, and with it every tensor of the attempt, is gone.
            if len(parts) == 1:
                yield piece, found
                del found  # it may be as large as the model: not beside the next one
            else:
                waiting += reversed(parts or smaller(piece))
