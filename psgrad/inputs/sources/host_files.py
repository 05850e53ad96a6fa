"""Files that the processes of a run make once on each host, and all of them read: hashes of large files, and
tables of formats that have to be converted.

They lie in a folder of the temporary folder that no other user can open, and are named by what they are made
of. The first process that needs one makes it; the others wait for it.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_POLL = 0.02  # seconds between two looks for a file that another process makes

# Of the run that this process is one of; None for a process alone.
_folder: Path | None = None


@contextmanager
def shared_on_host(run: str, removes: bool) -> Iterator[None]:
    """Inside, `made_once` shares files with the other processes of this host that name the same run.

    run: a name that no other run has, nor the same run when it is started again. removes: whether this
    process removes the folder at its end. Processes that still read its files go on.
    """
    global _folder
    folder = Path(tempfile.gettempdir()) / f"psgrad-{hashlib.sha256(run.encode()).hexdigest()[:24]}"
    _folder = folder if _is_own(folder) else None
    try:
        yield
    finally:
        if removes and _folder is not None:
            shutil.rmtree(_folder, ignore_errors=True)
        _folder = None


def _is_own(folder: Path) -> bool:
    """Whether the folder is there, of this user, and closed to others."""
    try:
        folder.mkdir(0o700, exist_ok=True)
        found = folder.lstat()
    except OSError:
        return False
    own = found.st_uid == os.getuid() if hasattr(os, "getuid") else True
    return stat.S_ISDIR(found.st_mode) and own and not found.st_mode & 0o077


def made_once(content: str, make: Callable[[Path], None]) -> Path | None:
    """The file or folder that `make` writes, made by one process of this host; None in a process alone.

    content: what it is made of, in words: another content is another file. What `make` raises is raised, and
    the next process tries.
    """
    if _folder is None:
        return None
    target = _folder / hashlib.sha256(content.encode()).hexdigest()
    lock = target.with_suffix(".lock")
    while not target.exists():
        try:
            _folder.mkdir(0o700, exist_ok=True)  # a process that had ended removed it
            descriptor = os.open(lock, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        except FileExistsError:
            _remove_of_dead(lock)
            time.sleep(_POLL)
            continue
        except OSError:
            return None
        try:
            os.write(descriptor, str(os.getpid()).encode())
            os.close(descriptor)
            if not target.exists():
                made = target.with_suffix(".new")
                shutil.rmtree(made, ignore_errors=True)  # of a process that has died
                make(made)
                made.rename(target)
        finally:
            lock.unlink(missing_ok=True)
    return target


def _remove_of_dead(lock: Path) -> None:
    """Remove a lock whose process has died."""
    with suppress(OSError, ValueError):
        process = int(lock.read_text())
        try:
            os.kill(process, 0)
        except ProcessLookupError:
            lock.unlink()
