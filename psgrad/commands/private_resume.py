"""Whether a private run may continue, and from where: only with the data, the model and the code that it
began with.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from psgrad.commands.private_setup import PrivateSetup
from psgrad.commands.private_statement import software
from psgrad.engine.privacy.snapshot import Snapshot, tensors_of
from psgrad.errors import CheckpointError, ConfigError
from psgrad.run.identity import WEIGHTS, lines_of
from psgrad.run.ledger import Ledger
from psgrad.run.ledger_lines import LedgerContent, require_same_run
from psgrad.run.private_runs import PrivateRunFolder


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
    data = setup.run.config.data
    tensors, restored = setup.run.identity.tensors, tensors_of(setup.run.model)
    named = {} if data.class_names is None else {"class_names": data.class_names}
    return {
        "run": run,
        "attributes": {name: digest for name, digest in tensors.items() if name not in restored},
        "data": setup.run.samples.content(),
        "columns": data.model_dump(mode="json", include={"inputs", "target", "id"}) | named,
        **setup.run.hashes(),
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
