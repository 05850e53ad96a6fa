"""`psgrad influence index`: the training gradients on the disk, built once, to be asked many times."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from psgrad.config import Config, IndexConfig
from psgrad.engine.execution.examples import Examples
from psgrad.engine.execution.ranks import OneProcess, Processes, RowPart
from psgrad.engine.influence.index.build import build_index, write_sums
from psgrad.engine.influence.index.stored_index import IndexSpec, StoredRows, describe
from psgrad.engine.influence.method import Screened
from psgrad.errors import ConfigError, DistributedError, OutputError
from psgrad.results import IndexResult, Progress, Say
from psgrad.storage.gradient_index import GradientIndex
from psgrad.user_code import with_code_beside
from psgrad.workflows.identity import hashes_of
from psgrad.workflows.index_update import (
    begin_update,
    compared_rows,
    digests_read,
    require_losses,
    with_digests,
)
from psgrad.workflows.influence_queries import chosen_rows
from psgrad.workflows.influence_setup import first_run, later_run, sha256_at
from psgrad.workflows.running import LOADING, Clock, read_ahead
from psgrad.workflows.setup import Setup


@with_code_beside
def influence_index(
    config: Config,
    *,
    resume: bool = False,
    overwrite: bool = False,
    update: bool = False,
    progress: Say = lambda _: None,
    processes: Processes | None = None,
    part: tuple[int, int] | None = None,
) -> IndexResult | None:
    """Build the index that a config describes, go on with one that was interrupted, or let a finished one
    follow its data: the whole of `psgrad influence index`.

    processes: those that share the shards; None for this one alone. part: (which, how many) part of a job
    array this is; `finish_index` ends the index of all parts. Returns None for a part, and on all ranks but
    the first.

    Raises PsgradError for everything that can be wrong with the config, the model, the data or the disk.
    Shards that are finished by then stay, and `resume` goes on behind them, or `update`: the index answers as
    before until an update is finished.
    """
    wanted = require_index(config)
    processes = OneProcess() if processes is None else processes
    clock = Clock()
    progress(LOADING)

    def say(message: str) -> None:
        progress(Progress(0, 0, "index", message))

    with clock("load"):
        run = with_digests(first_run(config, processes))
        read_ahead(run.samples, len(run.samples), progress)
        description = described_index(config, run)
    if part is not None:
        store = GradientIndex.join(wanted.path, description)
        processes = RowPart.of(*part, len(store.shards), 1)
    elif not processes.leads:
        begun = processes.agreed("index.begun", list)  # the first rank has made the folder by then
        store = _made_by_first(wanted.path, description, begun != [], processes)
    else:
        begun = []
        if update:
            current = GradientIndex.open(wanted.path)
            store = begin_update(current, description, run, say)
            begun = [] if store is current else [store.layout.updates]
        elif resume:
            store = GradientIndex.resume(wanted.path, description)
        else:
            store = GradientIndex.create(wanted.path, description, overwrite)
        processes.agreed("index.begun", lambda: begun)
    new = np.flatnonzero(store.layout.places() >= store.new_rows.start)

    def load(number: int) -> Examples:
        there = run if number == 0 else later_run(run, config, number)
        read, numbers = chosen_rows(run.reader, new), torch.from_numpy(new)
        return Examples(there.objective, read, len(new), there.stream_options(say), numbers)

    with clock("gradients"):
        build_index(
            store,
            load,
            say=say,
            progress=lambda done, of: progress(Progress(done, of, "index", unit="training example")),
            processes=processes,
            digests=digests_read(run.reader, new),
        )
    if not processes.leads:
        return None
    if update:
        store.finish_update()
    return result_of(store, clock)


def _made_by_first(
    path: Path, description: dict[str, Any], update: bool, processes: Processes
) -> GradientIndex:
    """The index that the first rank has made, or the update that it has begun. Raises DistributedError where
    this one does not see it.
    """
    store = GradientIndex.begun(path, update)
    if store is None:
        raise DistributedError(
            f"rank {processes.rank} does not see the index {path} that rank 0 has made",
            expected="an index folder on storage that all machines share",
            next_step="choose such an influence.index.path; or run --part K/N on each machine",
        )
    store.require(description)
    return store


def finish_index(path: Path) -> IndexResult:
    """End the index whose parts have all been built. Raises OutputError where one is missing."""
    store, clock = GradientIndex.begun(path), Clock()
    assert store is not None, "an index"
    todo = store.unwritten()
    missing = [(number, shard) for number, shard in todo if shard is not None]
    if missing:
        number, shard = missing[0]
        rows = store.shards[shard]
        raise OutputError(
            f"the index {path} lacks {len(missing):,} shards, the first one that of the rows {rows.start:,}"
            f" to {rows.stop - 1:,} at checkpoint {number}",
            expected="all shards, each built by one part",
            cause="a part has not run, or has not come to its end",
            next_step="run that part again: finished shards are kept",
        )
    with clock("gradients"):
        write_sums(store, [number for number, _ in todo])
    return result_of(store, clock)


def result_of(store: GradientIndex, clock: Clock) -> IndexResult:
    size = sum(file.stat().st_size for file in store.path.rglob("*.safetensors"))
    facts = store.description
    return IndexResult(
        store.path,
        int(facts["rows"]),
        int(facts["columns"]),
        int(facts["checkpoints"]),
        size,
        clock.seconds,
    )


def require_index(config: Config) -> IndexConfig:
    """The index that a config describes. Raises ConfigError where there is none."""
    if config.influence.index is None:
        raise ConfigError(
            "the config has no influence.index",
            expected="where the index is to be, and what it holds: influence: {index: {path: runs/my-index}}",
        )
    return config.influence.index


def open_index(config: Config, run: Setup) -> GradientIndex:
    """The finished index of a config. Raises OutputError where it is not there, half built, or of another
    model, data or settings.
    """
    store = GradientIndex.open(require_index(config).path)
    expected = described_index(config, run)
    ours, theirs = expected["fingerprint"], store.description.get("fingerprint", {})
    for now, then in ((ours, theirs), (ours["loss"], theirs.get("loss", {}))):
        now |= dict.fromkeys(then.keys() - now.keys())  # what it was built with, and is at its default now
    store.require(expected)
    rows = compared_rows(len(run.samples))
    require_losses(store, run, rows, StoredRows(store, 0).losses_and_square_norms()[0][rows])
    return store


def described_index(config: Config, run: Setup) -> dict[str, Any]:
    """What the index of this config says of itself: two that say the same hold the same rows."""
    wanted = require_index(config)
    spec = IndexSpec(**wanted.model_dump(exclude={"path"}))
    count = len(config.influence.checkpoints or [None])
    hashes = hashes_of(run)
    model = {
        "frozen dtype" if key == "dtype" else key: value
        for key, value in config.model.decisive().items()
        if key != "checkpoint"
    }
    fingerprint: dict[str, Any] = {
        "data": run.samples.content(),
        "columns": {
            "inputs": config.data.inputs,
            "target": config.data.target,
            **({} if config.data.weight is None else {"weight": config.data.weight}),
        },
        # Of the first one what was loaded; of the others the files, which the same code loads in the same
        # manner.
        "checkpoints": [hashes["weights"], *(sha256_at(config, number) for number in range(1, count))],
        **{key: hashes[key] for key in ("modules", "code", "packages")},
        **model,
        "loss": config.loss.decisive(),
        "dtype": config.engine.dtype,
    }
    training = Examples(run.objective, run.reader, len(run.samples))
    return describe(spec, training, fingerprint, count)


def screened_rows(store: GradientIndex) -> list[Screened]:
    """What an index holds of each training example, checkpoint by checkpoint."""
    found = []
    for number in range(store.description["checkpoints"]):
        losses, squares = StoredRows(store, number).losses_and_square_norms()
        found.append(Screened(squares.isfinite(), losses.numpy(), squares.sqrt().numpy(), {}))
    return found
