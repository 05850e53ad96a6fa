"""A private run by several ranks: what they require of each other before the first step, how rank 0 leads,
and the whole part of the others. See psgrad/engine/privacy/rank_steps.py.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from psgrad.commands.private_resume import private_hashes
from psgrad.commands.private_setup import PrivateSetup, set_up_privately
from psgrad.commands.private_statement import ledger_header, software
from psgrad.config import Config
from psgrad.engine.execution.ranks import Processes
from psgrad.engine.execution.stored import as_stored
from psgrad.engine.privacy.rank_steps import RankSteps
from psgrad.engine.privacy.snapshot import tensors_of
from psgrad.errors import DistributedError
from psgrad.run.identity import digest
from psgrad.run.progress import without_interrupts
from psgrad.run.results import Progress, ShowProgress


def agree(setup: PrivateSetup, hashes: Mapping[str, Any], processes: Processes) -> None:
    """Require that all ranks have loaded the same, but for the weights, which rank 0 sends.

    hashes: `private_hashes` of this rank. Raises DistributedError.
    """
    if processes.size == 1:
        return
    code = {name: each for name, each in hashes.items() if name not in ("data", "columns", "run", "weights")}
    parts = {
        "dataset": {name: hashes[name] for name in ("data", "columns")},
        "model, code or package": code,
        "config": ledger_header(setup, 0.0),
        "version of psgrad or torch": software(),
    }
    own = {name: digest(part) for name, part in parts.items()}
    first = json.loads(processes.texts("agreed", json.dumps(own))[0])
    others = [name for name, each in own.items() if first[name] != each]
    if others:
        raise DistributedError(
            f"rank {processes.rank} on {socket.gethostname()} has loaded another"
            f" {' and another '.join(others)} than rank 0; no step was taken",
            hint="give all machines the same files, and run again",
        )
    processes.meet("agreed")  # no rank goes on before all have compared


@contextmanager
def leading(setup: PrivateSetup, processes: Processes) -> Iterator[RankSteps | PrivateSetup]:
    """What sums the records of a step: the setup of a process alone; else rank 0 of several, which lets the
    others end when the block ends, also by Ctrl-C. After any other error the group reports it to the ranks.
    """
    if processes.size == 1:
        yield setup
        return
    steps = _rank_steps(setup, processes)
    try:
        yield steps
    except KeyboardInterrupt:
        steps.end()
        raise
    steps.end()


def follow(config: Config, processes: Processes, progress: ShowProgress) -> None:
    """The steps of a run on a rank that does not lead, until rank 0 ends.

    progress: called with the number of each step alone, which is public.
    """
    setup = set_up_privately(config, processes=processes)
    agree(setup, private_hashes(setup, ""), processes)
    steps = _rank_steps(setup, processes)
    about = f"rank {processes.rank} of {processes.size} on {socket.gethostname()}, process {os.getpid()}"
    progress(Progress(0, 0, "steps", about))
    with without_interrupts():  # rank 0 decides when to end: else a step would lose its share
        steps.serve(setup.clipping, lambda step: progress(Progress(0, 0, "steps", f"step {step + 1}")))


def _rank_steps(setup: PrivateSetup, processes: Processes) -> RankSteps:
    trained = {name: as_stored(parameter) for name, parameter in setup.parameters.items()}
    return RankSteps(processes, trained, tensors_of(setup.run.model), setup.source)
