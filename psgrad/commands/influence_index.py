"""`psgrad influence index`: the training gradients on the disk, built once, to be asked many times.

With `--update` the index follows its data: new rows are computed, and rows that are gone are left out of all
answers.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from psgrad.commands.checkpoints import setup_at, sha256_at
from psgrad.commands.completion import completed_for_influence
from psgrad.commands.influence_inputs import first_setup
from psgrad.commands.setup import Setup
from psgrad.config import Config, IndexConfig
from psgrad.data.reader import CheckedReader
from psgrad.engine.execution.examples import Examples
from psgrad.engine.execution.ranks import OneProcess, Processes, RowPart
from psgrad.engine.influence.index.build import build_index, write_sums
from psgrad.engine.influence.index.index_rows import BLOCK
from psgrad.engine.influence.index.stored_index import IndexSpec, StoredRows, describe
from psgrad.engine.influence.method import RowNorms
from psgrad.errors import ConfigError, DistributedError, OutputError
from psgrad.quality.references import CLASSES
from psgrad.run.gradient_index import GradientIndex
from psgrad.run.index_files import as_stored
from psgrad.run.progress import LOADING, Clock, read_ahead
from psgrad.run.results import Progress, ShowProgress
from psgrad.run.results.influence import IndexResult
from psgrad.run.run import Run
from psgrad.user_code import with_code_beside


@with_code_beside
def influence_index(
    config: Config,
    *,
    resume: bool = False,
    overwrite: bool = False,
    update: bool = False,
    progress: ShowProgress = lambda _: None,
    processes: Processes | None = None,
    part: tuple[int, int] | None = None,
) -> IndexResult | None:
    """Build the index that a config describes, go on with one that was interrupted, or let a finished one
    follow its data: the whole of `psgrad influence index`.

    processes: those that share the shards; None for this one alone. part: (which, how many) part of a job
    array this is; `finish_index` ends the index of all parts. Returns None for a part, and on all ranks but
    the first.

    Raises PsgradError for everything that can be wrong with the config, the model, the data or the disk.
    Shards that are finished by then stay, and `resume` goes on behind them.
    """
    wanted = require_index(config)
    config = completed_for_influence(config, lambda _: None, replaces_index=overwrite)
    processes = OneProcess() if processes is None else processes
    run = Run(wanted.path, processes, progress)
    progress(LOADING)
    with run.clock("load"):
        setup = first_setup(config, processes).with_reader(with_digests=True)
        read_ahead(setup.samples, len(setup.samples), progress)
        description = described_index(setup)
    if part is not None:
        store = GradientIndex.joined(wanted.path, description)
        processes = RowPart.of(*part, len(store.shards), 1)
    else:
        if processes.leads and update:
            store = updated(GradientIndex.open(wanted.path), description, setup, run.say)
        elif processes.leads and resume:
            store = GradientIndex.resume(wanted.path, description)
        elif processes.leads:
            store = GradientIndex.create(wanted.path, description, overwrite)
        processes.agreed("index.begun", list)
        if not processes.leads:  # the first rank has made the folder by then
            store = _made_by_first(wanted.path, description, processes)

    def load(number: int) -> Examples:
        there = setup_at(setup, number)
        return Examples(there.objective, setup.reader, there.stream_options(run.say))

    with run.clock("gradients"):
        build_index(
            store,
            load,
            say=run.say,
            progress=lambda done, of: progress(Progress(done, of, "index", unit="training example")),
            processes=processes,
            digests=lambda start, stop: digests_read(setup.reader, start, stop),
        )
    return result_of(store, run.clock) if processes.leads else None


def _made_by_first(path: Path, description: dict[str, Any], processes: Processes) -> GradientIndex:
    """The index that the first rank has begun. Raises DistributedError where this one does not see it."""
    store = GradientIndex.begun(path)
    if store is None:
        raise DistributedError(
            f"rank {processes.rank} does not see the index {path} that rank 0 has made",
            hint="choose an influence.index.path that all machines share; or run --part K/N on each machine",
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
            f"the index {path} lacks {len(missing):,} shards, the first one that of the rows"
            f" {rows.start:,} to {rows.stop - 1:,} at checkpoint {number}",
            hint="run that part again: finished shards are kept",
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
            "the config has no influence.index", hint="set influence.index: {path: runs/my-index}"
        )
    return config.influence.index


def open_index(setup: Setup) -> GradientIndex:
    """The finished index of a run. Raises OutputError where it is not there, half built, or of another
    model, data or settings.
    """
    store = GradientIndex.open(require_index(setup.config).path)
    store.require(described_index(setup))
    rows = sorted({place * len(setup.samples) // _COMPARED for place in range(_COMPARED)})
    require_losses(store, setup, rows, StoredRows(store, 0).losses_and_square_norms()[0][rows])
    return store


def described_index(setup: Setup) -> dict[str, Any]:
    """The description of a run's index. Two indexes with the same description hold the same rows."""
    config = setup.config
    wanted = require_index(config)
    spec = IndexSpec(**wanted.model_dump(exclude={"path"}))
    count = len(config.influence.checkpoints or [None])
    hashes = setup.hashes()
    model = {
        "frozen dtype" if key == "dtype" else key: value
        for key, value in config.model.model_dump(mode="json").items()
        if key != "checkpoint"
    }
    fingerprint: dict[str, Any] = {
        "data": setup.samples.content(),
        "columns": {
            "inputs": config.data.inputs,
            "target": config.data.target,
            **({} if config.data.weight is None else {"weight": config.data.weight}),
        },
        # The first checkpoint by its loaded weights; the others by their files, which the same code loads in
        # the same manner.
        "checkpoints": [hashes["weights"], *(sha256_at(config, number) for number in range(1, count))],
        **{key: hashes[key] for key in ("modules", "code", "packages")},
        **model,
        "loss": config.loss.model_dump(mode="json"),
        CLASSES: config.data.class_names,
        "dtype": config.engine.dtype,
    }
    training = Examples(setup.objective, setup.reader)
    return describe(spec, training, fingerprint, count)


