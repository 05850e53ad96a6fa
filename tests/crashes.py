"""Runs that are killed: at every durable operation of psgrad.run in turn, and resumed until they finish.

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

import torch

from psgrad.run import durable_files

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
        points: how many durable operations it did; of one that finished.
        error: the traceback of one that failed.
    """

    killed: bool
    told: list[Any]
    points: int = 0
    error: str = ""


def in_a_child(body: Callable[[Tell], None], crash_at: int = 0) -> Ended:
    """Run the body in a forked child that kills itself at durable operation number `crash_at`; 0 lets it
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
        os.fsync = lambda descriptor: (
            None
        )  # a killed process leaves its writes to the system; power cuts are test_power_cut.py's

        def send(line: dict[str, Any]) -> None:
            os.write(writing, json.dumps(line).encode() + b"\n")

        try:
            durable_files.crash_at(crash_at)
            body(lambda told: send({"told": told}))
            send({"points": durable_files.crash_points_passed()})
        except BaseException:
            send({"error": traceback.format_exc()[-3000:]})
    finally:
        os._exit(0)


def points_of(go: Go, folder: Path) -> int:
    """How many durable operations a run has that nobody disturbs. It runs here, so that the children find
    everything imported.
    """
    durable_files.crash_at(0)
    go(folder, lambda told: None)
    return durable_files.crash_points_passed()


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
