"""Folders that psgrad makes and fills, those of runs and of indexes: each is known by the mark in a file at
its top, one process takes it or several parts of a job array join it, and its files are there whole or not at
all.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar, Self

from psgrad.errors import OutputError, OutputExistsError
from psgrad.run import durable_files
from psgrad.run.durable_files import FolderLock
from psgrad.wording import json_values

# A part that begins makes the folder within this time, and others wait for it.
_SECONDS_TO_MAKE_FOLDER = 60.0


class MarkedFolder:
    """A folder of a kind that its class names.

    Attributes:
        path: of the folder.
        top: the file that says what the folder is. mark: the value of its key `tool`.
        noun, holds, option: of messages: what the folder is for, what is in it, what names it.
        if_taken: what to do where the folder holds something already.
        after_more_space: what to do where the disk was full.
    """

    top: ClassVar[str]
    mark: ClassVar[str]
    noun: ClassVar[str]
    holds: ClassVar[str]
    option: ClassVar[str]
    if_taken: ClassVar[str]
    after_more_space: ClassVar[str]

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: FolderLock | None = None

    # -- taking a folder -------------------------------------------------------------------------------------

    @classmethod
    def require_free(cls, path: Path, overwrite: bool = False) -> None:
        """Raises OutputExistsError for a folder that may not be taken, and changes nothing: to be called
        before any work. `overwrite` allows one with something of this kind in it, which no process writes to.
        """
        try:
            if not path.exists() and not path.is_symlink():
                return
            if not path.is_dir():
                raise OutputExistsError(
                    f"the {cls.noun} {path} exists and is not a folder", hint=f"choose another {cls.option}"
                )
            if cls._only_leftovers(path):
                return
        except OSError as error:
            raise cls._unusable(path, error) from error
        if cls.manifest_of(path) is None:
            raise OutputExistsError(
                f"the {cls.noun} folder {path} is not empty and does not hold a psgrad {cls.holds}; expected"
                f" a new or empty folder, or the folder of an earlier {cls.holds}",
                hint=f"choose another {cls.option}; --overwrite replaces what psgrad wrote only",
            )
        cls._require_replaceable(path)
        if not overwrite:
            raise OutputExistsError(
                f"the {cls.noun} folder {path} holds an earlier {cls.holds}; expected a new or empty folder",
                hint=cls.if_taken,
            )
        FolderLock(path, alone=True).release()

    def take(self, about: Mapping[str, Any], overwrite: bool = False) -> Self:
        """Make the folder, or take one that is empty, and write what it is. `overwrite` also takes one with
        something of this kind in it, and removes that.

        Raises OutputExistsError as `require_free` does, and OutputError where the folder can't be made.
        """
        self.require_free(self.path, overwrite)
        try:
            # Norms, losses and gradients reveal single training examples: for the owner alone.
            durable_files.make_folder(self.path, 0o700)
            self._lock = FolderLock(self.path, alone=True)
            self._clear()
            for leftover in durable_files.leftovers_of(self.path / self.top):
                leftover.unlink()
        except OSError as error:
            raise self._unusable(self.path, error) from error
        self.write_manifest(about)
        self._lock.share()
        return self

    @classmethod
    def join(cls, path: Path, begun: Callable[[], Self | None], create: Callable[[], Self]) -> Self:
        """The folder that several parts of a job array fill, of which none knows when the others run: the
        first one makes it by `create`, and the others wait until `begun` finds it.

        Raises what these two raise, and OutputError where the folder can't be made.
        """
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with suppress(OSError):
                path.rmdir()  # an empty one
            path.mkdir(0o700)
        except FileExistsError:
            end = time.monotonic() + _SECONDS_TO_MAKE_FOLDER
            while True:
                waits = path.is_dir() and cls._only_leftovers(path) and time.monotonic() < end
                if (found := begun()) is not None:
                    return found
                if not waits:
                    return create()  # the part that made the folder was killed; or it is a stranger's
                time.sleep(0.1)
        except OSError as error:
            raise cls._unusable(path, error) from error
        return create()

    def hold(self) -> None:
        """Keep others from replacing what is in the folder, until `let_go` or the end of this process. Raises
        OutputExistsError where one does so now.
        """
        self._lock = self._lock or FolderLock(self.path)

    def let_go(self) -> None:
        """Nothing more will be written to the folder."""
        if self._lock is not None:
            self._lock.release()
        self._lock = None

    @classmethod
    def manifest_of(cls, folder: Path) -> dict[str, Any] | None:
        """The content of the file at the top; None where the folder is not of this kind."""
        # Other tools have files named manifest.json too: the mark inside decides.
        try:
            content = json.loads((folder / cls.top).read_bytes())
        except (OSError, ValueError):
            return None
        return content if isinstance(content, dict) and content.get("tool") == cls.mark else None

    def write_manifest(self, content: Mapping[str, Any]) -> None:
        """Write the file at the top, with the mark. Raises OutputError."""
        self.write_json(self.top, {"tool": self.mark, **content})

    @classmethod
    def _require_replaceable(cls, path: Path) -> None:
        """Raises OutputExistsError for what is never replaced."""

    def _clear(self) -> None:
        """Remove the files of this kind, but the one at the top: a crash half-way leaves a folder that can
        be recognised and overwritten. Raises OSError.
        """
        raise NotImplementedError

    @classmethod
    def _only_leftovers(cls, path: Path) -> bool:
        """Whether there is nothing in a folder but what a process that was killed while it wrote its first
        file left of that, or what one that writes it now has.
        """
        return set(path.iterdir()) <= set(durable_files.leftovers_of(path / cls.top))

    @classmethod
    def _unusable(cls, path: Path, error: OSError) -> OutputError:
        return OutputError(
            f"the {cls.noun} folder {path} can't be made: {error.strerror or error}; expected a place where"
            " folders and files can be written",
            hint=f"choose another {cls.option}",
        )

    # -- files -----------------------------------------------------------------------------------------------

    def write_json(self, name: str, content: Any) -> None:
        """Write JSON for every reader: numpy values as plain ones, paths as text, what is not finite null."""
        text = json.dumps(json_values(content), indent=2, ensure_ascii=False, allow_nan=False)
        self.write_bytes(name, (text + "\n").encode("utf-8", "backslashreplace"))

    def write_bytes(self, name: str, data: bytes | memoryview, mode: int = 0o666) -> None:
        """Write one file, in a folder below if `name` has slashes. mode: see `write_atomically`.

        Raises:
            OutputError: the disk is full, or the file can't be written; the file is then as it was before.
        """
        target = self.path / name
        try:
            durable_files.make_folder(target.parent)
            durable_files.write_atomically(target, data, mode)
        except OSError as error:
            raise self._explain(error, target, len(data)) from error

    def _explain(self, error: OSError, target: Path, wanted: int) -> OutputError:
        if error.errno not in durable_files.NO_SPACE:
            return OutputError(
                f"{target} can't be written: {error.strerror or error}",
                hint="check the folder and its permissions",
            )
        return OutputError(
            f"the disk is full or over quota: {target} can't be written ({error.strerror}); expected"
            f" {wanted:,} free bytes for this file",
            hint="; ".join(filter(None, (self._kept(), self.after_more_space))),
        )

    def _kept(self) -> str:
        """What is there after a write that failed, in words."""
        return ""
