"""The tables of an analyze run: what its processes have stored of its passes, which rows and the columns of
all of them; and what no pass computes: the other columns of a row (id, number, fingerprint, target and
length), parameters, results of measures, inputs, and what the manifest says.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd
import torch

from psgrad.commands.measure_setup import frame_of
from psgrad.commands.setup import Setup
from psgrad.data.derived import DrawnSamples
from psgrad.data.previews import input_of
from psgrad.data.reader import digest_of
from psgrad.data.rows import Samples
from psgrad.engine.execution.chunk_measure import Columns
from psgrad.engine.execution.ranks import gaps
from psgrad.engine.execution.streaming import Stream
from psgrad.engine.measures.builtin.norms import GradientNorms
from psgrad.engine.measures.measure import Arrays, Gathered, Measure
from psgrad.errors import DataError
from psgrad.run import RunFolder
from psgrad.run.folders import SHARDS
from psgrad.run.results import (
    PARAMETER_COLUMNS,
    MeasureResult,
    TopSample,
    top_samples,
)
from psgrad.run.results.manifest import EngineFacts
from psgrad.run.shards import FinishedShards, Shard, Shards


@dataclass(frozen=True)
class StoredPass:
    """What all processes have stored of one pass.

    run: a hash of the run's identity. count: how many rows the pass is over.
    """

    folder: RunFolder
    name: str
    run: str
    count: int

    def parts(self) -> list[str]:
        """The names of the processes, or parts, that have stored something."""
        return Shards.parts(self.folder, self.name)

    def of_part(self, part: str, counted: bool = False) -> Shards:
        """The shards of one process. counted: see `Shards`."""
        return Shards(self.folder, self.name, self.run, part, counted=counted)

    def finished(self) -> list[FinishedShards]:
        """What each process has stored."""
        return [self.of_part(part).read() for part in self.parts()]

    def missing(self) -> list[range]:
        """The rows that no process has finished."""
        return gaps(self.count, [rows for kept in self.finished() for rows in kept.ranges])

    def shards(self) -> list[Shard]:
        """All shards, in the order of their rows. Raises DataError for rows that are in two, or in none."""
        found = sorted(
            (shard for kept in self.finished() for shard in kept.shards), key=lambda each: each.first
        )
        for one, other in pairwise(found):
            if other.first < one.rows.stop:
                raise DataError(
                    f"the rows {other.first:,} to {min(one.rows.stop, other.rows.stop) - 1:,} of the pass"
                    f" {self.name} are there twice; expected each row in one part",
                    hint=(
                        "parts of two divisions of the dataset ran at the same time, such as 1/2 and"
                        f" 1/3; remove the parts of one of them from {self.folder.path / SHARDS}"
                    ),
                )
        for rows in gaps(self.count, [each.rows for each in found]):
            raise DataError(
                f"the rows {rows.start:,} to {rows.stop - 1:,} of the pass {self.name} are missing;"
                " expected all rows, as the pass has come to its end",
                hint=(
                    "files that were removed while the run wrote others, or a fault of psgrad; run it"
                    " again with --resume: what is there is kept"
                ),
            )
        return found

    def columns(self) -> tuple[pd.DataFrame, Arrays]:
        """(what is known of the rows without the measures, the columns of all rows)."""
        shards = self.shards()
        table = pd.concat([shard.table for shard in shards], ignore_index=True)
        known = [column for column in ABOUT_COLUMNS if column in table]
        measured = [str(column) for column in table if column not in ABOUT_COLUMNS]
        rows: Arrays = {column: torch.from_numpy(table[column].to_numpy(copy=True)) for column in measured}
        rows |= {
            key: torch.from_numpy(np.concatenate([shard.arrays[key] for shard in shards]))
            for key in shards[0].arrays
        }
        return table[known], rows


def split_columns(columns: Columns, about: Mapping[str, Any]) -> tuple[pd.DataFrame, Arrays]:
    """The columns of one chunk: those of one number a sample as a frame, the others as they are."""
    flat = {name: column.numpy() for name, column in columns.values.items() if column.dim() == 1}
    return (
        pd.DataFrame({**about, **flat}, index=range(columns.start, columns.stop)),
        {name: column for name, column in columns.values.items() if column.dim() > 1},
    )


ABOUT_COLUMNS = ("id", "index", "dataset_row", "fingerprint", "target")
About = Callable[[int, int], dict[str, Any]]
"""(start, stop) to what is known of these rows without the measures: some of ABOUT_COLUMNS -> values."""
Content = Callable[[Sequence[int]], str]


def content_of_made(samples: Samples) -> Content | None:
    """A hash of some rows, where code makes them; None of rows in files."""
    return samples.content_of if samples.sources else None


def about_rows(setup: Setup) -> Callable[[int, int], dict[str, Any]]:
    """(start, stop) -> id, index, dataset_row of drawn rows, fingerprint, target where there is one, and
    length, the positions that count, where the loss has some.

    A sample without an id of its own is known by its content.
    """
    ids, reader = setup.samples.ids, setup.reader

    def about(start: int, stop: int) -> dict[str, Any]:
        rows = slice(start, stop)
        prints = (
            [digest_of(each) for each in ids[rows].tolist()]
            if reader.contents is None
            else reader.contents[rows]
        )
        target = {} if reader.targets is None else {"target": reader.targets[rows]}
        length = {} if reader.lengths is None else {"length": reader.lengths[rows]}
        place = {"index": np.arange(start, stop)}
        if isinstance(setup.samples, DrawnSamples):
            place["dataset_row"] = setup.samples.rows[rows]
        return {"id": ids[rows], **place, "fingerprint": prints, **target, **length}

    return about


def engine_facts(before: EngineFacts, stream: Stream, norms: GradientNorms, processes: int) -> EngineFacts:
    """Facts about the engine for manifest.json, after the passes. processes: how many shared the rows, or how
    many parts.
    """
    return replace(
        before,
        processes=processes if processes > 1 else None,
        chunk_size=stream.chunk_size,
        out_of_memory_retries=stream.retries,
        **stream.counts.facts(),
        materialised=norms.unfactored,
    )


def result_of(measure: Measure, gathered: Gathered, unit: str | None) -> MeasureResult:
    """What a measure gathered, without torch. unit: of the loss; None where it is not known."""
    unit = unit or "loss"
    tables = {name: frame_of(table) for name, table in gathered.tables.items()}
    arrays = {name: array.cpu().numpy() for name, array in gathered.arrays.items()}
    return MeasureResult(
        measure.name,
        measure.title or measure.name,
        measure.formula,
        measure.unit.replace("{loss}", unit),
        measure.source,
        {column: meaning.replace("{loss}", unit) for column, meaning in measure.meanings.items()},
        dict(gathered.numbers),
        tables,
        arrays,
    )


def parameter_table(norms: GradientNorms, params: dict[str, torch.Tensor]) -> pd.DataFrame:
    """One row for each parameter: the distribution of the samples' gradient norms in it, and its share of the
    mean squared norm.
    """
    found, names = norms.distributions.found(), norms.names
    total = found.mean_square.sum()
    return pd.DataFrame(
        {
            "parameter": names,
            "module": [name.rpartition(".")[0] for name in names],
            "shape": ["x".join(map(str, params[name].shape)) or "scalar" for name in names],
            "numel": [params[name].numel() for name in names],
            "mean_norm": found.mean,
            "std_norm": found.std,
            "min_norm": found.minimum,
            "q05": found.quantile(0.05),
            "median": found.quantile(0.5),
            "q95": found.quantile(0.95),
            "max_norm": found.maximum,
            "share": found.mean_square / (total or np.nan),
            "computed_as": [norms.computed_as[name] for name in names],
        },
        columns=list(PARAMETER_COLUMNS),
    )


def top_inputs(
    samples: Samples, frame: pd.DataFrame, count: int, measures: Mapping[str, MeasureResult]
) -> list[TopSample]:
    """The inputs of the first ranks, and of what measures kept maps of, as far as a person can look
    at them.
    """
    mapped = [
        row
        for measure in measures.values()
        if "rows" in measure.arrays
        for row in measure.arrays["rows"].tolist()
    ]
    rows = dict.fromkeys([*map(int, top_samples(frame, count)["index"]), *map(int, mapped)])
    found = [input_of(samples, row) for row in rows]
    return (
        found
        if any(sample.image is not None or sample.text is not None or sample.values for sample in found)
        else []
    )
