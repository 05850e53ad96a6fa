"""Runs that are killed: at every operation on the disk in turn, and resumed until they finish. An operation
is a call of `os` by which psgrad.run writes: to open a new file, to write (before it, and when half of it
is written), to sync, to rename, to make a folder.

Each run is a child forked from this process, which has everything imported already, so that a hundred of them
take seconds. What a run lets out (a release) it tells through a pipe, which outlives it.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

_SECONDS = 60  # a child that takes longer hangs

Tell = Callable[[Any], None]
Go = Callable[[Path, Tell], None]
"""Begins a run in the folder, or goes on with the one there, and tells of each release the moment it is out.
"""
Check = Callable[[Path, list[Any], bool], None]
"""Raises AssertionError. What it gets: the folder, all that was told by the run so far, and whether the run
has finished.
"""


@dataclass(frozen=True)
class Ended:
    """How a child ended.

    Attributes:
        killed: by SIGKILL.
        told: what it told, in order.
        points: how many operations on the disk it did; of one that finished.
        error: the traceback of one that failed.
    """

    killed: bool
    told: list[Any]
    points: int = 0
    error: str = ""


class Operations:
    """Counts the operations on the disk from now on, and dies at number `crash_at`; at 0 they are only
    counted. synced: whether fsync is carried out.
    """

    def __init__(self, patch: pytest.MonkeyPatch, crash_at: int = 0, synced: bool = True) -> None:
        self.passed, self._crash_at = 0, crash_at
        opened, written, sync = os.open, os.write, os.fsync

        def open_(path: Any, flags: int, *rest: Any, **options: Any) -> int:
            if flags & os.O_CREAT:
                self._pass()
            return opened(path, flags, *rest, **options)

        def write(descriptor: int, data: Any) -> int:
            self._pass()
            self._pass(lambda: written(descriptor, data[: max(1, len(data) // 2)]))
            return written(descriptor, data)

        def fsync(descriptor: int) -> None:
            self._pass()
            if synced:
                sync(descriptor)

        def counted(name: str) -> Callable[..., Any]:
            honest = getattr(os, name)

            def call(*arguments: Any, **options: Any) -> Any:
                self._pass()
                return honest(*arguments, **options)

            return call

        known = {"open": open_, "write": write, "fsync": fsync}
        for name, instead in {
            **known,
            **{name: counted(name) for name in ("replace", "mkdir", "ftruncate")},
        }.items():
            patch.setattr(os, name, instead)

    def _pass(self, half: Callable[[], object] = lambda: None) -> None:
        """One operation comes; where it is the last one, `half` of it is done."""
        self.passed += 1
        if self.passed == self._crash_at:
            half()
            os.kill(os.getpid(), signal.SIGKILL)


def in_a_child(body: Callable[[Tell], None], crash_at: int = 0) -> Ended:
    """Run the body in a forked child that kills itself at operation number `crash_at` on the disk; 0 lets it
    finish.
    """
    reading, writing = os.pipe()
    sys.stdout.flush()
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", DeprecationWarning
        )  # Python 3.12 warns of forks beside threads; the child uses none
        child = os.fork()
    if child == 0:
        _be_the_child(body, crash_at, reading, writing)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        lines = [json.loads(line) for line in pipe if line.endswith(b"\n")]
    _, status = os.waitpid(child, 0)
    told = [line["told"] for line in lines if "told" in line]
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL, f"the child died of signal {os.WTERMSIG(status)}"
        return Ended(True, told)
    last = lines[-1]
    return Ended(False, told, last.get("points", 0), last.get("error", ""))


def _be_the_child(body: Callable[[Tell], None], crash_at: int, reading: int, writing: int) -> None:
    """Never returns: the child must not go on with the tests of its parent."""
    try:
        os.close(reading)
        signal.alarm(_SECONDS)
        torch.set_num_threads(
            1
        )  # the parent's other threads were not forked, and a parallel kernel would wait for them for ever
        tell = os.write

        def send(line: dict[str, Any]) -> None:
            tell(writing, json.dumps(line).encode() + b"\n")

        try:
            # A killed process leaves its writes to the system; power cuts are test_power_cut.py's.
            operations = Operations(pytest.MonkeyPatch(), crash_at, synced=False)
            body(lambda told: send({"told": told}))
            send({"points": operations.passed})
        except BaseException:
            send({"error": traceback.format_exc()[-3000:]})
    finally:
        os._exit(0)


def points_of(go: Go, folder: Path) -> int:
    """How many operations on the disk a run has that nobody disturbs. It runs here, so that the children find
    everything imported.
    """
    with pytest.MonkeyPatch.context() as patch:
        operations = Operations(patch)
        go(folder, lambda told: None)
    return operations.passed


def kill_and_resume(go: Go, check: Check, folder: Path, kills: Iterable[int]) -> int:
    """One run that is killed at these operations, each counted from where it was resumed last, and is then
    left to finish.

    `check` looks at what is there after each death and at the end. Returns how often the run was killed; a
    number beyond its end kills nothing.
    """
    told: list[Any] = []
    deaths = 0
    for crash_at in [*kills, 0]:
        ended = in_a_child(lambda tell: go(folder, tell), crash_at)
        told += ended.told
        assert not ended.error, f"after {deaths} deaths, killed at {list(kills)}:\n{ended.error}"
        deaths += ended.killed
        check(folder, told, not ended.killed)
        if not ended.killed:
            break
    return deaths
