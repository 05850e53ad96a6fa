"""What a private run requires of a process that goes on with it, and of the ranks that share it: the data,
the model and the code that it began with. And how rank 0 of several leads, and the whole part of the others;
see psgrad/engine/privacy/rank_steps.py.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from psgrad.commands.private_setup import PrivateSetup, set_up_privately
from psgrad.commands.private_statement import ledger_header, software
from psgrad.commands.run_manifest import require_same_on_ranks
from psgrad.config import Config
from psgrad.engine.execution.ranks import Processes
from psgrad.engine.execution.stored import as_stored
from psgrad.engine.privacy.rank_steps import RankSteps
from psgrad.engine.privacy.snapshot import Snapshot, tensors_of
from psgrad.errors import CheckpointError, ConfigError
from psgrad.run.identity import WEIGHTS, digest, lines_of
from psgrad.run.ledger import Ledger
from psgrad.run.ledger_lines import LedgerContent, require_same_run
from psgrad.run.private_runs import PrivateRunFolder
from psgrad.run.progress import without_interrupts
from psgrad.run.results import Progress, ShowProgress


def require_known_form(before: LedgerContent) -> None:
    """Raises ConfigError for the ledger of an older psgrad, whose steps may be others than those of now."""
    dropped = before.header.keys() & {"schedule", "augmentation", "adaptive"}
    if "run" not in before.header or dropped or any("noise_grid" not in line for line in before.steps):
        raise ConfigError(
            f"the run of {before.path} was begun by an older psgrad",
            hint="begin a run of its own with another --output; the ledger says what this one spent",
        )


def private_hashes(setup: PrivateSetup, run: str) -> dict[str, Any]:
    """The values by which a run is recognised, its number first. It stays private: the data's hash tells
    whether a guess of all rows is right.
    """
    data = setup.config.data
    tensors, restored = setup.common.identity.tensors, tensors_of(setup.common.model)
    named = {} if data.class_names is None else {"class_names": data.class_names}
    return {
        "run": run,
        "attributes": {name: digest for name, digest in tensors.items() if name not in restored},
        "data": setup.common.samples.content(),
        "columns": data.model_dump(mode="json", include={"inputs", "target", "id"}) | named,
        **setup.common.hashes(),
    }


def require_same_data(folder: PrivateRunFolder, now: Mapping[str, Any]) -> dict[str, Any]:
    """The hashes that the run began with. Raises ConfigError where the data are others, or the private folder
    is another run's.
    """
    then: dict[str, Any] = folder.private_manifest().get("hashes") or {}
    if then.get("run") != now["run"]:
        raise ConfigError(
            f"the private folder in {folder.path} belongs to another run than the ledger",
            hint="put the whole folder of one run there",
        )
    if (then.get("data"), then.get("columns")) != (now["data"], now["columns"]):
        raise ConfigError(
            f"the dataset is not the one that the run in {folder.path} began with: its content, or a name in"
            " data (inputs, target, id, class_names), is another",
            hint="put the data back, or begin a run of its own with another --output",
        )
    return then


def require_same_code(folder: PrivateRunFolder, then: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raises ConfigError where code, the model's modules, or tensors of it that no checkpoint has are others.

    Not compared: what the checkpoint brings, parameters and buffers; and versions, which each line of the
    ledger has.
    """

    def lines(hashes: Mapping[str, Any]) -> dict[str, Any]:
        tensors = {f"the tensor {name}": digest for name, digest in hashes["attributes"].items()}
        every = tensors | lines_of(hashes)
        return {
            key: value for key, value in every.items() if key != WEIGHTS and not key.startswith("version of ")
        }

    was, found = lines(then), lines(now)
    expected = {key: found.get(key) for key in {**was, **found}}
    require_same_run(was, expected, f"the run in {folder.path}", show=False)


def weights_note(header: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """A sentence where the factory gives other weights than the run began with."""
    if header.get("weights_sha256") == now["weights"]:
        return []
    return [
        "the model comes with other weights than the run began with: all of them are replaced by those of the"
        " checkpoint, and what its factory reads besides is not known"
    ]


def last_snapshot(folder: PrivateRunFolder, before: LedgerContent) -> Snapshot | None:
    """The checkpoint of a run to be resumed; None where no step was taken that it could have seen."""
    try:
        return Snapshot.from_bytes(folder.checkpoint.read_bytes(), str(folder.checkpoint))
    except OSError as error:
        if isinstance(error, FileNotFoundError) and not before.steps:
            return None
        raise CheckpointError(
            f"{folder.checkpoint} can't be read: {error.strerror or error}; the ledger has"
            f" {len(before.steps)} steps",
            hint="put the checkpoint of this run back, or begin a run of its own with another --output",
        ) from error


def opened_ledger(
    folder: PrivateRunFolder,
    before: LedgerContent | None,
    header: dict[str, Any],
    snapshot: Snapshot | None,
    own: dict[str, Any],
) -> Ledger:
    """The ledger, new or to go on with. own: what this process's line says besides."""
    if before is None:
        return Ledger.create(folder.ledger, {**header, **own, "versions": software()})
    saved = None if snapshot is None else snapshot.metadata
    note = {**own, "checkpoint_step": 0 if saved is None else saved["step"], "versions": software()}
    mark = saved and {key: saved[key] for key in ("ledger_position", "ledger_sha256")}
    return Ledger.resume(folder.ledger, note, expected=header, mark=mark, seen=before)


# -- several ranks -------------------------------------------------------------------------------------------


def agree(setup: PrivateSetup, hashes: Mapping[str, Any], processes: Processes) -> None:
    """Require that all ranks have loaded the same, but for the weights, which rank 0 sends.

    hashes: `private_hashes` of this rank. Raises DistributedError.
    """
    code = {name: each for name, each in hashes.items() if name not in ("data", "columns", "run", "weights")}
    parts = {
        "dataset": {name: hashes[name] for name in ("data", "columns")},
        "model, code or package": code,
        "config": ledger_header(setup, 0.0),
        "version of psgrad or torch": software(),
    }
    own = {name: digest(part) for name, part in parts.items()}
    require_same_on_ranks("private run", own, processes, show=False)
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
    return RankSteps(processes, trained, tensors_of(setup.common.model), setup.source)
