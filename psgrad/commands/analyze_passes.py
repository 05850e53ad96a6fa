"""The passes of `psgrad analyze` over the samples: measures compute columns, finished rows are stored, and an
interrupted run continues.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import torch

from psgrad.commands.analyze_tables import About, StoredPass, about_rows, content_of_made, split_columns
from psgrad.commands.measure_setup import joined_columns
from psgrad.commands.setup import Setup
from psgrad.engine.execution.chunk_measure import Columns
from psgrad.engine.execution.ranks import Processes, in_chunks
from psgrad.engine.execution.streaming import Stream
from psgrad.engine.measures.measure import Arrays, Gathered, Measure, OwnPass, Setting
from psgrad.engine.measures.passes import second_pass
from psgrad.errors import DistributedError, MeasureError
from psgrad.run.progress import without_interrupts
from psgrad.run.results import Progress
from psgrad.run.run import Run
from psgrad.run.shards import FinishedShards, Shards

# Finished rows are made durable this often: what a crash or a full disk can cost.
_ROWS_PER_SHARD = 4096
_SECONDS_PER_SHARD = 30.0

_FIRST = "samples"
_CHUNK_FACTS = "stream.chunk"


@dataclass
class Measured:
    """The results of all passes.

    table: a row for each sample, with the columns of one number a sample. gathered: measure -> what it
    gathered. rows: all columns of all measures, also those of several numbers a sample.
    """

    table: pd.DataFrame
    gathered: dict[str, Gathered]
    rows: Arrays


class Passes:
    """The passes of a run over the samples. setting: of the measures, which are prepared by now; those that
    others need stand before them. All processes that share the run see its folder, which is there by then.
    """

    def __init__(
        self, setup: Setup, setting: Setting, measures: Sequence[Measure], run: Run[Processes]
    ) -> None:
        self.setting, self.measures, self._run = setting, measures, run
        self._about, self._content = about_rows(setup), content_of_made(setup.samples)

    @property
    def processes(self) -> Processes:
        return self._run.processes

    @property
    def stream(self) -> Stream:
        return self.setting.examples.stream

    def run(self) -> Measured | None:
        """All passes, and what the measures gathered; None for processes that do not lead. A part of a run
        leaves the second pass out as long as rows of other parts are missing.
        """
        again = [measure for measure in self.measures if measure.needs_second_pass]

        def run(rows: range) -> Iterator[Columns]:
            return self.stream.run(rows.stop, self.measures, start=rows.start, materialise=True)

        shards = self._shards(_FIRST, self.measures)
        self._agree_on_chunk_size(self.measures)
        names = [(_FIRST, "the first pass")]
        mine = self.processes.my_rows(_FIRST, in_chunks(self._missing(_FIRST), self.stream.chunk_size))
        self._require_same_rows(mine)
        self._run_pass(shards, mine, run, self.measures, self._about)
        if again and self._waits_for_parts(again):
            again = []
        else:
            self._merge(self.measures)
        self.stream.fix_chunk_size(self.stream.chunk_size)
        passes = [own for measure in self.measures for own in measure.passes()]
        if again:
            for measure in again:
                measure.between()
            passes.insert(0, second_pass(again, self.setting.examples))
        before = {key: value.clone() for key, value in self._state(again).items()}
        for own in passes:
            shards = self._shards(own.name)
            chunks = in_chunks(self._missing(own.name), self.stream.rows_at_longest)
            mine = self.processes.my_rows(own.name, chunks)
            self._run_pass(shards, mine, partial(self._run_own_pass, own, again, before))
            names.append((own.name, f"the pass {own.name}"))
        return self._gathered(names) if self.processes.leads else None

    def _run_own_pass(
        self, own: OwnPass, again: Sequence[Measure], before: Arrays, rows: range
    ) -> Iterator[Columns]:
        for number, columns in enumerate(own.run(rows, self.stream.rows_at_longest)):
            if not number:  # ahead of the chunk being stored
                self._require_unchanged(again, before)
            yield columns

    def _waits_for_parts(self, again: Sequence[Measure]) -> bool:
        """Whether the second pass has to wait for rows of other parts. Says so."""
        if self.processes.leads or self.processes.size > 1:
            return False
        missing = self._stored(_FIRST).missing()
        if missing:
            names = ", ".join(measure.name for measure in again)
            message = (
                f"{names}: a second pass compares each sample with all, and {sum(map(len, missing)):,}"
                " samples of other parts are missing; run this part again when all parts have come to their"
                " end"
            )
            self._run.progress(Progress(0, 0, _FIRST, message))
        return bool(missing)

    def _gathered(self, passes: Sequence[tuple[str, str]]) -> Measured:
        """What the measures make of the columns of all passes (name, in words)."""
        (first, _), *others = passes
        table, rows = self._stored(first).columns()
        for name, where in others:
            rows = joined_columns(rows, self._stored(name).columns()[1], where)
        rows["ok"] = torch.isfinite(rows["loss"]) & torch.isfinite(rows["grad_norm"])
        gathered = {measure.name: measure.gather(rows) for measure in self.measures if measure.name}
        flat = {name: column for name, column in rows.items() if column.dim() == 1 and name != "ok"}
        for found in gathered.values():
            flat = joined_columns(flat, found.columns, "what it gathers")
        return Measured(
            table.assign(**{name: column.numpy() for name, column in flat.items()}), gathered, rows
        )

    # -- one pass --------------------------------------------------------------------------------------------

    def _stored(self, name: str) -> StoredPass:
        """What all processes have stored of a pass."""
        folder = self._run.folder
        return StoredPass(folder, name, str(folder.manifest().get("run")), len(self.setting))

    def _missing(self, name: str) -> list[range]:
        """The rows of a pass that are still to be computed, as the first process finds them."""

        def ends() -> list[int]:
            return [end for rows in self._stored(name).missing() for end in (rows.start, rows.stop)]

        found = self.processes.agreed(f"{name}, missing", ends)
        return [range(*pair) for pair in zip(found[::2], found[1::2], strict=True)]

    def _shards(self, name: str, measures: Sequence[Measure] = ()) -> Shards:
        """This process's shards of a pass, with the measures as they were behind the last of them."""
        part = self.processes.part_of(self.processes.rank)
        shards = self._stored(name).of_part(part, counted=name == _FIRST)
        kept = shards.read()
        if kept.shards:
            self._restore(measures, kept.state)
        return shards

    def _run_pass(
        self,
        shards: Shards,
        mine: Sequence[range],
        run: Callable[[range], Iterator[Columns]],
        measures: Sequence[Measure] = (),
        about: About = lambda start, stop: {"index": np.arange(start, stop)},
    ) -> None:
        """One pass by all processes.

        mine: the rows that this one computes. about: a table without a column has no rows to count.
        """
        todo = sum(map(len, mine))
        alone = self.processes.size == 1 and self.processes.parts is None
        total = len(self.setting) if alone else todo
        left = todo

        def show(rows: int) -> None:
            nonlocal left
            left -= rows
            self._run.progress(Progress(total - left, total, shards.name))

        show(0)
        for rows in mine:
            self._compute(run(rows), shards, measures, about, show)
        self.processes.meet(f"the end of {shards.name}")

    def _compute(
        self,
        chunks: Iterator[Columns],
        shards: Shards,
        measures: Sequence[Measure],
        about: About,
        show: Callable[[int], None],
    ) -> None:
        """Compute these chunks, and store them from time to time."""
        waiting: list[Columns] = []
        last = time.monotonic()

        def keep() -> None:
            if waiting:
                columns = Columns.of_chunks(waiting)
                table, arrays = split_columns(columns, about(columns.start, columns.stop))
                shards.append(columns.start, table, _as_numpy(arrays), _as_numpy(self._state(measures)))
                waiting.clear()

        try:
            with without_interrupts() as handle_interrupts:  # Ctrl-C waits for the chunk to be done
                for columns in chunks:
                    waiting.append(columns)
                    handle_interrupts()
                    show(columns.stop - columns.start)
                    stored = columns.stop - waiting[0].start
                    if stored >= _ROWS_PER_SHARD or time.monotonic() - last > _SECONDS_PER_SHARD:
                        keep()
                        last = time.monotonic()
        finally:
            keep()  # after an interrupt too: what is computed is not thrown away

    # -- several processes -----------------------------------------------------------------------------------

    def _require_same_rows(self, mine: Sequence[range]) -> None:
        """Raises DistributedError where code makes other rows in a process than in the first one."""
        if self._content is None or self.processes.size == 1:
            return
        own = [[rows.start, rows.stop, self._content(rows)] for rows in mine]
        for rank, text in enumerate(self.processes.texts("rows of the first pass", json.dumps(own))):
            for start, stop, content in json.loads(text) if self.processes.leads else ():
                if self._content(range(start, stop)) != content:
                    raise DistributedError(
                        f"rank {rank} has other rows than rank 0: among the rows {start:,} to {stop - 1:,}",
                        hint=(
                            "let a row of data.factory depend on its number alone, not on the process,"
                            " a generator of its own, or the order in which rows are read; or run one process"
                        ),
                    )

        self.processes.meet("rows are compared")  # before one of them is stored

    def _agree_on_chunk_size(self, measures: Sequence[Measure]) -> None:
        """Let all processes take as many rows at a time as the first one does."""
        if self.processes.size == 1:
            return

        def size() -> list[int]:
            factors = any(measure.needs_factors for measure in measures)
            self.stream.choose_chunk_size(len(self.setting), factors)
            return self.stream.chunk_facts()

        self.stream.fix_chunk_size(*self.processes.agreed("chunk", size))

    def _merge(self, measures: Sequence[Measure]) -> None:
        """Give each process what all have gathered, those of an earlier run among them."""
        processes, stored = self.processes, self._stored(_FIRST)
        if processes.rank == 0:
            here = {processes.part_of(rank) for rank in range(processes.size)}
            for part in stored.parts():
                kept = FinishedShards() if part in here else stored.of_part(part).read()
                self._add(measures, _as_torch(kept.state))
        state = processes.reduce("state", lambda: self._state(measures), partial(self._add, measures))
        if processes.rank:
            self._restore(measures, _as_numpy(state))

    def _require_unchanged(self, measures: Sequence[Measure], before: Arrays) -> None:
        """Raises MeasureError for a measure that gathers in its second pass, of which nothing is kept."""
        state = self._state(measures)
        for place, measure in enumerate(measures):
            own = [key for key in state if key.startswith(f"{place}.")]
            if not all(key in before and torch.equal(before[key], state[key]) for key in own):
                raise MeasureError(
                    f"the measure {measure.name} gathers over the samples in its second pass",
                    hint="gather in `columns`, or from the columns, in `gather`",
                )

    # -- what is gathered ------------------------------------------------------------------------------------

    def _state(self, measures: Sequence[Measure]) -> Arrays:
        state: Arrays = {_CHUNK_FACTS: torch.tensor(self.stream.chunk_facts())}
        for place, measure in enumerate(measures):
            state |= {f"{place}.{key}": value for key, value in measure.state().items()}
        return state

    def _restore(self, measures: Sequence[Measure], state: Mapping[str, np.ndarray[Any, Any]]) -> None:
        self.stream.fix_chunk_size(*state[_CHUNK_FACTS].tolist())
        for measure, own in _by_measure(measures, _as_torch(state)):
            measure.restore(own)

    def _add(self, measures: Sequence[Measure], state: Arrays) -> None:
        for measure, own in _by_measure(measures, state):
            measure.merge(own)


def _by_measure(measures: Sequence[Measure], state: Arrays) -> Iterator[tuple[Measure, Arrays]]:
    """Each measure that has a state, with its own."""
    for place, measure in enumerate(measures):
        own = {key.partition(".")[2]: value for key, value in state.items() if key.startswith(f"{place}.")}
        if own:
            yield measure, own


def _as_numpy(state: Arrays) -> dict[str, np.ndarray[Any, Any]]:
    return {key: value.cpu().numpy() for key, value in state.items()}


def _as_torch(state: Mapping[str, np.ndarray[Any, Any]]) -> Arrays:
    return {key: torch.from_numpy(value) for key, value in state.items()}
