"""The messages of each rank, in logs/ of the run folder; those of rank 0 also on stderr."""

from __future__ import annotations

import os
import socket
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Self

from psgrad.cli.progress import PlainDisplay, ProgressDisplay, ProgressStyle, progress_display
from psgrad.errors import DistributedError

if TYPE_CHECKING:
    from psgrad.engine.execution.ranks import Processes
    from psgrad.results import Progress

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
    """The same error with the last lines that the rank has logged which it names."""
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
