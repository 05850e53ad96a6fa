"""Files that the processes of a run make once on each host, and all of them read: weights.

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
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

_POLL = 0.02  # seconds between two looks for a file that another process makes

Waiting = Callable[[str], Callable[[], None]]
"""(what is waited for) to a function that is called again and again meanwhile, and raises to end the wait."""


# The folder of the run whose processes share files; None for a process alone.
_folder: Path | None = None
_waiting: Waiting = lambda what: lambda: None


@contextmanager
def shared_on_host(run: str, removes: bool, waiting: Waiting = lambda what: lambda: None) -> Iterator[None]:
    """Inside, `made_once` shares files with the other processes of this host that name the same run.

    run: a name that no other run has, nor the same run when it is started again. removes: whether this
    process removes the folder at its end. Processes that still read its files go on. waiting: for another
    process of this host.
    """
    global _folder, _waiting
    folder = Path(tempfile.gettempdir()) / f"psgrad-{hashlib.sha256(run.encode()).hexdigest()[:24]}"
    _folder, _waiting = folder if _is_own(folder) else None, waiting
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


def is_shared() -> bool:
    """Whether there are other processes to share with."""
    return _folder is not None


def made_once(content: str, make: Callable[[Path], None]) -> Path | None:
    """The file or folder that `make` writes, made by one process of this host; None in a process alone, and
    where an OSError is raised, such as that of a full disk.

    content: what it is made of, in words: another content is another file. What `make` raises is raised, and
    the next process tries.
    """
    if _folder is None:
        return None
    target = _folder / hashlib.sha256(content.encode()).hexdigest()
    lock, look = target.with_suffix(".lock"), _waiting("a file that another process of this host makes")
    while not target.exists():
        try:
            _folder.mkdir(0o700, exist_ok=True)  # a process that had ended removed it
            descriptor = os.open(lock, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        except FileExistsError:
            _remove_of_dead(lock)
            look()
            time.sleep(_POLL)
            continue
        except OSError:
            return None
        try:
            os.write(descriptor, str(os.getpid()).encode())
            os.close(descriptor)
            if not target.exists():
                made = target.with_suffix(".new")
                _remove(made)  # of a process that has died
                try:
                    make(made)
                    made.rename(target)
                except OSError:
                    _remove(made)
                    return None
        finally:
            lock.unlink(missing_ok=True)
    return target


def remove_when_all_have(file: Path) -> None:
    """Remove a file of `made_once` that each process of this host maps, once all of them have called this: it
    stays in memory for as long as one of them uses it.
    """
    (file.parent / f"{file.name}.had-{os.environ.get('LOCAL_RANK', '0')}").touch()
    had = list(file.parent.glob(f"{file.name}.had-*"))
    if len(had) >= int(os.environ.get("LOCAL_WORLD_SIZE") or 1):
        for each in (file, *had):
            each.unlink(missing_ok=True)


@contextmanager
def turn(name: str, most: int) -> Iterator[None]:
    """Inside are at most `most` processes of this host at a time; the others wait."""
    if _folder is None:
        yield
        return
    import fcntl  # not on every system

    with ExitStack() as stack:
        _folder.mkdir(0o700, exist_ok=True)
        places = [stack.enter_context((_folder / f"{name}-{k}.turn").open("w")) for k in range(most)]
        look = _waiting(f"a turn to {name} on this host")
        while not any(_locks(fcntl, place.fileno()) for place in places):
            look()
            time.sleep(_POLL)
        yield


def _locks(fcntl: Any, descriptor: int) -> bool:
    """Whether this process has the lock from now on; the system takes it back when the file is closed."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _remove(made: Path) -> None:
    shutil.rmtree(made) if made.is_dir() else made.unlink(missing_ok=True)


def _remove_of_dead(lock: Path) -> None:
    """Remove a lock whose process has died."""
    with suppress(OSError, ValueError):
        process = int(lock.read_text())
        try:
            os.kill(process, 0)
        except ProcessLookupError:
            lock.unlink()
