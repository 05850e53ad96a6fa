"""What every file that a config names must pass before it is opened for its content.

Which columns a config names, and whether a dataset has them. No torch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path

from psgrad.config import DataConfig, nearest
from psgrad.errors import ConfigError, DataError, PsgradError

_LFS_POINTER = b"version https://git-lfs"
_HASH_BLOCK = 1 << 20


def require_file(path: Path, what: str, unusable: type[PsgradError]) -> Path:
    """`path`, once it is known to be a file with content of its own.

    `what` names the file's part ("checkpoint"), `unusable` is the error for a file that is there but holds
    nothing to read; one that is not there is the config's mistake.
    """
    if path.is_dir():
        raise ConfigError(
            f"the {what} {path} is a folder", expected="a file", next_step="name the file inside it"
        )
    if not path.exists():
        raise ConfigError(
            f"there is no {what} {path}",
            next_step="check the path; it is relative to the config file's folder",
        )
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


def input_names(config: DataConfig) -> list[str]:
    """The columns that a file's config names as inputs."""
    return [config.inputs] if isinstance(config.inputs, str) else list(config.inputs or ())


def named_columns(config: DataConfig, unit: str | None = None) -> list[str]:
    """All columns that a config names, each once: inputs, target, id, and the one that says whom a row
    belongs to.
    """
    return list(
        dict.fromkeys(
            [*input_names(config), *(name for name in (config.target, config.id, unit) if name is not None)]
        )
    )


def not_numbers(name: str, kind: object, example: str | None = None) -> DataError:
    """The error for a column of text, dates, objects or anything else that is no number."""
    return DataError(
        f"{name!r} is of type {kind}" + (f"; {example}" if example else ""),
        expected="numbers",
        next_step="encode classes as 0, 1, 2, ... and texts as token numbers before they are saved",
    )


def require_rows(count: int, source: str) -> None:
    """Raises DataError for an empty dataset."""
    if count == 0:
        raise DataError(f"{source} has no rows", expected="at least one sample")


def require_columns(wanted: Iterable[str], known: Sequence[str], source: str) -> None:
    """Raises ConfigError for the first of the wanted columns that is not there."""
    for name in wanted:
        if name not in known:
            close = nearest(name, known)
            listed = ", ".join(known[:20]) + (f" and {len(known) - 20} more" if len(known) > 20 else "")
            raise ConfigError(
                f"{source} has no column {name!r}" + (f"; did you mean {close}?" if close else ""),
                expected=f"one of its columns: {listed}" if known else None,
            )


def require_single_names(names: Sequence[str], wanted: Sequence[str], path: Path) -> None:
    """Raises DataError where a wanted column is there more than once."""
    for name in wanted:
        if names.count(name) > 1:
            raise DataError(
                f"{path} has {names.count(name)} columns named {name!r}",
                expected="a name of its own for every column",
            )
