"""Durable files: written whole or not at all, and still there after a power cut.

A file that was written is not on the disk until fsync, and its name is not until the folder's fsync. All
files of psgrad are written by the few functions here, so that one place decides the order.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

NO_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def write_atomically(target: Path, data: bytes | memoryview, mode: int | None = None) -> None:
    """Write a file so that at every moment, a crash included, it is as before or whole: temporary file,
    fsync, rename, fsync of the folder. mode: of the file; None for that of the process.

    Raises OSError; the file is then as it was, and no temporary file is left.
    """
    temporary = temporary_for(target)
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        descriptor = os.open(temporary, flags, 0o666 if mode is None else mode)
        try:
            if mode is not None:
                os.fchmod(descriptor, mode)  # also of a temporary file that was there
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
