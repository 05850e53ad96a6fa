"""The passes of `psgrad analyze` over the samples: measures are asked, finished rows kept, and a run goes on
where one ended.

What is known of rows without any measure: who they are, and how long.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import torch

from psgrad.engine.execution.streaming import Columns, Stream
from psgrad.engine.measures.measure import Arrays, Gathered, Measure, OwnPass, Setting
from psgrad.engine.measures.passes import SecondPass
from psgrad.inputs.drawn import DrawnSamples
from psgrad.inputs.reader import digest_of
from psgrad.results import Progress, Say
from psgrad.storage import RunFolder
from psgrad.storage.shards import Shards
from psgrad.workflows.measures import joined_columns
from psgrad.workflows.running import held
from psgrad.workflows.setup import Setup

# Finished rows are made durable this often: what a crash or a full disk can cost.
_ROWS_PER_SHARD = 4096
_SECONDS_PER_SHARD = 30.0

_FIRST, _SECOND = "samples", "samples-again"
_CHUNK_SIZE, _POSITIONS = "stream.chunk_size", "stream.positions"

ABOUT_COLUMNS = ("id", "index", "dataset_row", "fingerprint", "target")
About = Callable[[int, int], dict[str, Any]]
"""(start, stop) to what is known of these rows without the measures: some of ABOUT_COLUMNS -> values."""


@dataclass
class Measured:
    """What all passes said.

    table: a row a sample, with all columns of one number a sample. gathered: measure -> what it gathered.
    rows: every column of every measure, those of more than one number a sample among them.
    """

    table: pd.DataFrame
    gathered: dict[str, Gathered]
    rows: Arrays


class Passes:
    """The passes of one run.

    Args:
        setting: of the measures, which are prepared by now.
        stream: of the samples' gradients.
        measures: all of them, those that others need before them.
        about: see About.
        folder: where finished rows go.
        prefix: of the passes' names, where one run has the passes of two datasets.
    """

    def __init__(
        self,
        setting: Setting,
        stream: Stream,
        measures: Sequence[Measure],
        about: About,
        folder: RunFolder,
        say: Say,
        prefix: str = "",
    ) -> None:
        self.setting, self.stream, self.measures, self.about, self.folder, self.say = (
            setting,
            stream,
            measures,
            about,
            folder,
            say,
        )
        self.prefix = prefix

    def run(self) -> Measured:
        """All passes, and what the measures gathered."""
        count = len(self.setting)
        again = [measure for measure in self.measures if measure.looks_twice]
        second = SecondPass(again, self.stream)
        first = [*self.measures, second] if again else self.measures
        run = partial(self.stream.run, count, first, often=True)
        table, rows = self._take(_FIRST, first, lambda start: run(start=start), about=self.about)
        chunk_size = self.stream.chunk_size
        self.stream.fix_chunk_size(chunk_size)
        if again:
            for measure in again:
                measure.between()
            rows = joined_columns(rows, self._take(_SECOND, again, second.run)[1], "its second pass")
            self.stream.fix_chunk_size(chunk_size)
        for measure in self.measures:
            for own in measure.passes():
                rows = joined_columns(
                    rows, self._take(own.name, [], partial(self._own, own))[1], f"the pass {own.name}"
                )
        rows["ok"] = torch.isfinite(rows["loss"]) & torch.isfinite(rows["grad_norm"])
        gathered = {measure.name: measure.gather(rows) for measure in self.measures if measure.name}
        flat = {name: column for name, column in rows.items() if column.dim() == 1 and name != "ok"}
        for found in gathered.values():
            flat = joined_columns(flat, found.columns, "what it gathers")
        return Measured(
            table.assign(**{name: column.numpy() for name, column in flat.items()}), gathered, rows
        )

    def _own(self, own: OwnPass, start: int) -> Iterator[Columns]:
        return own.run(start, self.stream.rows_at_longest)

    def _take(
        self,
        name: str,
        measures: Sequence[Measure],
        run: Callable[[int], Iterator[Columns]],
        about: About = lambda start, stop: {
            "index": np.arange(start, stop)
        },  # a table without a column has no rows to count
    ) -> tuple[pd.DataFrame, Arrays]:
        """One pass, from where it was left: (what is known of its rows without the measures, the columns of
        all rows).
        """
        name = self.prefix + name
        shards, count = Shards(self.folder, name, counted=name == _FIRST), len(self.setting)
        kept = shards.read()
        parts = (
            [(kept.table, {key: torch.from_numpy(value) for key, value in kept.arrays.items()})]
            if kept.rows
            else []
        )
        if kept.rows:
            self._restore(measures, kept.state)
        waiting: list[tuple[pd.DataFrame, Arrays]] = []
        last = time.monotonic()

        def keep() -> None:
            if waiting:
                table = pd.concat([frame for frame, _ in waiting], ignore_index=True)
                arrays = {key: torch.cat([part[key] for _, part in waiting]) for key in waiting[0][1]}
                shards.append(
                    table, {key: value.numpy() for key, value in arrays.items()}, self._state(measures)
                )
                parts.append((table, arrays))
                waiting.clear()

        self.say(Progress(kept.rows, count, name))
        chunks = run(kept.rows) if kept.rows < count else iter(())
        try:
            while True:
                with held():  # Ctrl-C waits for the chunk to be done
                    columns = next(chunks, None)
                    if columns is not None:
                        waiting.append(_split(columns, about(columns.start, columns.stop)))
                if columns is None:
                    break
                self.say(Progress(columns.stop, count, name))
                if (
                    sum(len(table) for table, _ in waiting) >= _ROWS_PER_SHARD
                    or time.monotonic() - last > _SECONDS_PER_SHARD
                ):
                    keep()
                    last = time.monotonic()
        finally:
            keep()  # after an interrupt too: what is computed is not thrown away
        table = pd.concat([frame for frame, _ in parts], ignore_index=True)
        known = [column for column in ABOUT_COLUMNS if column in table]
        measured = [str(column) for column in table if column not in ABOUT_COLUMNS]
        rows: Arrays = {column: torch.from_numpy(table[column].to_numpy(copy=True)) for column in measured}
        rows |= {key: torch.cat([part[key] for _, part in parts]) for key in parts[0][1]}
        return table[known], rows

    def _state(self, measures: Sequence[Measure]) -> dict[str, np.ndarray[Any, Any]]:
        state: Arrays = {_CHUNK_SIZE: torch.tensor(self.stream.chunk_size)}
        if self.stream.positions is not None:
            state[_POSITIONS] = torch.tensor(self.stream.positions)
        for place, measure in enumerate(measures):
            state |= {f"{place}.{key}": value for key, value in measure.state().items()}
        return {key: value.cpu().numpy() for key, value in state.items()}

    def _restore(self, measures: Sequence[Measure], state: Mapping[str, np.ndarray[Any, Any]]) -> None:
        tokens, longest, by_factors = state[_POSITIONS].tolist() if _POSITIONS in state else (None, 0, 0)
        positions = None if tokens is None else (tokens, longest, by_factors)
        self.stream.fix_chunk_size(int(state[_CHUNK_SIZE]), positions)
        for place, measure in enumerate(measures):
            own = {
                key.partition(".")[2]: torch.from_numpy(value)
                for key, value in state.items()
                if key.startswith(f"{place}.")
            }
            if own:
                measure.restore(own)


def _split(columns: Columns, about: Mapping[str, Any]) -> tuple[pd.DataFrame, Arrays]:
    """The columns of one chunk: those of one number a sample as a frame, the others as they are."""
    flat = {name: column.numpy() for name, column in columns.values.items() if column.dim() == 1}
    return (
        pd.DataFrame({**about, **flat}, index=range(columns.start, columns.stop)),
        {name: column for name, column in columns.values.items() if column.dim() > 1},
    )


def about_rows(run: Setup) -> Callable[[int, int], dict[str, Any]]:
    """(start, stop) -> id, index, dataset_row of drawn rows, fingerprint, target where there is one, and
    length, the positions that count, where the loss has some.

    A sample without an id of its own is known by its content.
    """
    ids, reader = run.samples.ids, run.reader

    def about(start: int, stop: int) -> dict[str, Any]:
        rows = slice(start, stop)
        prints = (
            [digest_of(each) for each in ids[rows].tolist()]
            if reader.contents is None
            else reader.contents[rows]
        )
        targets = run.samples.agreed_targets if reader.targets is None else reader.targets
        target = {} if targets is None else {"target": targets[rows]}
        length = {} if reader.lengths is None else {"length": reader.lengths[rows]}
        place = {"index": np.arange(start, stop)}
        if run.samples.group_sizes is not None:
            place["rows"] = run.samples.group_sizes[rows]
        if isinstance(run.samples, DrawnSamples):
            place["dataset_row"] = run.samples.rows[rows]
        return {"id": ids[rows], **place, "fingerprint": prints, **target, **length}

    return about
