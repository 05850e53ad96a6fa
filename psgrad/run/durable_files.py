"""Durable files: written whole or not at all, and still there after a power cut; and a lock on the folder to
which a process writes, so that none replaces what another one still writes.

A file that was written is not on the disk until fsync, and its name is not until the folder's fsync. All
files of psgrad are written by the few functions here, so that one place decides the order.
"""

from __future__ import annotations

import errno
import os
import weakref
from collections import Counter
from pathlib import Path

from psgrad.errors import OutputError, OutputExistsError

NO_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def write_atomically(target: Path, data: bytes | memoryview, mode: int = 0o666) -> None:
    """Write a file so that at every moment, a crash included, it is as before or whole: temporary file,
    fsync, rename, fsync of the folder. mode: of a new file, without the bits of the process's umask.

    Raises OSError; the file is then as it was, and no temporary file is left.
    """
    temporary = temporary_for(target)
    try:
        temporary.unlink(missing_ok=True)
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        try:
            write_all(descriptor, data)
            sync(descriptor)
        finally:
            os.close(descriptor)
        os.replace(temporary, target)  # noqa: PTH105 (one module, one style: everything here is a call of os)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(target.parent)


def temporary_for(target: Path) -> Path:
    """Where `write_atomically` writes first: beside the target, hidden, with this process's number."""
    return target.with_name(f".{target.name}.{os.getpid()}.tmp")


def leftovers_of(target: Path) -> list[Path]:
    """Temporary files of the target, of any process: one that was killed can't remove its own."""
    return sorted(target.parent.glob(f".{target.name}.*.tmp"))


def write_all(descriptor: int, data: bytes | memoryview) -> None:
    """Write every byte at the descriptor's place, in one call if the system allows it. Raises OSError."""
    written = os.write(descriptor, data)
    # Some systems take 2 GiB at a time; a full disk takes a part, and refuses the rest.
    while written < len(data):
        written += os.write(descriptor, memoryview(data)[written:])


def cut(descriptor: int, size: int) -> None:
    """Cut off what is behind this many bytes. Raises OSError."""
    os.ftruncate(descriptor, size)


def sync(descriptor: int) -> None:
    """Wait until what was written is on the disk. Raises OSError."""
    os.fsync(descriptor)


def sync_folder(folder: Path) -> None:
    """Wait until the folder's names are on the disk, so that no power cut undoes a rename. Raises OSError."""
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
    folder.mkdir(mode=mode, exist_ok=True)
    sync_folder(folder.parent)


_own: Counter[tuple[int, int]] = Counter()  # the folders that this process has locked


class FolderLock:
    """Held by a process that writes to a folder; several may, such as the parts of a run. It ends with
    `release`, with this object, or with its process, however that ends.

    It is the system's (flock) on the folder itself: no file is left behind. Where there is no such lock (some
    network storage), nothing is locked.
    """

    def __init__(self, folder: Path, alone: bool = False) -> None:
        """alone: whether the folder is taken from all others, until `share`.

        Raises OutputExistsError where another process has the folder.
        """
        try:
            self._descriptor = os.open(folder, os.O_RDONLY)
        except OSError as error:  # what writes there says so in better words
            raise OutputError(f"the folder {folder} can't be read: {error.strerror or error}") from error
        status = os.fstat(self._descriptor)
        key = status.st_dev, status.st_ino
        free = _flock(self._descriptor, alone and not _own[key])
        _own[key] += 1
        self._end = weakref.finalize(self, _let_go, self._descriptor, key)
        if not free:
            self.release()
            raise OutputExistsError(
                f"a run that is going on writes to the folder {folder}",
                hint="wait until that run has ended, or choose another folder",
            )

    def release(self) -> None:
        """Let others have the folder. May be called again."""
        self._end()

    def share(self) -> None:
        """Let others write to the folder, too, and none take it alone."""
        if self._end.alive:
            _flock(self._descriptor, False)


def _let_go(descriptor: int, key: tuple[int, int]) -> None:
    _own[key] -= 1
    _flock(descriptor, None)  # a forked process that shares the descriptor may live on
    os.close(descriptor)


def _flock(descriptor: int, alone: bool | None) -> bool:
    """Lock a file, alone or with others; None unlocks it. False where another process has it."""
    try:
        import fcntl  # not on every system
    except ImportError:
        return True
    kind = fcntl.LOCK_UN if alone is None else fcntl.LOCK_EX if alone else fcntl.LOCK_SH
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks, or without this one of a folder
        return True
    return True
