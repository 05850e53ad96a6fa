"""Loads rows from the dataset to the device: the next chunk is read while the present one is computed.

One thread reads ahead, one chunk and no further, so a reader need not be made for threads: it is never called
twice at once. Where reading beside the computation might change what is read, chunks are read in between; so
are rows that are read faster than a thread can take over.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from psgrad import random_state
from psgrad.engine.execution.memory import is_out_of_memory
from psgrad.ragged import Block, RowNumbers

# How long the end of a run waits for a read whose rows are not needed any more.
_PATIENCE_SECONDS = 5.0
# A thread that reads beside Python costs about a third of a millisecond for each chunk, so reads that take
# less than this are not worth one. The faster of two counts: the first of a run is slow.
_WORTH_A_THREAD_SECONDS = 1e-3


class Rows(Protocol):
    """Rows that are read when they are needed: a dataset, or some rows of one. They are counted from 0."""

    def __len__(self) -> int: ...

    def take(self, rows: RowNumbers, /) -> Block:
        """These rows, in this order; a range for neighbours."""


@dataclass(frozen=True)
class ChosenRows:
    """Some of a dataset's rows. numbers: which, whole numbers [n]; a range, an array or a tensor."""

    whole: Rows
    numbers: Any

    def __len__(self) -> int:
        return len(self.numbers)

    def take(self, rows: RowNumbers) -> Block:
        if isinstance(rows, range):
            return self.whole.take(self.numbers[rows.start : rows.stop])
        return self.whole.take([int(self.numbers[row]) for row in rows])


@dataclass(frozen=True)
class ChangedRows:
    """Rows that are changed after they were read. change: (block, the numbers of its rows [k]) to a block."""

    whole: Rows
    change: Callable[[Block, Tensor], Block]

    def __len__(self) -> int:
        return len(self.whole)

    def take(self, rows: RowNumbers) -> Block:
        return self.change(self.whole.take(rows), torch.as_tensor(rows))


def numbered(rows: Rows) -> ChangedRows:
    """Rows with their numbers as one more input, the last one."""
    return ChangedRows(rows, Block.with_inputs)


@dataclass(frozen=True)
class Chunk:
    """Rows that were read, still on the CPU. rows: which rows they are."""

    rows: Sequence[int]
    block: Block

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def start(self) -> int:
        return self.rows[0]

    @property
    def stop(self) -> int:
        return self.rows[-1] + 1

    def part(self, first: int, last: int) -> Chunk:
        """The rows at the places first, ..., last - 1 of this chunk; nothing is copied, nor read again."""
        if (first, last) == (0, len(self)):
            return self
        return Chunk(self.rows[first:last], self.block.at(slice(first, last)))


class Loader:
    """The chunks of one run, in order, the next one being made ready meanwhile.

    Args:
        take: from the numbers of rows to these rows.
        say: called once with the reason why rows are not read ahead, if they are not.
        alone: held while rows are read ahead; who holds it knows that nothing is read meanwhile.

    It is used in a `with` statement, whose end waits for the thread.
    """

    def __init__(
        self,
        take: Callable[[Sequence[int]], Block],
        say: Callable[[str], None] = lambda _: None,
        alone: threading.Lock | None = None,
    ) -> None:
        self._take, self.say = take, say
        self._alone = alone or threading.Lock()
        self.ahead = True  # whether rows may be read beside the computation
        self._jobs: queue.SimpleQueue[_ReadAhead | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._expected: _ReadAhead | None = None
        self._seconds: deque[float] = deque(maxlen=2)  # of the last reads here

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *error: object) -> None:
        self._stop()

    def take(self, start: int, stop: int) -> Chunk:
        """The rows start, ..., stop - 1. If rows from `start` on were read ahead, these, however many they
        are.

        Raises what the reader raises, in the order of the rows.
        """
        job = self._expected
        if job is None or job.start != start:
            return self._read_here(start, stop)
        self._expected = None
        job.done.wait()
        if job.drew:
            self._read_between_chunks(
                "random numbers were drawn while they were read, by the reader or by the model, and a"
                " reader's draws would change those of the model"
            )
        if job.error is None:
            assert job.chunk is not None
            return job.chunk
        if is_out_of_memory(job.error):
            if job.stop <= stop:
                raise job.error
            return self._read_here(start, stop)  # fewer are wanted by now
        # A reader may be bound to the thread that made it (a database does that). If the row is at fault,
        # the error is raised here.
        chunk = self._read_here(start, job.stop)
        self._read_between_chunks(f"beside the computation the reader raised {type(job.error).__name__}")
        return chunk

    def expect(self, start: int, stop: int) -> None:
        """Read these rows ahead, to be taken next, where that saves time. Has no effect while other rows are
        expected.
        """
        if not self.ahead or self._expected is not None or start >= stop:
            return
        if self._thread is None and not (self._is_worth_a_thread() and self._start()):
            return
        self._expected = _ReadAhead(start, stop)
        self._jobs.put(self._expected)

    def _is_worth_a_thread(self) -> bool:
        return len(self._seconds) == 2 and min(self._seconds) >= _WORTH_A_THREAD_SECONDS

    def _read_here(self, start: int, stop: int) -> Chunk:
        before = None if self._seconds else random_state.cpu_states()
        begun = time.perf_counter()
        block = self._take(range(start, stop))
        took = time.perf_counter() - begun
        if before is not None and before != random_state.cpu_states():
            self._read_between_chunks(
                "reading them draws random numbers, which would change those of the model"
            )
        self._seconds.append(took)
        return Chunk(range(start, stop), block)

    def _read_between_chunks(self, why: str) -> None:
        if self.ahead:
            self.ahead = False
            self.say(f"rows are read between chunks, not beside them: {why}")
            self._stop()

    def _start(self) -> bool:
        thread = threading.Thread(target=self._work, name="psgrad-reader", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # no memory for its stack, or no threads left
            self.ahead = False
            self.say(f"rows are read between chunks, not beside them: {error}")
            return False
        self._thread = thread
        return True

    def _stop(self) -> None:
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join(
                _PATIENCE_SECONDS
            )  # a read that hangs is left to itself; its thread ends with the process
            self._thread = None

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            with self._alone:
                before = random_state.cpu_states()
                try:
                    rows = range(job.start, job.stop)
                    job.chunk = Chunk(rows, self._take(rows))
                except BaseException as error:  # raised again where its rows are taken
                    job.error = error
                job.drew = before != random_state.cpu_states()
            job.done.set()
            del job  # the chunk is not this thread's any more


class _ReadAhead:
    """Rows to read ahead, and what came of it."""

    def __init__(self, start: int, stop: int) -> None:
        self.start, self.stop = start, stop
        self.chunk: Chunk | None = None
        self.error: BaseException | None = None
        self.drew = False  # whether a generator of random numbers has moved on meanwhile
        self.done = threading.Event()


def to_device(block: Block, device: torch.device, dtype: torch.dtype) -> Block:
    """Rows on a device, floating-point numbers in `dtype`."""

    def moved(x: torch.Tensor) -> torch.Tensor:
        return x.to(device, non_blocking=True).to(dtype if x.is_floating_point() else x.dtype)

    target = None if block.target is None else moved(block.target)
    return replace(block, inputs=tuple(map(moved, block.inputs)), target=target)
