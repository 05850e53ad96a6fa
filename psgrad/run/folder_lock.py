"""A lock on a folder by the processes that write to it, so that none replaces what another one still writes.

It is the system's (flock) on the folder itself: no file is left behind, and it ends with its process, however
that ends. Where there is no such lock (some network storage), nothing is locked.
"""

from __future__ import annotations

import os
import weakref
from collections import Counter
from pathlib import Path

from psgrad.errors import OutputError, OutputExistsError

_own: Counter[tuple[int, int]] = Counter()  # the folders that this process has locked


class FolderLock:
    """Held by a process that writes to a folder; several may, such as the parts of a run. It ends with
    `release`, or with this object.
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
                f"a run that is going on writes to the folder {folder}; expected a folder that no other"
                " process writes to",
                hint="wait until that run has ended, or choose another folder",
            )

    def release(self) -> None:
        """Let others have the folder. May be called again."""
        self._end()

    def share(self) -> None:
        """Let others write to the folder, too, and none take it alone."""
        if self._end.alive:
            _flock(self._descriptor, False)


def require_unlocked(folder: Path) -> None:
    """Raises OutputExistsError where another process has locked the folder."""
    FolderLock(folder, alone=True).release()


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
