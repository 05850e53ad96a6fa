"""Progress on stderr: a bar on a terminal, few plain lines in a log."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from enum import StrEnum
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated, Protocol, Self, TextIO

import typer
from rich.console import Console
from rich.progress import BarColumn, ProgressColumn, Task, TaskID, TextColumn
from rich.progress import Progress as Bars
from rich.table import Column
from rich.text import Text

from psgrad.reports.words import count, duration

if TYPE_CHECKING:
    from psgrad.run.results import Progress


PLAIN_INTERVAL_S = 10.0


class Log(Protocol):
    """What plain lines are written to."""

    def write(self, text: str, /) -> object: ...

    def flush(self) -> None: ...


class ProgressDisplay:
    """Called with every step; a context manager that leaves the stream tidy. This one says nothing."""

    def __call__(self, progress: Progress) -> None:
        """Show a step."""

    def close(self) -> None:
        """Leave the stream tidy."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class ProgressStyle(StrEnum):
    """auto: a bar on a terminal, plain lines elsewhere and in CI. none: neither progress nor messages."""

    auto = "auto"
    bar = "bar"
    plain = "plain"
    none = "none"


ProgressOption = Annotated[
    ProgressStyle,
    typer.Option(
        "--progress",
        help=(
            "How progress is shown on stderr; auto: a bar on a terminal, at most a line every ten seconds in"
            " a log."
        ),
    ),
]


def progress_display(
    style: ProgressStyle = ProgressStyle.auto, stream: TextIO | None = None
) -> ProgressDisplay:
    """The display of that style on the stream, by default stderr; FORCE_COLOR makes no terminal of a file.
    auto in a notebook: a bar where ipywidgets is installed, which rich needs for it.
    """
    stream = stream or sys.stderr
    if style is ProgressStyle.none:
        return ProgressDisplay()
    watched = stream.isatty() and os.environ.get("TERM") != "dumb" and not os.environ.get("CI")
    watched = watched or (Console(file=stream).is_jupyter and find_spec("ipywidgets") is not None)
    bar = watched if style is ProgressStyle.auto else style is ProgressStyle.bar
    return BarDisplay(stream) if bar else PlainDisplay(stream)


class PlainDisplay(ProgressDisplay):
    """At most one line per 10 s, and one at the end. Messages appear at once."""

    def __init__(self, stream: Log, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._clock = clock
        self._phase: str | None = None
        self._phase_began = 0.0
        self._done_before = 0
        self._last_line = clock()
        self._unsaid: str | None = None

    def __call__(self, progress: Progress) -> None:
        if progress.message:
            self._write(progress.message)
            if not progress.total:
                return
        now = self._clock()
        if progress.phase != self._phase:
            self._phase, self._phase_began = progress.phase, now
            self._done_before = progress.done  # by an earlier run that this one goes on with
        if progress.total:
            elapsed = now - self._phase_began
            rate = (progress.done - self._done_before) / elapsed if elapsed > 0 else 0.0
            words = progress_words(progress.done, progress.total, rate, progress.unit, progress.detail)
            self._unsaid = f"{progress.phase}: {words}"
        elif progress.detail:
            self._unsaid = f"{progress.phase}: {progress.detail}"
        if now - self._last_line >= PLAIN_INTERVAL_S:
            self._say_progress()
            self._last_line = now

    def close(self) -> None:
        self._say_progress()

    def _say_progress(self) -> None:
        if self._unsaid is not None:
            self._write(self._unsaid)
        self._unsaid = None

    def _write(self, line: str) -> None:
        self._stream.write(line + "\n")
        self._stream.flush()


class BarDisplay(ProgressDisplay):
    """One rich bar per phase, with samples, samples/s and the time left."""

    def __init__(self, stream: TextIO) -> None:
        self._bars = Bars(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=None),
            _WordsColumn(table_column=Column(no_wrap=True)),  # the bar is cut short first
            console=Console(file=stream, highlight=False, markup=False),
            expand=True,
        )
        self._task: TaskID | None = None
        self._phase: str | None = None

    def __call__(self, progress: Progress) -> None:
        if progress.message:
            self._bars.console.print(progress.message)
            if not progress.total:
                return
        if self._task is None or progress.phase != self._phase:
            self._end_phase()
            self._task = self._bars.add_task(progress.phase, total=None, completed=progress.done)
            self._phase = progress.phase
        total = progress.total or None
        self._bars.update(
            self._task, completed=progress.done, total=total, unit=progress.unit, detail=progress.detail
        )

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def close(self) -> None:
        self._end_phase()
        self._bars.stop()

    def _end_phase(self) -> None:
        # A bar without an end would go on moving for work that is over.
        if self._task is not None and not self._bars.tasks[-1].total:
            self._bars.remove_task(self._task)
        self._task = None


class _WordsColumn(ProgressColumn):
    def render(self, task: Task) -> Text:
        if not task.total:
            return Text(task.fields.get("detail", ""))
        rate = task.finished_speed or task.speed or 0.0
        unit, detail = task.fields["unit"], task.fields["detail"]
        return Text(progress_words(int(task.completed), int(task.total), rate, unit, detail))


def progress_words(done: int, total: int, rate: float, unit: str = "sample", detail: str = "") -> str:
    """Units done, units per second, the time left, and the detail; `rate` 0 where it is not known yet."""
    words = f"{done:,}/{count(total, unit)}"
    if rate > 0:
        words += f", {rate:,.0f} {unit}s/s" if rate >= 10 else f", {rate:.2g} {unit}s/s"
        if done < total:
            words += f", {duration((total - done) / rate, whole=True)} left"
    return f"{words}, {detail}" if detail else words
