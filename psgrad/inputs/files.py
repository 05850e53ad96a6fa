"""What every file that a config names must pass before it is opened for its content."""

from __future__ import annotations

import hashlib
from pathlib import Path

from psgrad.errors import ConfigError, PsgradError

_LFS_POINTER = b"version https://git-lfs"
_HASH_BLOCK = 1 << 20


def require_file(path: Path, what: str, unusable: type[PsgradError]) -> Path:
    """`path`, once it is known to be a file with content of its own.

    `what` names the file's part ("checkpoint"), `unusable` is the error for a file that is there but holds nothing to read; one
    that is not there is the config's mistake.
    """
    if path.is_dir():
        raise ConfigError(f"the {what} {path} is a folder", expected="a file", next_step="name the file inside it")
    if not path.exists():
        raise ConfigError(f"there is no {what} {path}", next_step="check the path; it is relative to the config file's folder")
    try:
        with path.open("rb") as file:
            head = file.read(len(_LFS_POINTER))
    except OSError as error:
        raise unusable(f"the {what} {path} can't be read: {error.strerror}") from error
    if not head:
        raise unusable(f"the {what} {path} is empty", cause="an interrupted copy or download")
    if head == _LFS_POINTER:
        raise unusable(
            f"the {what} {path} is a git-lfs pointer, not the file itself",
            cause="the repository was cloned without git-lfs",
            next_step=f"run `git lfs pull` in {path.parent}",
        )
    return path


def is_archive(path: Path) -> bool:
    """Whether a file begins as a zip archive does."""
    with path.open("rb") as file:
        return file.read(4) == b"PK\x03\x04"


def sha256_of(path: Path) -> str:
    """The SHA-256 of a file's bytes, in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_HASH_BLOCK):
            digest.update(block)
    return digest.hexdigest()
