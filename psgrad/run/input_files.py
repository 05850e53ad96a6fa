"""Files that a run reads: checks before their content is read, hashes, whether they changed. No torch."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from psgrad.config.values import require_regular
from psgrad.errors import ConfigError, DataError, PsgradError

_LFS_POINTER = b"version https://git-lfs"


def require_file(path: Path, what: str, unusable: type[PsgradError]) -> Path:
    """`path`, once it is known to be a file with content of its own.

    `what` names the file's part ("checkpoint"), `unusable` is the error for a file that is there but holds
    nothing to read; one that is not there is the config's mistake.
    """
    if path.is_dir():
        raise ConfigError(
            f"the {what} {path} is a folder; expected a file",
            hint="name the file inside it",
        )
    if not path.exists():
        raise ConfigError(
            f"there is no {what} {path}",
            hint="check the path; it is relative to the config file's folder",
        )
    require_regular(path, what)
    try:
        with path.open("rb") as file:
            head = file.read(len(_LFS_POINTER))
    except OSError as error:
        raise unusable(f"the {what} {path} can't be read: {error.strerror}") from error
    if not head:
        raise unusable(
            f"the {what} {path} is empty",
            hint="an interrupted copy or download",
        )
    if head == _LFS_POINTER:
        raise unusable(
            f"the {what} {path} is a git-lfs pointer, not the file itself",
            hint=f"the repository was cloned without git-lfs; run `git lfs pull` in {path.parent}",
        )
    return path


@dataclass(frozen=True)
class Stamp:
    """The system's facts about a file: its size in bytes, when it was written last, and which file it is."""

    path: Path
    size: int
    written: int
    number: int

    @classmethod
    def of(cls, path: Path) -> Stamp:
        """That of a file as it is now. Raises DataError where it is not there."""
        try:
            found = path.stat()
        except OSError as error:
            raise DataError(f"the file {path} can't be read any more: {error.strerror}") from error
        return cls(path, found.st_size, found.st_mtime_ns, found.st_ino)


def require_unchanged(stamps: Iterable[Stamp]) -> None:
    """Raises DataError for a file that is not as it was."""
    for stamp in stamps:
        if Stamp.of(stamp.path) != stamp:
            raise DataError(
                f"the file {stamp.path} was changed while the run read it; expected the same rows in all"
                " passes",
                hint="put the file back and go on with --resume, or begin anew with --overwrite",
            )


def sha256_of(path: Path) -> str:
    """The SHA-256 of a file's bytes, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
