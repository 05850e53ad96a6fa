"""A dataset of any size, chunk by chunk: each chunk's deferred gradients go to the measures, and their
columns come out.

The numbers do not depend on the chunk size. When memory runs out, the rows that failed are halved and tried
again; rows that are done stay done, and the next chunk is as large as before, unless it fails as well. The
next chunk is read while one is computed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import torch

from psgrad import random_state
from psgrad.engine.execution.bucket_plan import positions_of
from psgrad.engine.execution.buckets import ModelSize, RaggedChunks
from psgrad.engine.execution.chunk_measure import ChunkMeasure, Columns, on_the_cpu
from psgrad.engine.execution.chunk_memory import LARGEST_AUTO_CHUNK as LARGEST_AUTO_CHUNK
from psgrad.engine.execution.chunk_replay import PAYS_FROM, ChunkReplay, ReplayCounts
from psgrad.engine.execution.chunker import in_pieces
from psgrad.engine.execution.ladder import why_without_programs
from psgrad.engine.execution.loading import Chunk, Loader, Rows
from psgrad.engine.execution.memory import chunk_budget, is_out_of_memory
from psgrad.engine.execution.recompute import Recompute
from psgrad.engine.execution.row_computation import (
    RowComputation,
    keeps_factors,
    runs_the_loss_once,
    too_large,
)
from psgrad.engine.execution.weight_supply import Supply
from psgrad.engine.gradients.machine import machine
from psgrad.engine.gradients.per_sample import (
    materialised_for_many,
    per_sample_gradients,
    per_sample_square_norms,
)
from psgrad.engine.gradients.queries import PerSampleGradients
from psgrad.errors import MeasureError, PsgradError
from psgrad.ragged import Block

_PROBE = 8


class Stream(RowComputation):
    """The gradients of rows of a dataset, in chunks that fit in memory.

    Args:
        loss: (params, inputs, target) of one sample to (loss, aux); see Objective.
        params: name -> parameter, on the device to compute on.
        rows: what is read. `take` is never called twice at once, yet from a thread of its own where it can
            be.
        chunk_size: samples at a time; 'auto' takes what fits `memory`, by two chunks that are run first.
        memory: bytes that an automatic chunk may take; None for a share of what is free.
        tokens: where rows differ in length, the positions that are computed at once at most, padded ones
            included; None for what fits `memory`, or for no bound where the chunk size was given.
        model_size: of the model with its frozen parameters; None for that of `params`. It says which buckets
            rows of different length are cheapest in.
        randomness: as for vmap.
        capture: whether chunks of one size may be replayed by a program of the first ones, where there are
            many to come; 'off' runs each by itself.
        supply: brings offloaded parameters to the device; what it keeps there is given back at need.
        recompute: switched on when memory runs out over a single row.
        counts: of all chunks of a run, where it has several streams.
        say: called with a sentence at each retry, and with the reason why chunks are not read ahead.

    Attributes:
        chunk_size: samples at a time, now. Of rows that differ in length a chunk is computed in
            buckets of like length, one after another; tokens bounds each.
    """

    def __init__(
        self,
        loss: Callable[..., Any],
        params: dict[str, torch.Tensor],
        rows: Rows,
        *,
        chunk_size: int | Literal["auto"] = "auto",
        memory: int | None = None,
        tokens: int | None = None,
        model_size: ModelSize | None = None,
        randomness: str = "error",
        capture: Literal["auto", "off"] = "auto",
        supply: Supply | None = None,
        recompute: Recompute | None = None,
        counts: ReplayCounts | None = None,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.automatic = chunk_size == "auto"
        self.chunk_size = _PROBE if chunk_size == "auto" else int(chunk_size)
        reference = next(iter(params.values()))
        once = (model_size or ModelSize.of_tensors(params)).positions_of_a_pass(
            machine(reference.device), reference.dtype
        )
        super().__init__(
            loss,
            params,
            rows,
            ragged=RaggedChunks(tokens, once, self.automatic, say),
            randomness=randomness,
            counts=ReplayCounts() if counts is None else counts,
            say=say,
        )
        self.memory, self.recompute = memory, recompute
        self._too_large: int | None = None  # the smallest size that failed since one as large went through
        self._alone: int | None = None  # the row that failed by itself, once
        # Chunks of a run from row 0 on: equal for a run that goes on from a later row, whose numbers are the
        # same to the last bit.
        self._in_run = 0
        self._nothing_is_read = threading.Lock()
        self.replays: dict[Callable[..., Any], ChunkReplay] = {}
        if capture == "off":
            self.counts.add_reason("engine.capture is off")
        else:
            for how in (per_sample_gradients, per_sample_square_norms):
                self._replay_of(how)
        self.at_need += [] if supply is None else [supply.give_back]
        self.at_need.append(self._drop_programs)

    def fix_chunk_size(self, size: int, *positions: int) -> None:
        """Take `size` rows at a time from now on, as an earlier run or another process does, with its
        positions (`chunk_facts`): then the numbers are the same to the last bit.
        """
        self.chunk_size, self.automatic = size, False
        if positions:
            self.ragged.tokens, self.ragged.longest = positions

    def choose_chunk_size(self, count: int, needs_factors: bool = True, readable: int | None = None) -> None:
        """Find an automatic chunk size for `count` rows by the first few, whose gradients are not used.

        needs_factors: as of the measures of the pass to come. readable: rows that there are now; None for
        all.

        Where the rows fail, nothing changes: they fail again where the row is named, or are halved.
        """
        if not self.automatic or not count:
            return
        self.automatic = False
        how = per_sample_gradients if needs_factors else per_sample_square_norms
        budget = chunk_budget(self.device, self.memory)
        with random_state.restored():
            try:
                block = self.load_block(range(min(count if readable is None else readable, _PROBE)))
                is_ragged = block.ragged is not None and block.lengths is not None
                tokens = self.ragged.tokens if is_ragged else None
                if tokens is None:
                    memory = self.memory_of_chunks(how, block, budget, count)
                    rows = memory.rows_within(budget, LARGEST_AUTO_CHUNK)
            except Exception:
                return
        if block.ragged is None or block.lengths is None:
            self.chunk_size = rows
            return
        longest = int(positions_of(block.lengths.numpy(), block.ragged).max())
        tokens = rows * longest if tokens is None else tokens
        self.chunk_size = min(self.ragged.take(tokens, longest), LARGEST_AUTO_CHUNK)

    def chunk_facts(self) -> list[int]:
        """The chunk size, and, where rows differ in length and it was found here, how many positions are
        computed at once and those of the row that this was found by: for `fix_chunk_size` elsewhere.
        """
        tokens, longest = self.ragged.tokens, self.ragged.longest
        return [self.chunk_size, *([] if tokens is None or longest is None else [tokens, longest])]

    @property
    def rows_at_longest(self) -> int:
        """How many rows may be computed at once if all are as long as the longest that chunks were sized
        by.
        """
        size, *positions = self.chunk_facts()
        return max(1, min(size, positions[0] // positions[1])) if positions else size

    def run(
        self,
        count: int,
        measures: Sequence[ChunkMeasure],
        compute: Callable[..., Any] | None = None,
        start: int = 0,
        materialise: bool = False,
    ) -> Generator[Columns]:
        """The measures' columns for the rows start, ..., count - 1, in order.

        compute: what is computed of each chunk and handed to the measures, a function with the arguments of
        `per_sample_gradients`; None for the gradients, or for the norms alone where no measure needs more.
        materialise: whether gradients are contracted so often that they are materialised where that
        takes twice the room.
        """
        needs_factors = compute is not None or any(measure.needs_factors for measure in measures)
        self.choose_chunk_size(count, needs_factors)
        how = compute or (per_sample_gradients if needs_factors else per_sample_square_norms)
        reached = start

        def unread() -> Iterator[Chunk | range]:
            while reached < count:
                yield range(reached, min(reached + self.chunk_size, count))

        def ready(piece: Chunk | range) -> Sequence[Chunk | range]:
            nonlocal reached
            try:
                chunk = piece if isinstance(piece, Chunk) else loader.take(piece.start, piece.stop)
            except Exception as error:
                if is_out_of_memory(error) and len(piece) == 1:
                    raise too_large(piece.start, error) from error
                raise
            reached = max(reached, chunk.stop)
            fitting = self.ragged.rows_that_fit(chunk.block) if keeps_factors(how) else len(chunk)
            if fitting < len(chunk):
                return [chunk.part(0, fitting), chunk.part(fitting, len(chunk))]
            return [chunk] if len(chunk) <= self.chunk_size else self._halves(chunk)

        def found(chunk: Chunk | range) -> dict[str, torch.Tensor]:
            assert isinstance(chunk, Chunk)
            if chunk.stop == reached:  # all rows before it were read
                loader.expect(reached, min(reached + self.chunk_size, count))
            to_come = (count - chunk.start) // len(chunk) if len(chunk) == self.chunk_size else 1
            self._in_run = count // self.chunk_size
            return self._attempt(chunk, measures, how, to_come, materialise)

        def smaller(piece: Chunk | range) -> Sequence[Chunk | range]:
            nonlocal reached
            reached = max(reached, piece.stop)
            self._out_of_memory(piece)
            return self._halves(piece)

        with Loader(self.take, self.say, self._nothing_is_read) as loader:
            loader.ahead = not self.draws  # else reader and model would seed the same generators at once
            # A row that fails alone is tried once more, and named in the error then.
            for piece, values in in_pieces(unread(), found, smaller, ready=ready, final=lambda piece: False):
                yield Columns(piece.start, piece.stop, values)

    def _halves(self, piece: Chunk | range) -> Sequence[Chunk | range]:
        """A piece in parts of at most half its rows, and of at most as many as are computed at once."""
        size = max(1, min(self.chunk_size, (len(piece) + 1) // 2))
        ends = [(i, min(i + size, len(piece))) for i in range(0, len(piece), size)]
        return [piece.part(*each) if isinstance(piece, Chunk) else piece[slice(*each)] for each in ends]

    def _attempt(
        self,
        chunk: Chunk,
        measures: Sequence[ChunkMeasure],
        how: Callable[..., Any],
        to_come: int,
        materialise: bool,
    ) -> dict[str, torch.Tensor]:
        """The columns of one chunk, on the CPU. Raises the error as it is where memory ran out and the rows
        are to be tried again.

        to_come: chunks of this size, this one included.
        """
        try:
            block = self._to_device(chunk.block)
            if runs_the_loss_once(how):
                self.ragged.warn_of_padding(block)
            gradients = self.found(how, block, to_come)
            if materialise and isinstance(gradients, PerSampleGradients):
                gradients = materialised_for_many(gradients)
            values: dict[str, torch.Tensor] = {}
            for measure in measures:
                found = measure.columns(gradients)
                if twice := values.keys() & found.keys():
                    raise MeasureError(
                        f"two measures make the column {min(twice)}; expected columns with different names",
                        hint="rename the column of your own measure",
                    )
                values.update(found)
            values = on_the_cpu(values)
        except PsgradError:
            raise
        except Exception as error:
            if is_out_of_memory(error) and not (len(chunk) == 1 and self._alone == chunk.start):
                raise
            raise self._failure(error, chunk) from error
        for measure in measures:
            measure.keep()
        if self._too_large is not None and len(chunk) >= self._too_large:
            self._too_large = None
        return values

    def gradients(self, rows: Sequence[int]) -> PerSampleGradients:
        """The deferred gradients of these rows, from anywhere, all at once.

        Raises ModelError, with the row, where the model or the loss fails or memory runs out.
        """
        chunk = Chunk(rows, self.take(rows))
        try:
            return self.found(per_sample_gradients, self._to_device(chunk.block))  # type: ignore[no-any-return]
        except PsgradError:
            raise
        except Exception as error:
            raise self._failure(error, chunk) from error

    def found(self, how: Callable[..., Any], block: Block, to_come: int = 1) -> Any:
        """What `how` (see `run`) finds of rows on the device, by programs where they pay. to_come: chunks of
        this size, this one included, as far as is known.
        """
        function, given = how, tuple[Any, ...]()
        if isinstance(how, partial):
            function, given = how.func, (how.args, how.keywords)
        finds = getattr(function, "replayable", None)
        if not self.replays or finds is None:
            return self.computed(how, block)
        replay = self._replay_of(function)
        may_be_filled = finds == "rows" and self.randomness == "error"
        if block.ragged is not None:
            replay.ragged_chunks += 1
            why = (
                why_without_programs(block.ragged) if may_be_filled else "sums of ragged rows are not filled"
            )
            if why is not None:
                self.counts.add_reason(why)
            if why is not None or max(to_come, self._in_run, replay.ragged_chunks) < PAYS_FROM:
                return self.computed(how, block)
            return self.computed(how, block, lambda some: replay(some.inputs, some.target, to_come, given))
        return replay(block.inputs, block.target, to_come, given)

    def _replay_of(self, function: Callable[..., Any]) -> ChunkReplay:
        if function not in self.replays:

            def run(
                params: Any, inputs: Any, target: Any, args: Any = (), keywords: Mapping[str, Any] = {}
            ) -> Any:
                how = partial(function, *args, **keywords) if args or keywords else function
                return self.pass_of(how)(params, inputs, target)

            self.replays[function] = ChunkReplay(run, self.params, self.counts, self._nothing_is_read)
        return self.replays[function]

    def _drop_programs(self) -> None:
        for replay in self.replays.values():
            replay.drop_program()

    def _out_of_memory(self, rows: Chunk | range) -> None:
        """Remember that these rows were too many, and free the memory that is not needed.

        The first failure may be due to these rows or to another program, so later chunks keep their size. If
        a chunk of that size fails again, later chunks have half of it. A row that fails alone is tried once
        more, with nothing else in memory.
        """
        where = f"rows {rows.start} to {rows.stop - 1}" if len(rows) > 1 else f"row {rows.start}"
        if len(rows) == 1:
            self._alone = rows.start
            again = self.recompute is not None and self.recompute.switch_on()
            how = ", and with its blocks run again in the backward pass from now on" if again else ""
            self.say(f"out of memory on {where} alone; trying it once more, with nothing else in memory{how}")
        elif self._too_large is not None and len(rows) >= self._too_large:
            self.chunk_size = min(self.chunk_size, (self._too_large + 1) // 2)
            self._too_large = None
            self.say(f"out of memory on {where}, again; going on with {self.chunk_size} at a time")
        else:
            self._too_large = len(rows)
            self.say(f"out of memory on {where}; trying them in halves")
        self.give_back()
