"""Work that the ranks of a run divide without meeting: in pieces, of which a rank takes the next one that no
other has taken. A rank that comes late finds all pieces made; one that never comes holds up nobody.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from psgrad.engine.execution.rank_waits import Heartbeats

PIECES_OF_A_RANK = 8
"""Pieces that work is divided into for each rank, so that a slow one does not hold up the others."""

_AT_ONCE = 64  # pieces that are fetched by one request


class RankPieces:
    """Pieces in the key-value store of the ranks; see `psgrad.run.host_files.in_pieces`."""

    def __init__(self, heartbeats: Heartbeats) -> None:
        self._heartbeats = heartbeats
        self.wanted = PIECES_OF_A_RANK * heartbeats.size

    def __call__(self, name: str, count: int, make: Callable[[int], bytes]) -> Iterator[bytes]:
        """The pieces 0, ..., count - 1 in order, fetched as they are asked for, once all are made.

        name: no other pieces have it. make: a piece, by its number.

        Raises DistributedError where a rank that makes a piece has failed or died.
        """
        store, key = self._heartbeats.store, f"pieces.{name}"
        while (place := store.add(f"{key}.next", 1) - 1) < count:
            store.set(f"{key}.{place}", make(place))
            store.add(f"{key}.made", 1)
        self._heartbeats.wait_for(lambda: store.add(f"{key}.made", 0) >= count, "pieces of other ranks")
        return (
            piece
            for start in range(0, count, _AT_ONCE)
            for piece in store.multi_get(
                [f"{key}.{place}" for place in range(start, min(count, start + _AT_ONCE))]
            )
        )
