"""Ranks as threads of this process: they share objects in place of a network, and one computes at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch

from psgrad.engine.execution.ranks import Answer, Arrays, step_within
from psgrad.errors import DistributedError, PsgradError

Result = TypeVar("Result")


class _Shared:
    def __init__(self, size: int) -> None:
        self.size, self.slots = size, [None] * size
        self.barrier, self.turn = threading.Barrier(size, timeout=20), threading.Lock()
        self.taken = set[str]()


class ThreadRequests:
    """See `Requests`. Ranks answer by a call."""

    def __init__(self, answers: dict[int, Answer]) -> None:
        self._answers = answers

    def request(self, questions: Mapping[int, torch.Tensor], into: Mapping[int, torch.Tensor]) -> None:
        for rank, question in questions.items():
            into[rank].copy_(self._answers[rank](question))


class ThreadRank:
    """See `Processes`."""

    parts = None

    def __init__(self, rank: int, shared: _Shared) -> None:
        self.rank, self.size, self.leads, self._shared = rank, shared.size, rank == 0, shared
        self._computing = False
        self.steps: list[str] = []

    def part_of(self, rank: int) -> str:
        return f"rank-{rank}"

    def own(self, every: Sequence[range]) -> list[range]:
        return list(every)

    def ranges(self, name: str, every: Sequence[range], first: Collection[int] = ()) -> Iterator[range]:
        for place, rows in enumerate(every):
            if f"{name}.{place}" not in self._shared.taken:
                self._shared.taken.add(f"{name}.{place}")
                yield rows

    def agreed(self, name: str, numbers: Callable[[], list[int]]) -> list[int]:
        found: list[int] = self._exchanged(numbers() if self.leads else None)[0]
        return found

    def progress(self, name: str, rows: int) -> int:
        return rows

    def meet(self, name: str) -> None:
        self._exchanged(None)

    def reduce(self, name: str, state: Callable[[], Arrays], merge: Callable[[Arrays], None]) -> Arrays:
        others = self._exchanged({key: value.clone() for key, value in state().items()})[1:]
        if self.leads:
            for other in others:
                merge(other)
        whole: Arrays = self._exchanged({key: value.clone() for key, value in state().items()})[0]
        return {key: value.clone() for key, value in whole.items()}

    def requests(self, ranks: Sequence[int], answer: Answer) -> ThreadRequests:
        return ThreadRequests(dict(zip(range(self.size), self._exchanged(answer), strict=True)))

    def step(self, what: str) -> str:
        if self._computing:
            raise step_within(what)
        self.steps.append(what)
        if len(found := set(self._exchanged(what))) > 1:
            raise DistributedError(f"ranks take different steps: {sorted(found)}")
        return what

    def together(self, what: str, compute: Callable[[], Result]) -> Result:
        self.step(what)
        self._computing, raised, result = True, None, None
        try:
            result = compute()
        except PsgradError as error:
            raised = error
        finally:
            self._computing = False
        for error in self._exchanged(raised):
            if error is not None:
                raise error
        return result  # type: ignore[return-value]

    def gathered(self, what: str, own: Arrays) -> list[Arrays]:
        self.step(what)
        return [dict(each) for each in self._exchanged(own)]

    def _exchanged(self, own: Any) -> list[Any]:
        """What all ranks give, in their order."""
        shared = self._shared
        shared.slots[self.rank] = own
        shared.turn.release()
        try:
            shared.barrier.wait()
            found = list(shared.slots)
            shared.barrier.wait()
        finally:
            shared.turn.acquire()
        return found


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
