"""How a run goes: when and by which command it was made, how long its phases take, what manifest.json says of
it, and when Ctrl-C may end it.
"""

from __future__ import annotations

import platform
import re
import shlex
import signal
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from psgrad.engine.execution.self_check import SelfCheck
from psgrad.inputs.code import module_of
from psgrad.storage.folders import RunFolder
from psgrad.workflows.identity import hashes_of
from psgrad.workflows.setup import Setup

_COMMIT = re.compile(r"[0-9a-f]{40}(?:[0-9a-f]{24})?")


def origin(base: Path) -> dict[str, Any]:
    """created: now, UTC. command_line: of psgrad, None where it was called from Python. revision:
    `revision_of` the folder `base`.
    """
    return {"created": now(), "command_line": command_line(), "revision": revision_of(base)}


def now() -> str:
    """The time as ISO 8601, in UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def command_line() -> str | None:
    """The arguments of this process as a shell takes them; None where it is another program than psgrad,
    whose arguments may be secret.
    """
    program = Path(sys.argv[0]) if sys.argv else Path()
    own = program.stem == "psgrad" or (program.name == "__main__.py" and program.parent.name == "psgrad")
    return shlex.join(["psgrad", *sys.argv[1:]]) if own else None


def revision_of(folder: Path) -> str | None:
    """The commit that is checked out where a folder lies; None outside of a git repository.

    Git's files are read and git is not run, which would run programs that a repository's settings name. So
    changes that are not committed are not seen.
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


class Clock:
    """Seconds spent in each phase."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[phase] = round(time.perf_counter() - start, 3)


def describe_run(
    command: str, run: Setup, check: SelfCheck | None, specs: Iterable[str | None] = ()
) -> dict[str, Any]:
    """What manifest.json says of a run before it starts. `specs` name code that it runs besides its model's,
    loss's and data's.
    """
    config, loaded = run.config, run.loaded
    parameters = list(loaded.model.parameters())
    return {
        "version": 1,
        "command": command,
        **origin(config.base),
        "config": config.model_dump(mode="json"),
        "config_folder": str(config.base),  # what the paths in it are relative to
        "versions": {
            "psgrad": version("psgrad"),
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "model": {
            "factory": config.model.factory,
            "parameters": sum(p.numel() for p in parameters),
            "trainable": sum(p.numel() for p in parameters if p.requires_grad),
            "checkpoint": config.model.checkpoint,
            "sha256": loaded.sha256,
            "notes": loaded.notes,
            "modules_imported": [
                *loaded.modules_imported,
                *run.criterion.modules_imported,
                *([module_of(config.data.factory)] if config.data.factory else []),
            ],
        },
        "data": {"source": config.data.path or config.data.factory, "fingerprint": run.samples.fingerprint},
        "hashes": hashes_of(run, specs),
        "engine": {
            "device": (
                str(run.device)
                if run.device.type == "cpu"
                else f"{run.device} ({torch.cuda.get_device_name(run.device)})"
            ),
            "dtype": config.engine.dtype,
            "threads": torch.get_num_threads(),
        },
        "self_check": (
            {"samples": 0, "reason": "the model draws at random in train mode"}
            if check is None
            else {"samples": len(check.rows), "rows": check.rows, "worst_relative_error": check.worst}
            | ({"worst_error_of_autocast": check.worst_rounding} if check.rounding else {})
        ),
        "contains_private_statistics": True,
    }


@contextmanager
def recorded(folder: RunFolder, facts: dict[str, Any], clock: Clock) -> Iterator[None]:
    """Keeps manifest.json true to what has happened: running, finished, failed or interrupted.

    `created` is when the run began, whichever process goes on with it, and `finished` when it came to its
    end.
    """
    facts["created"] = folder.manifest().get("created") or facts["created"]
    folder.write_manifest({**facts, "state": "running"})
    try:
        yield
    except BaseException as error:
        state = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
        try:
            counts = {"finished_samples": folder.rows}
            folder.write_manifest(
                {**facts, "state": state, "error": str(error), "counts": counts, "timings": clock.seconds}
            )
        except Exception:
            pass  # the disk may be full, and what has gone wrong first is what the user must hear
        raise
    folder.write_manifest({**facts, "state": "finished", "finished": now(), "timings": clock.seconds})


@contextmanager
def held() -> Iterator[None]:
    """SIGINT and SIGTERM wait until the block is done, and are then handled as they would have been. Of each
    the second waits no longer.

    Outside of the main thread, which alone hears signals, nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    waiting: list[tuple[int, FrameType | None]] = []
    before: dict[int, Any] = {}

    def wait(signum: int, frame: FrameType | None) -> None:
        waiting.append((signum, frame))
        signal.signal(signum, before[signum])

    for signum in (int(signal.SIGINT), int(signal.SIGTERM)):
        before[signum] = signal.getsignal(signum)
        if callable(before[signum]):
            signal.signal(signum, wait)
    try:
        yield
    finally:
        for signum, handler in before.items():
            if callable(handler):
                signal.signal(signum, handler)
    for arrived, frame in waiting:
        before[arrived](arrived, frame)
