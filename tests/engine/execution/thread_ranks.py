"""Ranks as threads of this process: they share objects in place of a network, and one computes at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from psgrad.engine.execution.ranks import Arrays, Processes, joined
from psgrad.errors import DistributedError, PsgradError

Result = TypeVar("Result")


class _Shared:
    def __init__(self, size: int) -> None:
        self.size, self.slots = size, [None] * size
        self.barrier, self.turn = threading.Barrier(size, timeout=20), threading.Lock()


class ThreadRank(Processes):
    """See `Processes`."""

    backend = "threads"

    def __init__(self, rank: int, shared: _Shared) -> None:
        self.rank, self.size, self.leads, self._shared = rank, shared.size, rank == 0, shared
        self.steps: list[str] = []
        self._computing = False

    def part_of(self, rank: int) -> str:
        return f"rank-{rank}"

    def my_rows(self, name: str, chunks: Sequence[range]) -> list[range]:
        return joined(chunks[self.rank :: self.size])

    def meet(self, what: str) -> None:
        self._exchanged(what, None)

    def agreed(self, what: str, numbers: Callable[[], list[int]]) -> list[int]:
        found: list[int] = self._exchanged(what, numbers() if self.leads else None)[0]
        return found

    def gathered(self, what: str, own: Arrays) -> list[Arrays]:
        return [dict(each) for each in self._exchanged(what, own)]

    def texts(self, what: str, text: str) -> list[str]:
        return self._exchanged(what, text)

    def broadcast(self, what: str, arrays: Arrays) -> Arrays:
        found: Arrays = self._exchanged(what, arrays)[0]
        return found

    def reduce(self, what: str, state: Callable[[], Arrays], merge: Callable[[Arrays], None]) -> Arrays:
        others = self._exchanged(what, {key: value.clone() for key, value in state().items()})[1:]
        if self.leads:
            for other in others:
                merge(other)
        whole: Arrays = self._exchanged(what, {key: value.clone() for key, value in state().items()})[0]
        return {key: value.clone() for key, value in whole.items()}

    def together(self, what: str, compute: Callable[[], Result]) -> Result:
        self._require_between_passes(what)
        raised, result, self._computing = None, None, True
        try:
            result = compute()
        except PsgradError as error:
            raised = error
        finally:
            self._computing = False
        for error in self._exchanged(what, raised):
            if error is not None:
                raise error
        return result  # type: ignore[return-value]

    def _require_between_passes(self, what: str) -> None:
        if self._computing:
            raise DistributedError(f"{what} while it computes its share of a pass")

    def _exchanged(self, what: str, own: Any) -> list[Any]:
        """What all ranks give, in their order. Raises DistributedError where they are at different places."""
        self._require_between_passes(what)
        self.steps.append(what)
        shared = self._shared
        shared.slots[self.rank] = (what, own)
        shared.turn.release()
        try:
            shared.barrier.wait()
            found = list(shared.slots)
            shared.barrier.wait()
        finally:
            shared.turn.acquire()
        if len(places := {each[0] for each in found}) > 1:
            raise DistributedError(f"ranks are at different places: {sorted(places)}")
        return [each[1] for each in found]


def by_ranks(size: int, work: Callable[[ThreadRank], Result]) -> list[Result]:
    """The result of `work` on each of so many ranks. What one of them raises is raised here."""
    shared = _Shared(size)
    results: list[Any] = [None] * size
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        with shared.turn:
            try:
                results[rank] = work(ThreadRank(rank, shared))
            except BaseException as error:
                errors.append(error)
                shared.barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in sorted(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
        raise error
    return results
