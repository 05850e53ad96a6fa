"""Sources of clipped sums: a batch in memory, rows that are read chunk by chunk, and records of several rows.

Everything here is private: noise is added later. A source guarantees that a record adds no more than its
bounds, whatever it holds, that the sum is finite, and that a batch may be empty. Records of several rows are
read in streams of records of about the same length, so that a user of two rows is not padded to a thousand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from psgrad.engine.execution.chunker import in_pieces
from psgrad.engine.execution.loading import Rows
from psgrad.engine.execution.memory import is_out_of_memory
from psgrad.engine.execution.streaming import LARGEST_AUTO_CHUNK, Stream
from psgrad.engine.gradients.batch_pass import BatchPass
from psgrad.engine.privacy.clipped_sums import ClippedSum as ClippedSum
from psgrad.engine.privacy.clipped_sums import Clipper, Total
from psgrad.engine.privacy.clipped_sums import RecordColumns as RecordColumns
from psgrad.engine.privacy.clipping import Clipping
from psgrad.engine.privacy.coins import Coins
from psgrad.engine.privacy.records import RecordReader, Records, RowNumbers
from psgrad.engine.privacy.sum_programs import SumPrograms

GradientSource = Callable[[Clipping], ClippedSum]
"""The clipped sum of one drawn batch, whatever made it."""

SAMPLES = 256
"""Records of a batch in memory that are computed together, where the caller names no number. With 64 the
step of a small MLP takes a third longer."""


def batch_source(
    loss: Callable[..., Any],
    params: Mapping[str, torch.Tensor],
    *batch: Any,
    in_dims: Any = 0,
    has_aux: bool = False,
    randomness: str = "error",
    coins: Coins | None = None,
    samples: int = SAMPLES,
    programs: SumPrograms | None = None,
) -> GradientSource:
    """The gradient source of a batch in memory. Each sample is a record; the batch may be empty. The
    arguments are those of `per_sample_weighted_sum`.

    coins: of the run, which seed what the loss draws from; None for new ones. samples: how many records are
    computed together at most; 1 computes each record alone. programs: of this loss, kept by the caller from
    batch to batch; None computes each chunk itself.

    Raises ValueError for randomness='same': records that share a draw are not independent.
    """
    if randomness == "same":
        raise ValueError("batch_source: randomness='same' gives the records of a chunk one draw")
    options = {"in_dims": in_dims, "has_aux": has_aux, "randomness": randomness}
    job = BatchPass(loss, params, batch, **options)
    count = job.size
    coins = coins or Coins()

    def source(clipping: Clipping) -> ClippedSum:
        total, clipper = Total(clipping, params), Clipper(clipping, coins, programs)
        places, together = torch.arange(count, device=next(iter(params.values())).device), samples

        def unread() -> Iterator[Tensor]:
            first = 0
            while first < count:
                some = places[first : first + together]
                first += len(some)  # `together` may be less when the next ones are asked for
                yield some

        def compute(some: Tensor) -> ClippedSum:
            return clipper(loss, params, *job.batch_of(some), **options)

        def halves(some: Tensor) -> Sequence[Tensor]:
            nonlocal together
            together = (len(some) + 1) // 2
            return some.split(together)

        for _, part in in_pieces(unread(), compute, halves):
            total.add(part)
            del part  # not beside the next one
        return total.result()

    return source


def stream_source(
    stream: Stream,
    count: int,
    coins: Coins | None = None,
    programs: SumPrograms | None = None,
    alone: bool = False,
) -> GradientSource:
    """The gradient source of the rows 0, ..., count - 1 of a stream, in chunks that fit in memory. Each row
    is a record; count may be 0.

    coins, programs: as for `batch_source`. alone: whether each record is computed by itself.

    The parameters are read as they are when the source is called.
    """
    coins = coins or Coins()
    if alone:
        stream.fix_chunk_size(1)

    def source(clipping: Clipping) -> ClippedSum:
        total = _TotalOfChunks(clipping, stream.params)
        if count:
            stream.choose_chunk_size(LARGEST_AUTO_CHUNK, readable=count)
            for _ in stream.run(count, [total], Clipper(clipping, coins, programs)):
                pass
        return total.result()

    return source


class _TotalOfChunks(Total):
    """Clipped sums, added up as a measure of a stream: a chunk that is tried twice counts once."""

    needs_factors = False
    _chunk: ClippedSum

    def columns(self, gradients: ClippedSum) -> dict[str, torch.Tensor]:
        self._chunk = gradients
        return {}

    def keep(self) -> None:
        self.add(self._chunk)
        del self._chunk


MakeStream = Callable[[Callable[..., Any], Rows], Stream]


class RecordStreams:
    """Clipped sums of drawn records, each of which is read in a stream of records about as long as itself.

    Every stream has a width that its records are filled up to, which follows from the size of a record alone:
    a power of two. So its chunks have few shapes.

    Args:
        records, rows: as for RecordReader.
        loss: of one row, (params, inputs, target) to (loss, aux).
        params: name -> parameter.
        make: a record's loss and its reader to a stream.
        coins: of the run.
        reads_by_code: whether code of the user's, which may draw, reads the rows.
        alone: whether each record is computed by itself.
        randomness: of the rows of a record among each other, as for vmap.
        zero_on_error: whether a record that can't be read or computed adds zero, as one whose gradient is not
            finite does, and no error is raised. Where something draws, it needs `alone`: records of a chunk
            that is computed again would have other coins because of the one that fails.

    Attributes:
        read_coins: of rows that code of the user's reads; None for rows that are the same each time.
        drawn: the records of the batch in hand, in the order in which its source has them. There is one batch
            at a time.
        replayed: how many chunks were replayed.
    """

    def __init__(
        self,
        records: Records,
        rows: Rows,
        loss: Callable[..., Any],
        params: Mapping[str, Tensor],
        make: MakeStream,
        *,
        coins: Coins | None = None,
        reads_by_code: bool = False,
        alone: bool = False,
        randomness: str = "error",
        zero_on_error: bool = False,
    ) -> None:
        self.records, self.params, self.coins = records, params, coins or Coins()
        self.read_coins = self.coins if reads_by_code else None
        self._rows, self._loss, self._make = rows, loss, make
        self.alone, self.zero_on_error, self._randomness = alone, zero_on_error, randomness
        self._streams: dict[int, tuple[RecordReader, Stream, SumPrograms | None]] = {}
        self.drawn: RowNumbers = np.empty(0, dtype=np.int64)

    def of(self, records: Records, rows: Rows) -> RecordStreams:
        """The same of other records."""
        other = copy(self)
        other.records, other._rows, other._streams = records, rows, {}
        return other

    def source(self, records: npt.ArrayLike, *place: int) -> GradientSource:
        """The clipped sum of these records, possibly none. place: the step, and the rank, to which their
        coins belong.
        """
        drawn = np.asarray(records, dtype=np.int64)
        self.drawn = drawn[np.argsort(-self.records.sizes[drawn], kind="stable")]
        parts = self._parts(self.drawn)

        def source(clipping: Clipping) -> ClippedSum:
            total = Total(clipping, self.params)
            self.coins.begin(*place)
            for width, part in parts:
                apart = len(part) if self.zero_on_error and self.alone else 1
                for some in np.array_split(part, apart):
                    total.add(self._sum(width, some, clipping))
            return total.result()

        return source

    def _sum(self, width: int, part: RowNumbers, clipping: Clipping) -> ClippedSum:
        """The clipped sum of records of one width."""
        try:
            reader, stream, programs = self._stream(width)
            reader.draw(part)
            return stream_source(stream, len(part), self.coins, programs, self.alone)(clipping)
        except Exception as error:
            if not self.zero_on_error or any(map(is_out_of_memory, (error, error.__cause__ or error))):
                raise
        # Outside the handler, where the tensors of the attempt are free. The record is in one of the halves.
        total = Total(clipping, self.params)
        if len(part) == 1:
            return replace(total.result(), records=RecordColumns.without_gradient(len(clipping.groups)))
        for half in np.array_split(part, 2):
            total.add(self._sum(width, half, clipping))
        return total.result()

    @property
    def replayed(self) -> int:
        return sum(programs.chunks for _, _, programs in self._streams.values() if programs is not None)

    def _parts(self, drawn: RowNumbers) -> list[tuple[int, RowNumbers]]:
        """(width, records) of each stream that takes part, the widest first."""
        widths = 2 ** np.ceil(np.log2(self.records.sizes[drawn])).astype(np.int64)
        return [(int(width), drawn[widths == width]) for width in np.unique(widths)[::-1]]

    def _stream(self, width: int) -> tuple[RecordReader, Stream, SumPrograms | None]:
        if width not in self._streams:
            reader = RecordReader(self.records, self._rows, width=width, coins=self.read_coins)
            stream = self._make(reader.loss_of(self._loss, randomness=self._randomness), reader)
            self._streams[width] = reader, stream, SumPrograms(stream.counts) if stream.replays else None
        return self._streams[width]
