"""Durable files: written whole or not at all, and still there after a power cut.

A file that was written is not on the disk until fsync, and its name is not until the folder's fsync. All
files of psgrad are written by the few functions here, so that one place decides the order.

Each operation on the disk stands behind a `crash_point`: opening a temporary file, writing it, syncing it,
renaming it, syncing the folder, and each line of a ledger. With PSGRAD_CRASH_AT=N in the environment when
psgrad is imported, the process sends itself SIGKILL at point number N, from 1, as tests need it. Without it a
point does nothing.
"""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

VARIABLE = "PSGRAD_CRASH_AT"


class _Hook:
    at: int | None = None
    passed = 0


_hook = _Hook()


def crash_at(at: int) -> None:
    """Count points from here on, and die at point number `at`; at 0 they are only counted."""
    _hook.at, _hook.passed = at, 0


def crash_points_passed() -> int:
    """How many points there were since `crash_at`."""
    return _hook.passed


def crash_point(half: Callable[[], object] = lambda: None) -> None:
    """A place where the process may be killed, after `half` of what was to follow, such as a torn write."""
    if _hook.at is None:
        return
    _hook.passed += 1
    if _hook.passed == _hook.at:
        half()
        os.kill(os.getpid(), signal.SIGKILL)


if VARIABLE in os.environ:
    crash_at(int(os.environ[VARIABLE]))


NO_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


@contextmanager
def _replacing(target: Path, mode: int | None = None) -> Iterator[int]:
    """The descriptor of a file that is at its place when the block ends, whole, and never before: temporary
    file, fsync, rename, fsync of the folder. mode: of the file; None for that of the process.

    Raises OSError; then, and where the block raises, the file is as it was, and no temporary file is left.
    """
    temporary = temporary_for(target)
    try:
        crash_point()
        descriptor = os.open(
            temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666 if mode is None else mode
        )
        try:
            if mode is not None:
                os.fchmod(descriptor, mode)  # also of a temporary file that was there
            yield descriptor
            sync(descriptor)
        finally:
            os.close(descriptor)
        crash_point()
        os.replace(temporary, target)  # noqa: PTH105 (one module, one style: everything here is a call of os)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(target.parent)


def write_atomically(target: Path, data: bytes | memoryview, mode: int | None = None) -> None:
    """Write a file so that at every moment, a crash included, it is as before or whole: temporary file,
    fsync, rename, fsync of the folder. mode: of the file; None for that of the process.

    Raises OSError; the file is then as it was, and no temporary file is left.
    """
    with _replacing(target, mode) as descriptor:
        write_all(descriptor, data)


@contextmanager
def written_atomically(target: Path) -> Iterator[BinaryIO]:
    """A file to write to, in the way of `write_atomically`, which is at its place when the block ends."""
    with _replacing(target) as descriptor, open(descriptor, "wb", closefd=False) as file:
        yield file


def temporary_for(target: Path) -> Path:
    """Where `write_atomically` writes first: beside the target, hidden, with this process's number."""
    return target.with_name(f".{target.name}.{os.getpid()}.tmp")


def leftovers_of(target: Path) -> list[Path]:
    """Temporary files of the target, of any process: one that was killed can't remove its own."""
    return sorted(target.parent.glob(f".{target.name}.*.tmp"))


def write_all(descriptor: int, data: bytes | memoryview) -> None:
    """Write every byte at the descriptor's place, in one call if the system allows it. Raises OSError."""
    crash_point()
    crash_point(lambda: os.write(descriptor, data[: max(1, len(data) // 2)]))
    written = os.write(descriptor, data)
    # Some systems take 2 GiB at a time; a full disk takes a part, and refuses the rest.
    while written < len(data):
        written += os.write(descriptor, memoryview(data)[written:])


def sync(descriptor: int) -> None:
    """Wait until what was written is on the disk. Raises OSError."""
    crash_point()
    os.fsync(descriptor)


def sync_folder(folder: Path) -> None:
    """Wait until the folder's names are on the disk, so that no power cut undoes a rename. Raises OSError."""
    crash_point()
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folder(folder: Path, mode: int = 0o777) -> None:
    """Make a folder of this mode, and those above it, durably; nothing where it exists. Raises OSError."""
    if folder.is_dir():
        return
    if folder.parent != folder:
        make_folder(folder.parent)
    crash_point()
    folder.mkdir(mode=mode, exist_ok=True)
    sync_folder(folder.parent)
