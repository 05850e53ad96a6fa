"""Files that the processes of a run make once on each host, and all of them read: tables of formats that
have to be converted, and weights. And work that all processes divide: hashes of large datasets.

They lie in a folder of the temporary folder that no other user can open, and are named by what they are made
of. The first process that needs one makes it; the others wait for it.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Arrays = dict[str, npt.NDArray[Any]]

_POLL = 0.02  # seconds between two looks for a file that another process makes

Waiting = Callable[[str], Callable[[], None]]
"""(what is waited for) to a function that is called again and again meanwhile, and raises to end the wait."""


class Pieces(Protocol):
    """Divides work among the processes of a run; see `in_pieces`.

    wanted: how many pieces work is best divided into: a few for each process, so that a slow one does not
    hold up the others.
    """

    wanted: int

    def __call__(self, name: str, count: int, make: Callable[[int], bytes]) -> Iterator[bytes]: ...


# The folder of the run whose processes share files; None for a process alone.
_folder: Path | None = None
_waiting: Waiting = lambda what: lambda: None
_pieces: Pieces | None = None


@contextmanager
def shared_on_host(
    run: str, removes: bool, waiting: Waiting = lambda what: lambda: None, pieces: Pieces | None = None
) -> Iterator[None]:
    """Inside, `made_once` shares files with the other processes of this host that name the same run, and
    `in_pieces` divides work among the processes of all hosts.

    run: a name that no other run has, nor the same run when it is started again. removes: whether this
    process removes the folder at its end. Processes that still read its files go on. waiting: for another
    process of this host. pieces: divides work; without it each process does all of it.
    """
    global _folder, _waiting, _pieces
    folder = Path(tempfile.gettempdir()) / f"psgrad-{hashlib.sha256(run.encode()).hexdigest()[:24]}"
    _folder, _waiting, _pieces = folder if _is_own(folder) else None, waiting, pieces
    try:
        yield
    finally:
        if removes and _folder is not None:
            shutil.rmtree(_folder, ignore_errors=True)
        _folder = _pieces = None


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


def is_divided() -> bool:
    """Whether there are other processes, of any host, to divide work with."""
    return _pieces is not None


def pieces_wanted() -> int:
    """How many pieces work is best divided into; one where it is not divided."""
    return 1 if _pieces is None else _pieces.wanted


def in_pieces(content: str, count: int, make: Callable[[int], bytes]) -> Iterator[bytes]:
    """The pieces 0, ..., count - 1 in order, each made by one process of the run, of whichever host. Where
    work is not divided, each is made when it is asked for.

    A process that comes here late finds them made, and one that does not come holds up nobody. content: what
    they are, in words; the same on all hosts. make: a piece, by its number.
    """
    if _pieces is None:
        return map(make, range(count))
    return _pieces(hashlib.sha256(content.encode()).hexdigest(), count, make)


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


def arrays_made_once(content: str, make: Callable[[], Arrays]) -> Arrays:
    """The arrays that `make` returns, in one process of this host; see `made_once`."""

    def save(target: Path) -> None:
        made: dict[str, Any] = {**make()}
        with target.open("wb") as file:
            np.savez(file, **made)

    file = made_once(content, save)
    if file is None:
        return make()
    with np.load(file, allow_pickle=False) as found:
        return dict(found)


def json_made_once(content: str, make: Callable[[], Any]) -> Any:
    """What `make` returns, which JSON can hold, in one process of this host; see `made_once`."""

    def save(target: Path) -> None:
        target.write_text(json.dumps(make()), encoding="utf-8")

    file = made_once(content, save)
    return make() if file is None else json.loads(file.read_text(encoding="utf-8"))


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
