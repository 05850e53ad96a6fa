"""The passes of `psgrad analyze` over the samples: measures compute columns, finished rows are stored, and an
interrupted run continues.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import torch

from psgrad.commands.analyze_tables import About, Content, StoredPass, overlaps, split_columns
from psgrad.commands.measure_setup import joined_columns
from psgrad.commands.run_manifest import RankReport, rank_facts
from psgrad.commands.run_progress import without_interrupts
from psgrad.engine.execution.chunk_measure import Columns
from psgrad.engine.execution.ranks import Processes, guided_ranges
from psgrad.engine.execution.streaming import Stream
from psgrad.engine.measures.measure import Arrays, Gathered, Measure, OwnPass, Setting
from psgrad.engine.measures.passes import SecondPass
from psgrad.errors import DistributedError, MeasureError
from psgrad.run import RunFolder
from psgrad.run.results import Progress, Say
from psgrad.run.shards import FinishedShards, Shards

# Finished rows are made durable this often: what a crash or a full disk can cost.
_ROWS_PER_SHARD = 4096
_SECONDS_PER_SHARD = 30.0

_FIRST, _SECOND = "samples", "samples-again"
_DIGITS = 15  # of a hash that is compared, hexadecimal
_CHUNK_SIZE, _POSITIONS = "stream.chunk_size", "stream.positions"


@dataclass
class Measured:
    """The results of all passes.

    table: a row for each sample, with the columns of one number a sample. gathered: measure -> what it
    gathered. rows: all columns of all measures, also those of several numbers a sample. ranks: the manifest's
    part about several processes.
    """

    table: pd.DataFrame
    gathered: dict[str, Gathered]
    rows: Arrays
    ranks: dict[str, Any] | None = None


class Passes:
    """The passes of one run.

    Args:
        setting: of the measures, which are prepared by now.
        stream: of the samples' gradients.
        measures: all of them, those that others need before them.
        about: see About.
        folder: where finished rows go; all processes see it.
        processes: those that share the rows.
        run: a hash of the run's identity: shards of another one are refused.
        prefix: of the passes' names, where one run has the passes of two datasets.
        content: a hash of some rows, where code makes them, which may make others in another process.
    """

    def __init__(
        self,
        setting: Setting,
        stream: Stream,
        measures: Sequence[Measure],
        about: About,
        folder: RunFolder,
        say: Say,
        processes: Processes,
        run: str,
        prefix: str = "",
        content: Content | None = None,
    ) -> None:
        self.setting, self.stream, self.measures = setting, stream, measures
        self.about, self.folder, self.say = about, folder, say
        self.processes, self.identity, self.prefix = processes, run, prefix
        self._content = content
        self._work, self._rows = RankReport(), 0
        self._of_first: Arrays | None = None  # what the first pass gathered, where processes share the rows

    def run(self) -> Measured | None:
        """All passes, and what the measures gathered; None for processes that do not lead. A part of a run
        leaves the second pass out as long as rows of other parts are missing.
        """
        again = [measure for measure in self.measures if measure.looks_twice]
        second = SecondPass(again, self.stream)
        first = [*self.measures, second] if again else self.measures

        def run(rows: range) -> Iterator[Columns]:
            second.begin(rows.start)
            return self.stream.run(rows.stop, first, start=rows.start, materialise=True)

        names = [(_FIRST, "the first pass")]
        self._run_pass(_FIRST, first, run, about=self.about)
        if again and self._waits_for_parts(again):
            again = []
        else:
            self._merge(first)
        chunk_size = self.stream.chunk_size
        self.stream.fix_chunk_size(chunk_size)
        if again:
            for measure in again:
                measure.between()
            if self.processes.size > 1 or self.processes.parts is not None:
                self._of_first = {key: value.clone() for key, value in self._state(again).items()}
            self._run_pass(_SECOND, again, second.run, as_in=_FIRST, stored=second.stored_rows)
            names.append((_SECOND, "its second pass"))
            self.stream.fix_chunk_size(chunk_size)
        for measure in self.measures:
            for own in measure.passes():
                self._run_pass(own.name, [], partial(self._run_own_pass, own))
                names.append((own.name, f"the pass {own.name}"))
        ranks = rank_facts(self.processes, self.prefix, replace(self._work, rows=self._rows))
        return replace(self._gathered(names), ranks=ranks) if self.processes.leads else None

    def _waits_for_parts(self, again: Sequence[Measure]) -> bool:
        """Whether the second pass has to wait for rows of other parts. Says so."""
        if self.processes.leads or self.processes.size > 1:
            return False
        missing = self._stored(_FIRST).missing()
        if missing:
            names = ", ".join(measure.name for measure in again)
            self.say(
                Progress(
                    0,
                    0,
                    _FIRST,
                    f"{names}: a second pass compares each sample with all, and"
                    f" {sum(map(len, missing)):,} samples of other parts are missing; run this part again"
                    " when all parts have come to their end",
                )
            )
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

    def _stored(self, name: str) -> StoredPass:
        """What all processes have stored of a pass."""
        return StoredPass(self.folder, name, self.prefix, self.identity, len(self.setting))

    def _run_own_pass(self, own: OwnPass, rows: range) -> Iterator[Columns]:
        return own.run(rows, self.stream.rows_at_longest)

    # -- one pass --------------------------------------------------------------------------------------------

    def _run_pass(
        self,
        name: str,
        measures: Sequence[Measure],
        run: Callable[[range], Iterator[Columns]],
        about: About = lambda start, stop: {"index": np.arange(start, stop)},
        as_in: str | None = None,
        stored: Collection[int] = (),
    ) -> None:
        """One pass, from where it was left, by all processes.

        about: a table without a column has no rows to count. as_in: an earlier pass, in whose ranges the rows
        are computed. stored: rows whose ranges this process computes before others.
        """
        pass_name = self.prefix + name
        part = self.processes.part_of(self.processes.rank)
        shards = self._stored(name).of_part(part, counted=name == _FIRST)
        kept = shards.read()
        if kept.shards:
            self._restore(measures, kept.state)
        if name == _FIRST:
            self._agree_on_chunk_size(pass_name, measures)
        every = self._ranges(name, as_in)
        require_same = self._comparing(every) if name == _FIRST else None
        self._say_progress(name, 0)
        begun = time.monotonic()
        for rows in self.processes.ranges(pass_name, every, stored):
            if require_same is not None:
                require_same(rows)
            self._compute(rows, shards, measures, run(rows), about, name)
            self._rows += len(rows)
        ended = time.monotonic()
        self.processes.meet(pass_name)
        self._work.seconds += ended - begun
        self._work.waited += time.monotonic() - ended
        self.say(Progress(self._total, self._total, pass_name))

    def _compute(
        self,
        rows: range,
        shards: Shards,
        measures: Sequence[Measure],
        chunks: Iterator[Columns],
        about: About,
        name: str,
    ) -> None:
        """Compute the columns of these rows, and store them from time to time."""
        waiting: list[Columns] = []
        last = time.monotonic()

        def keep() -> None:
            if waiting:
                columns = Columns.of_chunks(waiting)
                table, arrays = split_columns(columns, about(columns.start, columns.stop))
                state = self._state(measures)
                if name == _SECOND:
                    self._require_unchanged(measures, state)
                shards.append(columns.start, table, _as_numpy(arrays), _as_numpy(state))
                waiting.clear()

        try:
            with without_interrupts() as handle_interrupts:  # Ctrl-C waits for the chunk to be done
                for columns in chunks:
                    waiting.append(columns)
                    handle_interrupts()
                    self._say_progress(name, columns.stop - columns.start)
                    stored = columns.stop - waiting[0].start
                    if stored >= _ROWS_PER_SHARD or time.monotonic() - last > _SECONDS_PER_SHARD:
                        keep()
                        last = time.monotonic()
        finally:
            keep()  # after an interrupt too: what is computed is not thrown away

    def _ranges(self, name: str, as_in: str | None) -> list[range]:
        """The ranges of rows that are still to be computed, as the first rank cuts them."""
        chunk = self.stream.chunk_size if name in (_FIRST, _SECOND) else self.stream.rows_at_longest

        def cut() -> list[int]:
            missing = self.processes.own(self._stored(name).missing())
            self.processes.progress(self.prefix + name, self._total - sum(map(len, missing)))
            if as_in is None or self.processes.size == 1:
                every = guided_ranges(missing, chunk, self.processes.size)
            else:
                cuts = [rows for kept in self._stored(as_in).finished() for rows in kept.ranges]
                every = [part for rows in missing for part in overlaps(rows, cuts)]
            return [end for rows in every for end in (rows.start, rows.stop)]

        ends = self.processes.agreed(f"{self.prefix}{name}.ranges", cut)
        return [range(*pair) for pair in zip(ends[::2], ends[1::2], strict=True)]

    def _comparing(self, every: Sequence[range]) -> Callable[[range], None] | None:
        """A function that raises DistributedError where this process has other rows in one of these ranges
        than rank 0; None where they need not be compared.
        """
        if self._content is None or self.processes.size == 1:
            return None
        content = self._content

        def number(rows: range) -> int:
            return int(content(rows)[:_DIGITS], 16)

        numbers = self.processes.agreed(f"{self.prefix}{_FIRST}.content", lambda: list(map(number, every)))
        of_first = dict(zip(every, numbers, strict=True))

        def require_same(rows: range) -> None:
            if number(rows) != of_first[rows]:
                raise DistributedError(
                    f"rank {self.processes.rank} on {socket.gethostname()} has other rows than rank 0: among"
                    f" the rows {rows.start:,} to {rows.stop - 1:,}",
                    expected="a data.factory that makes the same rows in all processes",
                    cause="it draws with a generator of its own, or depends on the process, the machine, or"
                    " the order in which rows are read",
                    next_step="let a row depend on its number alone, or run one process",
                )

        return require_same

    def _agree_on_chunk_size(self, pass_name: str, measures: Sequence[Measure]) -> None:
        """Let all ranks take as many rows at a time as the first one does."""
        if self.processes.size == 1:
            return

        def size() -> list[int]:
            factors = any(measure.needs_factors for measure in measures)
            self.stream.choose_chunk_size(len(self.setting), factors)
            return self.stream.chunk_facts()

        self.stream.take_chunk_facts(self.processes.agreed(f"{pass_name}.chunk", size))

    def _merge(self, measures: Sequence[Measure]) -> None:
        """Give each process what all have gathered, those of an earlier run among them."""
        processes, stored = self.processes, self._stored(_FIRST)
        if processes.rank == 0:
            here = {processes.part_of(rank) for rank in range(processes.size)}
            for part in stored.parts():
                kept = FinishedShards() if part in here else stored.of_part(part).read()
                self._add(measures, {key: torch.from_numpy(value) for key, value in kept.state.items()})
        state = processes.reduce(
            self.prefix + _FIRST, lambda: self._state(measures), partial(self._add, measures)
        )
        if processes.rank:
            self._restore(measures, _as_numpy(state))

    def _require_unchanged(self, measures: Sequence[Measure], state: Arrays) -> None:
        """Raises MeasureError for a measure that gathers in its second pass, where several processes share
        the rows: each has the sums of all by then, and would add its own.
        """
        if self._of_first is None:
            return
        for place, measure in enumerate(measures):
            own = [key for key in state if key.startswith(f"{place}.")]
            if not all(key in self._of_first and torch.equal(self._of_first[key], state[key]) for key in own):
                raise MeasureError(
                    f"the measure {measure.name} gathers over the samples in its second pass",
                    expected="gathering in the first pass alone, where several processes share the samples",
                    next_step="run it in one process, or gather from columns, in `gather`",
                )

    def _say_progress(self, name: str, rows: int) -> None:
        done = self.processes.progress(self.prefix + name, rows)
        if done < self._total:
            self.say(Progress(done, self._total, self.prefix + name))

    @property
    def _total(self) -> int:
        """How many rows these processes compute."""
        return sum(map(len, self.processes.own([range(len(self.setting))])))

    # -- what is gathered ------------------------------------------------------------------------------------

    def _state(self, measures: Sequence[Measure]) -> Arrays:
        state: Arrays = {_CHUNK_SIZE: torch.tensor(self.stream.chunk_size)}
        if self.stream.positions is not None:
            state[_POSITIONS] = torch.tensor(self.stream.positions)
        for place, measure in enumerate(measures):
            state |= {f"{place}.{key}": value for key, value in measure.state().items()}
        return state

    def _restore(self, measures: Sequence[Measure], state: Mapping[str, np.ndarray[Any, Any]]) -> None:
        tokens, longest, by_factors = state[_POSITIONS].tolist() if _POSITIONS in state else (None, 0, 0)
        positions = None if tokens is None else (tokens, longest, by_factors)
        self.stream.fix_chunk_size(int(state[_CHUNK_SIZE]), positions)
        for measure, own in _by_measure(
            measures, {key: torch.from_numpy(value) for key, value in state.items()}
        ):
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
