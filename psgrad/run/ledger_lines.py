"""The lines of a ledger: their format, and what a file of them contains."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from psgrad.errors import LedgerError
from psgrad.run.identity import require_same

FORMAT = 1
HEADER, STEP, RESUME, NOTE = "header", "step", "resume", "note"

_BEGINNING = b'{"kind": "header", '


class LedgerLines:
    """What the lines of a ledger say. lines: the complete ones in order; the first is the header. digests:
    the SHA-256 of each.
    """

    lines: Sequence[dict[str, Any]]
    digests: Sequence[str]

    @property
    def header(self) -> dict[str, Any]:
        return self.lines[0]

    @property
    def position(self) -> int:
        """How many complete lines there are."""
        return len(self.lines)

    @property
    def steps(self) -> list[dict[str, Any]]:
        """The lines of all steps that were paid for, earlier processes' included; for the last one of a
        ledger that was read nothing may have been released.
        """
        return [line for line in self.lines if line["kind"] == STEP]

    @property
    def step_digests(self) -> list[str]:
        """The SHA-256 of each of these lines."""
        each = zip(self.lines, self.digests, strict=True)
        return [digest for line, digest in each if line["kind"] == STEP]


@dataclass(frozen=True)
class LedgerContent(LedgerLines):
    """The content of a ledger.

    Attributes:
        lines: the complete lines in order; the first is the header.
        digests: the SHA-256 of each.
        unfinished: the bytes after them: the beginning of a line for which nothing was released, mostly
            empty.
        open_ended: whether the last line lacks only its newline.
    """

    path: Path
    lines: tuple[dict[str, Any], ...]
    digests: tuple[str, ...]
    unfinished: bytes
    open_ended: bool


def parse(
    path: Path, data: bytes, lines_before: Sequence[dict[str, Any]] = (), digests_before: Sequence[str] = ()
) -> LedgerContent:
    """The lines of the file, of which `data` are the bytes behind those that are known. Raises LedgerError,
    with the line's number, for all damage but an unfinished line at the end.
    """
    lines, digests = list(lines_before), list(digests_before)
    *whole, last = data.split(b"\n")
    # The last line counts where its newline alone is missing, as it is unknown what removed that.
    open_ended = bool(last) and _line_in(last) is not None
    for number, raw in enumerate([*whole, last] if open_ended else whole, 1 + len(lines)):
        line = _line_in(raw)
        if line is None:
            raise _damaged(path, number, "is not a line that psgrad wrote")
        if line["position"] != len(lines):
            said = f"says that there are {line['position']} lines before it"
            raise _damaged(path, number, f"{said}, and there are {len(lines)}")
        if line["previous"] != (digests[-1] if digests else None):
            raise _damaged(path, number, "was written after another line than the one before it now")
        if (line["kind"] == HEADER) != (not lines):
            raise _damaged(path, number, f"is a {line['kind']} line, which has no place there")
        if line["kind"] == HEADER and line.get("format") != FORMAT:
            raise LedgerError(
                f"the ledger {path} is of format {line.get('format')}; expected format {FORMAT}",
                hint="read it with a newer psgrad",
            )
        lines.append(line)
        digests.append(hashlib.sha256(raw + b"\n").hexdigest())
    return LedgerContent(path, tuple(lines), tuple(digests), b"" if open_ended else last, open_ended)


def _line_in(raw: bytes) -> dict[str, Any] | None:
    """The line if it is complete, None otherwise: no beginning of a line of JSON is JSON."""
    try:
        line = json.loads(raw)
    except ValueError:
        return None
    if not isinstance(line, dict) or not {"position", "previous"} <= line.keys():
        return None
    return line if line.get("kind") in (HEADER, STEP, RESUME, NOTE) else None


def is_torn_header(unfinished: bytes) -> bool:
    """Whether the bytes may be of a process killed while it began a ledger; a power cut leaves zeros."""
    begun = unfinished.strip(b"\0")[: len(_BEGINNING)]
    return _BEGINNING.startswith(begun)


def has_begun(path: Path) -> bool:
    """Whether there is a ledger that may have paid for anything; one that is damaged may."""
    try:
        content = parse(path, path.read_bytes())
    except FileNotFoundError:
        return False
    except (OSError, LedgerError):
        return True
    return bool(content.lines) or not is_torn_header(content.unfinished)


def bytes_of(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise unreadable(path, error) from error


# -- refusals ------------------------------------------------------------------------------------------------


def require_begun(content: LedgerContent) -> None:
    if not content.lines:
        raise LedgerError(
            f"the ledger {content.path} has no header",
            hint="nothing was spent; begin the run again with --overwrite, without --resume",
        )


def require_mark(content: LedgerContent, mark: Mapping[str, Any] | None) -> None:
    if mark is None:
        return
    position, digest = mark["ledger_position"], mark["ledger_sha256"]
    if position > content.position:
        found = f"the checkpoint was made when the ledger {content.path} had {position:,} lines, and it has"
        found += f" {content.position:,}"
    elif content.digests[position - 1] != digest:
        found = f"line {position:,} of the ledger {content.path} is not the one that the checkpoint was made"
        found += " after"
    else:
        return
    raise LedgerError(
        f"{found}: the epsilon would be too small",
        hint="put back the ledger that belongs to the checkpoint",
    )


def require_same_run(
    there: Mapping[str, Any], expected: Mapping[str, Any], what: str, *, show: bool = True
) -> None:
    """Raises ConfigError, with all that differs, where a private run would go on with another one.

    there: what the earlier run wrote down. expected: what this run would write; each of its keys is compared.
    what: where it was written down, for the message. show: see `require_same`.
    """
    require_same(
        {key: there.get(key) for key in expected},
        expected,
        f"{what} is that of another run",
        show=show,
        hint="go on with what the run began with, or begin a run of its own with another --output",
    )


def unreadable(path: Path, error: OSError) -> LedgerError:
    return LedgerError(
        f"the ledger {path} can't be opened: {error.strerror or error}",
        hint="check the path and its permissions; it must lie on a file system that can lock files",
    )


def _damaged(path: Path, number: int, what: str) -> LedgerError:
    return LedgerError(
        f"the ledger {path} is damaged: line {number:,} {what}; an epsilon computed from the rest would be"
        " too small",
        hint="put back the whole ledger; a run whose ledger is lost has no privacy guarantee",
    )
