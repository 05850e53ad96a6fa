"""The ledger of a private run: an append-only file of JSON lines that says what privacy was spent, on the
disk before it is spent.

Line 0 is a header, what the whole run keeps to; then one `step` line for each step, and a `resume` line where
a later process went on. Every line has its `position`, the number of lines before it, and as `previous` the
SHA-256 of the line before it, its newline included:

    sed -n 5p ledger.jsonl | sha256sum      # what line 6 must have as previous

so that a lost or changed line shows. It shows accidents and careless edits; a person who intends to
deceive can write a whole new chain.

A process killed inside a write leaves an unfinished line. Nothing was released for it, as `append` had not
returned, and the process that resumes cuts it off.

A budget is a ledger of the same form that several runs write to (budget.py): `shared` makes one that is
locked for each line, or for a few that belong together (`held`), in place of the life of its process.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from psgrad.errors import LedgerError
from psgrad.run import durable_files
from psgrad.run.ledger_lines import (
    FORMAT,
    HEADER,
    NOTE,
    RESUME,
    STEP,
    LedgerContent,
    LedgerLines,
    bytes_of,
    is_torn_header,
    parse,
    require_begun,
    require_mark,
    require_same_run,
    unreadable,
)

_OWN_KEYS = ("kind", "position", "previous", "tool", "format")


class Ledger(LedgerLines):
    """A ledger open for writing, by this process only. `create` or `resume` makes one; close it, or use it in
    a `with`.

    After a write that failed the object refuses to go on, because it is unknown what of the line is on the
    disk: the run ends there, and a new process may resume it.
    """

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._descriptor = descriptor
        self._sound = True
        self.lines: list[dict[str, Any]] = []
        self.digests: list[str] = []
        self._size = 0

    @classmethod
    def create(cls, path: Path, header: Mapping[str, Any]) -> Ledger:
        """Begin a ledger with this header, on the disk when this returns. A run killed before its header was
        whole is begun anew.

        Raises:
            LedgerError: there is a ledger already, another process has it, or it can't be written.
        """
        ledger, content = cls._opened(path, os.O_CREAT)
        try:
            if content.lines:
                raise LedgerError(
                    f"{path} is the ledger of an earlier run; expected a place without one",
                    hint="go on with that run (--resume), or choose another --output",
                )
            ledger._begin(header, content)
        except BaseException:
            ledger.close()
            raise
        return ledger

    @classmethod
    def shared(cls, path: Path, header: Mapping[str, Any]) -> Ledger:
        """A ledger that several processes write to, readable by its owner; begun with this header where there
        is none. Lines are added inside of `held`, and it need not be closed.

        Raises LedgerError: it is damaged, or can't be written.
        """
        ledger, content = cls._opened(path, os.O_CREAT, alone=False)
        try:
            if content.lines:
                ledger._mend(content)
            else:
                ledger._begin(header, content)
        finally:
            os.close(ledger._descriptor)
        return ledger

    @contextmanager
    def held(self) -> Iterator[None]:
        """A shared ledger locked for this process, with the lines that others have added since."""
        self._require_sound()
        self._descriptor = _open(self.path, 0, alone=False)
        try:
            self._require_as_left(longer=True)
            self._mend(self._read_on())
            yield
        finally:
            os.close(self._descriptor)  # which unlocks it

    @classmethod
    def resume(
        cls,
        path: Path,
        note: Mapping[str, Any],
        *,
        expected: Mapping[str, Any] | None = None,
        mark: Mapping[str, Any] | None = None,
        seen: LedgerContent | None = None,
    ) -> Ledger:
        """Go on with a ledger: a resume line with this note is on the disk when this returns. Nothing is
        written where it is refused.

        Args:
            note: what the resume line says besides: the checkpoint's step, the generator, the code's version.
            expected: what the header must say, for a run that goes on with the same data, model, sampling and
                clipping.
            mark: what `mark()` gave when the checkpoint was made, among other things (a checkpoint's
                metadata); None without a checkpoint.
            seen: what `read` said before the ledger was in hand, where the caller relies on it: it must say
                the same still.

        Raises:
            ConfigError: the header says otherwise than `expected`. LedgerError: the ledger is damaged, lacks
            what the checkpoint saw, is in another process's hands, or can't be written.
        """
        ledger, content = cls._opened(path, 0)
        try:
            require_begun(content)
            require_same_run(content.header, expected or {}, f"the ledger {path}")
            require_mark(content, mark)
            if seen is not None and seen.digests != content.digests:
                raise LedgerError(
                    f"the ledger {path} changed while this run was getting ready: another process went on"
                    " with it",
                    hint="resume again",
                )
            ledger._mend(content)
            ledger._write(RESUME, _without_own_keys(note))
        except BaseException:
            ledger.close()
            raise
        return ledger

    @staticmethod
    def read(path: Path) -> LedgerContent:
        """The content of a ledger, for a report; also while a run writes to it.

        Raises LedgerError for one that can't be read, was never begun, or is damaged: a line is named.
        """
        content = parse(path, bytes_of(path))
        require_begun(content)
        return content

    def mark(self) -> dict[str, Any]:
        """The ledger's present state, for a checkpoint: by it the ledger that paid for it is known."""
        return {"ledger_position": self.position, "ledger_sha256": self.digests[-1]}

    def append(self, content: Mapping[str, Any], kind: str = STEP) -> None:
        """Add a line; when this returns it is on the disk, and what it pays for may be released.

        Args:
            content: plain JSON values. NaN and infinities are refused: ValueError, and nothing is written.
            kind: `step`, which is what epsilon is computed from, or `note`.

        Raises:
            LedgerError: the disk is full, the line can't be written, or the file is no longer as this process
            left it. What the line was to pay for must not be released.
        """
        if kind not in (STEP, NOTE):
            raise ValueError(f"{kind!r} lines can't be appended: {STEP!r} and {NOTE!r} can")
        self._write(kind, _without_own_keys(content))

    def close(self) -> None:
        """Let other processes have the ledger."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor, self._sound = -1, False

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @classmethod
    def _opened(cls, path: Path, flags: int, alone: bool = True) -> tuple[Ledger, LedgerContent]:
        """The file locked for this process, and its content; os.O_CREAT in `flags` makes it. alone: whether
        another process that has it is an error, in place of a wait.
        """
        descriptor = _open(path, flags, alone)
        try:
            # The process that made the file may have been killed before the file's name was on the disk.
            durable_files.sync_folder(path.parent)
            ledger = cls(path, descriptor)
            return ledger, ledger._read_on()
        except OSError as error:
            os.close(descriptor)
            raise unreadable(path, error) from error
        except BaseException:
            os.close(descriptor)
            raise

    def _begin(self, header: Mapping[str, Any], content: LedgerContent) -> None:
        if not is_torn_header(content.unfinished):
            raise LedgerError(
                f"{self.path} exists and is not a ledger",
                hint="choose another place",
            )
        self._mend(content)
        self._write(HEADER, {"tool": "psgrad", "format": FORMAT, **_without_own_keys(header)})

    def _read_on(self) -> LedgerContent:
        """Take in what the file holds behind what is known of it."""
        data = bytes_of(self.path)
        content = parse(self.path, data[self._size :], self.lines, self.digests)
        self.lines, self.digests, self._size = list(content.lines), list(content.digests), len(data)
        return content

    def _mend(self, content: LedgerContent) -> None:
        """Cut off a line that a process was killed in, and end one that lacks its newline alone."""
        try:
            if content.unfinished:
                self._size -= len(content.unfinished)
                durable_files.cut(self._descriptor, self._size)
            elif content.open_ended:
                self._size += 1
                durable_files.write_all(self._descriptor, b"\n")
        except OSError as error:
            raise _unwritten(self.path, error) from error

    def _write(self, kind: str, content: Mapping[str, Any]) -> None:
        """Add a line."""
        previous = self.digests[-1] if self.digests else None
        own = {"kind": kind, "position": self.position, "previous": previous}
        text = json.dumps({**own, **content}, allow_nan=False)
        line = text.encode() + b"\n"
        self._require_as_left()
        self._sound = False
        try:
            durable_files.write_all(self._descriptor, line)
            durable_files.sync(self._descriptor)
        except OSError as error:
            raise _unwritten(self.path, error) from error
        self._sound = True
        self.lines.append(json.loads(text))
        self.digests.append(hashlib.sha256(line).hexdigest())
        self._size += len(line)

    def _require_sound(self) -> None:
        """Raises LedgerError where a write failed before, or the ledger was closed."""
        if self._sound:
            return
        raise LedgerError(
            f"the ledger {self.path} can't be written any more: it was closed, or an earlier write failed",
            hint="end this run, and go on with --resume",
        )

    def _require_as_left(self, longer: bool = False) -> None:
        """Raises LedgerError where a line would not follow what this process knows: a write failed, or the
        file was changed or replaced. longer: whether others may have added lines.
        """
        self._require_sound()
        try:
            ours, there = os.fstat(self._descriptor), self.path.stat()
        except OSError as error:
            raise unreadable(self.path, error) from error
        size = max(ours.st_size, self._size) if longer else self._size
        if (ours.st_dev, ours.st_ino, ours.st_size) != (there.st_dev, there.st_ino, size):
            raise LedgerError(
                f"the ledger {self.path} was changed or replaced while the run was writing to it; nothing was"
                " released for this step",
                hint="put the ledger back as it was, and go on with --resume",
            )


def _open(path: Path, flags: int, alone: bool) -> int:
    """The descriptor of the file, opened and locked. alone: whether another process that has it is an error,
    in place of a wait.
    """
    import fcntl  # not on every system, and needed only to write a ledger

    try:
        if flags & os.O_CREAT:
            durable_files.make_folder(path.parent)
        descriptor = os.open(path, os.O_RDWR | os.O_APPEND | flags, 0o666 if alone else 0o600)
    except OSError as error:
        raise unreadable(path, error) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (fcntl.LOCK_NB if alone else 0))
    except OSError as error:
        os.close(descriptor)
        if not isinstance(error, BlockingIOError):
            raise unreadable(path, error) from error
        raise LedgerError(
            f"another process is writing to the ledger {path}",
            hint="wait until that run has ended, or choose another --output",
        ) from None
    return descriptor


def _without_own_keys(content: Mapping[str, Any]) -> dict[str, Any]:
    taken = [key for key in content if key in _OWN_KEYS]
    if taken:
        raise ValueError(f"{', '.join(taken)}: written by the ledger itself")
    return dict(content)


def _unwritten(path: Path, error: OSError) -> LedgerError:
    full = error.errno in durable_files.NO_SPACE
    why = "the disk is full or over quota" if full else error.strerror or error
    return LedgerError(
        f"the ledger {path} can't be written: {why}; what the line pays for was not released",
        hint=("free some space" if full else "check the folder and its disk") + ", and go on with --resume",
    )
