"""What the processes of an analyze run have stored of its passes: which rows, and the columns of
all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd
import torch

from psgrad.engine.execution.chunk_measure import Columns
from psgrad.engine.execution.ranks import gaps, overlap
from psgrad.engine.measures.measure import Arrays
from psgrad.errors import DataError
from psgrad.storage import RunFolder
from psgrad.storage.folders import SHARDS
from psgrad.storage.shards import FinishedShards, Shard, Shards
from psgrad.workflows.analyze_tables import ABOUT_COLUMNS


@dataclass(frozen=True)
class StoredPass:
    """What all processes have stored of one pass.

    name: of the pass, as messages say it. prefix: before it in the names of files. run: a hash of the run's
    identity. count: how many rows the pass is over.
    """

    folder: RunFolder
    name: str
    prefix: str
    run: str
    count: int

    def parts(self) -> list[str]:
        """The names of the processes, or parts, that have stored something."""
        return Shards.parts(self.folder, self.prefix + self.name)

    def of_part(self, part: str, counted: bool = False) -> Shards:
        """The shards of one process. counted: see `Shards`."""
        return Shards(self.folder, self.prefix + self.name, self.run, part, counted=counted)

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
                    f" {self.name} are there twice",
                    expected="each row in one part",
                    cause="parts of two divisions of the dataset ran at the same time, such as 1/2 and 1/3",
                    next_step=f"remove the parts of one of them from {self.folder.path / SHARDS}",
                )
        for rows in gaps(self.count, [each.rows for each in found]):
            raise DataError(
                f"the rows {rows.start:,} to {rows.stop - 1:,} of the pass {self.name} are missing",
                expected="all rows, as the pass has come to its end",
                cause="files that were removed while the run wrote others, or a fault of psgrad",
                next_step="run it again with --resume: what is there is kept",
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


def overlaps(rows: range, cuts: Sequence[range]) -> Iterator[range]:
    """The parts of these rows in each of the ranges that cut them."""
    for each in sorted(cuts, key=lambda each: each.start):
        if part := overlap(rows, each):
            yield part