def stored_row_norms(store: GradientIndex) -> list[RowNorms]:
    """The losses and norms that an index holds of each training example, checkpoint by checkpoint."""
    found = []
    for number in range(store.description["checkpoints"]):
        losses, squares = StoredRows(store, number).losses_and_square_norms()
        found.append(RowNorms(squares.isfinite(), losses.numpy(), squares.sqrt().numpy(), {}))
    return found


_READ = 64  # rows at once, whose digests are taken
_COMPARED = 8  # rows whose loss is compared with an index


def digests_read(reader: CheckedReader, start: int, stop: int) -> np.ndarray:
    """uint8 [b, 16], the digests of rows that have been read."""
    assert reader.contents is not None, "a reader that notes digests"
    found = "".join(reader.contents[start:stop])
    return np.frombuffer(bytes.fromhex(found), np.uint8).reshape(-1, 16)


def updated(
    current: GradientIndex, description: dict[str, Any], setup: Setup, say: Callable[[str], None]
) -> GradientIndex:
    """A finished index as it follows its data: rows that are no more there are left out, and new ones are to
    be written. The index itself where nothing has changed.

    All rows are read, and recognised by their digests; of some of those that are kept the loss is computed
    again. Raises OutputError for an index of another model or of other settings, and one whose losses are
    others.
    """
    same = {name: value for name, value in description.items() if name != "rows"}
    data = current.description["fingerprint"]["data"]
    current.require(same | {"fingerprint": description["fingerprint"] | {"data": data}})
    n = len(setup.samples)
    for start in range(0, n, _READ):
        setup.reader.take(range(start, min(start + _READ, n)))
    stored = np.concatenate([block["digest"] for _, block in current.blocks(0, BLOCK, ("digest",))])
    kept = kept_rows(stored, digests_read(setup.reader, 0, n))
    if len(kept):
        rows = np.arange(0, len(kept), -(-len(kept) // _COMPARED))
        losses = StoredRows(current, 0).losses_and_square_norms()[0][kept[rows]]
        require_losses(current, setup, rows.tolist(), losses)
    added, deleted = n - len(kept), len(stored) - len(kept)
    say(f"{len(kept):,} rows are kept, {added:,} are added, and {deleted:,} are deleted")
    if not added and not deleted and current.description == as_stored(description):
        return current
    return current.updated(description, kept)


def kept_rows(stored: np.ndarray, now: np.ndarray) -> np.ndarray:
    """[k], rising: which stored rows are the first k rows of the data, by the digests of both, [n, 16] and
    [m, 16]. From the first row on that is not stored, or stood before another one, all are new.
    """
    known, kept, place = [digest.tobytes() for digest in stored], list[int](), 0
    for digest in now:
        try:
            place = known.index(digest.tobytes(), place) + 1
        except ValueError:
            break
        kept.append(place - 1)
    return np.array(kept, np.int64)


def require_losses(index: GradientIndex, setup: Setup, rows: list[int], known: torch.Tensor) -> None:
    """Raises OutputError where the losses of some rows are not those that an index knows, float64.

    A description does not see what code reads from elsewhere while it runs.
    """
    found = setup.stream(lambda _: None).gradients(rows).losses.double().cpu()
    rounding = torch.finfo(setup.objective.autocast or setup.dtype).eps ** 0.5
    different = known.isfinite() & ~torch.isclose(found, known, rtol=rounding, atol=rounding)
    if bool(different.any()):
        place = int(different.nonzero()[0])
        raise OutputError(
            f"the index {index.path} is of something else: it has a loss of {float(known[place]):.4g} for"
            f" row {rows[place]}, and the model has {float(found[place]):.4g} now",
            hint="put back the files that the model or the loss reads, or build it again with --overwrite",
        )
