"""A private run by several ranks: what they require of each other before the first step, how rank 0 leads,
and the whole part of the others. See psgrad/engine/privacy/rank_steps.py.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from psgrad.commands.private_resume import private_hashes
from psgrad.commands.private_setup import PrivateSetup, set_up_privately
from psgrad.commands.private_statement import ledger_header, software
from psgrad.commands.run_manifest import facts_of_all
from psgrad.config import Config
from psgrad.engine.execution.ranks import Arrays, Processes
from psgrad.engine.execution.stored import as_stored
from psgrad.engine.privacy.rank_steps import FollowingRank, LeadingRank
from psgrad.engine.privacy.snapshot import tensors_of
from psgrad.errors import DistributedError
from psgrad.run import PrivateRunFolder
from psgrad.run.private_runs import WARNING
from psgrad.run.progress import without_interrupts
from psgrad.run.results import Progress, Say

_LOADED, _AGREED = "loaded", "agreed"  # where ranks meet


def agree(setup: PrivateSetup, hashes: Mapping[str, Any], processes: Processes) -> list[str]:
    """Require that all ranks have loaded the same.

    hashes: `private_hashes` of this rank. Returns the hosts of the ranks, on rank 0. Raises DistributedError.
    """
    if processes.size == 1:
        return [socket.gethostname()]
    processes.meet(_LOADED)
    digests = _digests(setup, hashes)
    message = {name: torch.frombuffer(bytearray(each), dtype=torch.uint8) for name, each in digests.items()}
    of_first = {name: bytes(value.tolist()) for name, value in processes.broadcast(_AGREED, message).items()}
    others = [name for name, each in digests.items() if of_first[name] != each]
    if others:
        raise DistributedError(
            f"rank {processes.rank} on {socket.gethostname()} has loaded another"
            f" {' and another '.join(others)} than rank 0",
            expected="the same config, files, code and versions in all processes; no step was taken",
            cause="machines with copies of their own, or a file that was changed in between",
            next_step="give all machines the same files, and run again",
        )
    return processes.texts(_AGREED, socket.gethostname())


def _digests(setup: PrivateSetup, hashes: Mapping[str, Any]) -> dict[str, bytes]:
    """In words -> the SHA-256 of what must be the same on all ranks. Not of the weights: rank 0 sends its."""
    data = ("data", "columns")
    parts = {
        "dataset": [hashes[name] for name in data],
        "model, code or package": {
            name: value for name, value in hashes.items() if name not in (*data, "run", "weights")
        },
        "config": ledger_header(setup, 0.0),
        "version of psgrad or torch": software(),
    }
    return {
        name: hashlib.sha256(json.dumps(part, sort_keys=True, default=str).encode()).digest()
        for name, part in parts.items()
    }


@contextmanager
def leading(setup: PrivateSetup, processes: Processes) -> Iterator[LeadingRank | None]:
    """Rank 0 of several, which lets the others end when the block ends, also by Ctrl-C; None for a process
    alone.

    After any other error the group reports it to the ranks.
    """
    if processes.size == 1:
        yield None
        return
    trained = {name: as_stored(parameter) for name, parameter in setup.parameters.items()}
    lead = LeadingRank(processes, setup.records, trained, setup.source, lambda: tensors_of(setup.run.model))
    try:
        yield lead
    except KeyboardInterrupt:
        lead.end()
        raise
    lead.end()


def facts_of(lead: LeadingRank | None, hosts: list[str], processes: Processes) -> dict[str, Any] | None:
    """Facts about the ranks for the manifest. They are NOT PRIVATE, because the sizes of shares are not."""
    if lead is None:
        return None
    each = [
        {"rank": rank, "host": host, "records": work.records, "seconds": work.seconds}
        for rank, (host, work) in enumerate(zip(hosts, lead.work, strict=True))
    ]
    return facts_of_all(processes, each, [work.seconds for work in lead.work])


def follow(
    config: Config,
    output: Path,
    processes: Processes,
    progress: Say,
    before: Callable[[PrivateSetup], Any] = lambda _: None,
) -> tuple[PrivateSetup, Any]:
    """The steps of a run on a rank that does not lead, until rank 0 ends. Returns (the setup, what `before`
    found, which is called before the first step).

    output: the run folder. progress: called with the number of each step alone, which is public. Messages
    about a rank's records are not public, and are written to private/.
    """
    messages = _Messages(PrivateRunFolder(output), processes.rank)
    setup = set_up_privately(config, messages, processes)
    agree(setup, private_hashes(setup, ""), processes)
    found = before(setup)

    def begin(tensors: Arrays) -> None:
        _copy(tensors, tensors_of(setup.run.model))

    def take(weights: Arrays) -> None:
        _copy(weights, {name: as_stored(parameter) for name, parameter in setup.parameters.items()})

    def told(step: int) -> None:
        if not messages.begun:
            about = (
                f"rank {processes.rank} of {processes.size} on {socket.gethostname()}, process {os.getpid()}"
            )
            progress(Progress(0, 0, "steps", about))
        progress(Progress(0, 0, "steps", f"step {step + 1}"))
        messages.begin()

    follower = FollowingRank(processes, setup.clipping, setup.source, begin, take, told)
    with without_interrupts():  # rank 0 decides when to end: else a step would lose its share
        follower.serve()
    return setup, found


def _copy(values: Arrays, into: Mapping[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, tensor in into.items():
            tensor.copy_(values[name])


class _Messages:
    """The messages of a rank's computation, in private/NOT_PRIVATE_rank-K.log of the run folder, once there
    is one.
    """

    def __init__(self, folder: PrivateRunFolder, rank: int) -> None:
        self._folder, self._name, self.begun = folder, f"rank-{rank}.log", False
        self._lines: list[str] = []

    def __call__(self, message: str) -> None:
        self._lines.append(message)
        self._write()

    def begin(self) -> None:
        """The run folder is there from now on, if this machine sees it at all."""
        if not self.begun:
            self.begun = True
            self._write()

    def _write(self) -> None:
        if self.begun and self._lines and self._folder.path.is_dir():
            text = "\n".join([WARNING, *self._lines, ""])
            self._folder.write_private_bytes(self._name, text.encode())
