"""The progress of a run: how long its phases take, how far the present one has come, and when Ctrl-C may end
it.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any, Protocol

from psgrad.wording import duration


@dataclass(frozen=True)
class Progress:
    """The progress of one phase of a run: `done` of `total` units (total 0: not known).

    `message` is a line to show; with a total of 0 there is only the message, and the present phase goes on.
    `unit` is what is counted, `detail` a number that is shown beside the count, or, with a total of
    0, in its place.
    """

    done: int
    total: int
    phase: str
    message: str | None = None
    unit: str = "sample"
    detail: str = ""


ShowProgress = Callable[[Progress], None]
"""Shows how far a run has come."""

LOADING = Progress(0, 0, "load")
"""The first progress of a run: a bar without an end, while the model and the first rows are loaded."""
_SECONDS_BETWEEN = 0.1  # two messages of progress
_SECONDS_OF_SILENCE = 2.0  # of a phase that has no count of its own


class RowsAhead(Protocol):
    """A dataset whose rows can be read before they are used."""

    def read_ahead(self, rows: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Reads these rows and keeps them; gives (how many are read, of how many)."""


def read_ahead(samples: RowsAhead, count: int, say: ShowProgress) -> None:
    """Read the first `count` rows of a dataset that code makes, with progress; they are kept for all passes.

    What a run may go on with later is compared with all rows, so they are read before the first of them is
    computed.
    """
    last = 0.0
    for done, of in samples.read_ahead(range(count)):
        if done in (1, of) or time.monotonic() - last > _SECONDS_BETWEEN:
            last = time.monotonic()
            say(Progress(done, of, "rows", unit="row"))


class Clock:
    """Seconds spent in each phase. phase, began: the present one, and since when. steps: of it how many are
    done, and how many there will be, where it has said so.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.phase, self.began = "", time.perf_counter()
        self.steps: tuple[int, int] | None = None

    def count(self, done: int, of: int) -> None:
        """Of the present phase so many steps are done, of so many."""
        self.steps = done, of

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        self.phase, self.began, self.steps = phase, start, None
        try:
            yield
        finally:
            self.seconds[phase] = round(time.perf_counter() - start, 3)


class PassProgress:
    """How far the present phase has come, where it lasts: its steps, where it counts them; its passes over
    rows, counted, the row of the present one, and rows per second. Of several processes it is what this one
    has done, times their number. Called as `Examples.watch` is.
    """

    def __init__(self, clock: Clock, say: ShowProgress, processes: int) -> None:
        self._clock, self._say, self._processes = clock, say, processes
        self._phase_began = self._said = 0.0
        self._done: dict[int, int] = {}

    def __call__(self, rows: int, of: int) -> None:
        if self._clock.began != self._phase_began:
            self._phase_began, self._done = self._clock.began, {}
        done = self._done[of] = self._done.get(of, 0) + rows * self._processes
        now = time.perf_counter()
        if now - self._phase_began < _SECONDS_OF_SILENCE or now - self._said < _SECONDS_BETWEEN:
            return
        self._said = now
        passes = (done - 1 if rows else done) // of  # finished before this one
        row = done - passes * of
        rate = sum(self._done.values()) / (now - self._phase_began)
        detail = f"pass {passes + 1:,}, row {row:,} of {of:,}, {rate:,.0f} rows/s"
        if rate > 0 and row < of:
            detail += f", {duration((of - row) / rate, whole=True)} left in this pass"
        steps, of_steps = self._clock.steps or (0, 0)
        self._say(Progress(steps, of_steps, self._clock.phase, unit="step", detail=detail))


@contextmanager
def without_interrupts() -> Iterator[Callable[[], None]]:
    """SIGINT and SIGTERM wait until the block is done, or calls the function that it gets, and are then
    handled as they would have been. Of each the second waits no longer.

    Outside of the main thread, which alone receives signals, nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return
    waiting: list[tuple[int, FrameType | None]] = []
    before: dict[int, Any] = {}

    def wait(signum: int, frame: FrameType | None) -> None:
        waiting.append((signum, frame))
        signal.signal(signum, before[signum])

    def handle() -> None:
        while waiting:
            arrived, frame = waiting.pop(0)
            before[arrived](arrived, frame)
            signal.signal(arrived, wait)

    for signum in (int(signal.SIGINT), int(signal.SIGTERM)):
        before[signum] = signal.getsignal(signum)
        if callable(before[signum]):
            signal.signal(signum, wait)
    try:
        yield handle
    finally:
        for signum, handler in before.items():
            if callable(handler):
                signal.signal(signum, handler)
    for arrived, frame in waiting:
        before[arrived](arrived, frame)
