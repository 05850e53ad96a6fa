"""When, from which command and from which state of the user's code a run was made."""

from __future__ import annotations

import re
import shlex
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

_COMMIT = re.compile(r"[0-9a-f]{40}(?:[0-9a-f]{24})?")


def origin(base: Path) -> dict[str, Any]:
    """created: now, UTC. command_line: of psgrad, None where it was called from Python. revision: `revision_of` the folder `base`."""
    return {"created": now(), "command_line": command_line(), "revision": revision_of(base)}


def now() -> str:
    """The time as ISO 8601, in UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def command_line() -> str | None:
    """The arguments of this process as a shell takes them; None where it is another program than psgrad, whose arguments may be secret."""
    program = Path(sys.argv[0]) if sys.argv else Path()
    own = program.stem == "psgrad" or (program.name == "__main__.py" and program.parent.name == "psgrad")
    return shlex.join(["psgrad", *sys.argv[1:]]) if own else None


def revision_of(folder: Path) -> str | None:
    """The commit that is checked out where a folder lies; None outside of a git repository.

    Git's files are read and git is not run, which would run programs that a repository's settings name. So changes that are not committed
    are not seen.
    """
    try:
        for above in (folder.resolve(), *folder.resolve().parents):
            if (above / ".git").exists():
                return _checked_out(above / ".git")
    except (OSError, UnicodeDecodeError):
        pass
    return None


def _checked_out(git: Path) -> str | None:
    if git.is_file():  # of a worktree or a submodule: "gitdir: <path>"
        git = git.parent / git.read_text().removeprefix("gitdir:").strip()
    shared = git / (git / "commondir").read_text().strip() if (git / "commondir").exists() else git
    head = (git / "HEAD").read_text().strip()
    if not head.startswith("ref:"):
        return _commit(head)
    name = head.removeprefix("ref:").strip()
    for where in (git, shared):
        if (where / name).is_file():
            return _commit((where / name).read_text())
    packed = (shared / "packed-refs").read_text().splitlines() if (shared / "packed-refs").exists() else []
    return next((_commit(line.split()[0]) for line in packed if line.endswith(f" {name}")), None)


def _commit(text: str) -> str | None:
    found = _COMMIT.fullmatch(text.strip())
    return found and found[0]
