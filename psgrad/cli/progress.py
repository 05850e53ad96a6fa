"""Progress on stderr: a bar on a terminal, few plain lines in a log. Of several ranks the messages of each
are in logs/ of the run folder; those of rank 0 also on stderr.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Protocol, Self, TextIO

import typer
from rich.console import Console
from rich.progress import BarColumn, ProgressColumn, Task, TaskID, TextColumn
from rich.progress import Progress as Bars
from rich.table import Column
from rich.text import Text

from psgrad.errors import DistributedError
from psgrad.reports.words import count, duration

if TYPE_CHECKING:
    from psgrad.engine.execution.ranks import Processes
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
    """The display of that style on the stream, by default stderr; FORCE_COLOR makes no terminal of a file."""
    stream = stream or sys.stderr
    if style is ProgressStyle.none:
        return ProgressDisplay()
    watched = stream.isatty() and os.environ.get("TERM") != "dumb" and not os.environ.get("CI")
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


# One of them is in the folder of a run, or of an index, once it has begun.
_HEADS = ("manifest.json", "index.json")
_SHOWN, _READ = 5, 1 << 14  # lines of a log in an error, and bytes from its end


def display(
    style: ProgressStyle, processes: Processes | None, folder: Path, *, private: bool = False
) -> ProgressDisplay:
    """The progress of the first rank on stderr; that of each rank in logs/ of the run folder.

    private: whether what the first rank says may tell of single records; then it is not in logs/, and others
    say themselves who they are.
    """
    if processes is None:
        return progress_display(style)
    file = _LogFile(log_of(folder, processes.rank))
    log = _Logged(file)
    if not private:
        file.write(
            f"rank {processes.rank} of {processes.size} on {socket.gethostname()}, process {os.getpid()}\n"
        )
    if processes.rank:
        return log
    return progress_display(style) if private else _Both(progress_display(style), log)


def log_of(folder: Path, rank: int) -> Path:
    """What a rank logs."""
    return folder / "logs" / f"rank-{rank}.log"


def with_last_lines(error: DistributedError, folder: Path) -> DistributedError:
    """The error with the last lines of the log of the rank that it names."""
    lines = [] if error.rank is None else _last_lines(log_of(folder, error.rank))
    if not lines:
        return error
    said = "".join(f"\n    {line}" for line in lines)
    return DistributedError(
        f"{error.arrived}\n  its last lines in {log_of(folder, error.rank or 0)}:{said}",
        expected=error.expected,
        cause=error.cause,
        next_step=error.next_step,
        rank=error.rank,
    )


def _last_lines(log: Path) -> list[str]:
    with suppress(OSError), log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - _READ))
        return file.read().decode(errors="replace").splitlines()[-_SHOWN:]
    return []


class _Both(ProgressDisplay):
    """Two displays of the same progress."""

    def __init__(self, *displays: ProgressDisplay) -> None:
        self._displays, self._open = displays, ExitStack()

    def __call__(self, progress: Progress) -> None:
        for each in self._displays:
            each(progress)

    def __enter__(self) -> Self:
        for each in self._displays:
            self._open.enter_context(each)
        return self

    def close(self) -> None:
        self._open.close()


class _Logged(PlainDisplay):
    """Lines for a file that is not there at first."""

    def __init__(self, file: _LogFile) -> None:
        super().__init__(file)
        self._file = file

    def __call__(self, progress: Progress) -> None:
        super().__call__(progress)
        self._file.flush()


class _LogFile:
    """A text file that is made once the run has begun in its folder: before, the first rank looks whether
    that is free. Lines that can't be written are left out.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._waiting = path, ""

    def write(self, text: str, /) -> None:
        self._waiting += text

    def flush(self) -> None:
        folder = self._path.parent.parent
        if not self._waiting or not any((folder / name).exists() for name in _HEADS):
            return
        with suppress(OSError):
            self._path.parent.mkdir(exist_ok=True)
            with self._path.open("a", encoding="utf-8") as file:
                file.write(self._waiting)
        self._waiting = ""
