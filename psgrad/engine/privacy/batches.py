"""Sources of clipped sums: a batch in memory, rows that are read chunk by chunk, and records of several rows.

Everything here is private: noise is added later. A source guarantees that a record adds no more than its
bounds, whatever it holds, that the sum is finite, and that a batch may be empty. Records of several rows are
read in streams of records of about the same length, so that a user of two rows is not padded to a thousand.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from psgrad.engine.execution.loading import Read
from psgrad.engine.execution.streaming import Stream
from psgrad.engine.gradients.per_sample import Pass
from psgrad.engine.privacy.clipped_sums import ClippedSum as ClippedSum
from psgrad.engine.privacy.clipped_sums import Clipper, Total
from psgrad.engine.privacy.clipped_sums import RecordColumns as RecordColumns
from psgrad.engine.privacy.clipping import Clipping
from psgrad.engine.privacy.record_draws import (
    StepDraws,
    begin_run,
    drawing_by_record,
    labels_of,
    without_draws,
)
from psgrad.engine.privacy.records import RecordReader, Records, RowNumbers, Take

GradientSource = Callable[[Clipping], ClippedSum]
"""The clipped sum of one drawn batch, whatever made it."""


def batch_source(
    loss: Callable[..., Any],
    params: Mapping[str, torch.Tensor],
    *batch: Any,
    in_dims: Any = 0,
    has_aux: bool = False,
    randomness: str = "error",
    memory: float | None = None,
    draws: StepDraws | None = None,
    records: npt.ArrayLike | None = None,
) -> GradientSource:
    """The source of a batch that is in memory, a sample a record, none even. The arguments are those of
    `per_sample_weighted_sum`.

    A loss that draws random numbers (randomness='different') needs two more: the draws of the step, and the
    number [n] of each record. Without them a record's draws would depend on the others, and the sum would
    have no bound.

    Raises ValueError for draws without records, or with randomness='same'. The source raises ModelError for a
    loss that draws without them.
    """
    count = Pass(loss, params, batch, in_dims, has_aux, randomness).level.size
    if (draws is None) != (records is None) or (draws is not None and randomness == "same"):
        raise ValueError(
            "batch_source: draws go with the numbers of the records, and not with randomness='same'"
        )
    if draws is not None and records is not None:
        in_dims = (*(in_dims if isinstance(in_dims, (tuple, list)) else [in_dims] * len(batch)), 0)
        batch = (*batch, torch.from_numpy(labels_of(records, 1)[:, 0]).to(next(iter(params.values())).device))
        loss = _by_record(loss, draws)

    def source(clipping: Clipping) -> ClippedSum:
        total = Total(clipping, params)
        if count:
            clipper = Clipper(clipping, memory)
            with without_draws() if draws is None else drawing_by_record(draws):
                total.add(
                    clipper(loss, params, *batch, in_dims=in_dims, has_aux=has_aux, randomness=randomness)
                )
        return total.result()

    return source


def _by_record(loss: Callable[..., Any], draws: StepDraws) -> Callable[..., Any]:
    """The loss of a sample whose label is its last part."""

    def of_sample(params: Any, *sample: Any) -> Any:
        begin_run(draws, sample[-1])
        return loss(params, *sample[:-1])

    return of_sample


def stream_source(stream: Stream, count: int) -> GradientSource:
    """The source of the rows 0, ..., count - 1 of a stream, a row a record, none even, in chunks that fit in
    memory.

    The parameters are read as they are when the source is called. Raises ModelError for a loss that draws
    random numbers, where the stream's reader has no draws by record.
    """

    def source(clipping: Clipping) -> ClippedSum:
        total = _TotalOfChunks(clipping, stream.params)
        with without_draws() if stream.draws is None else drawing_by_record(stream.draws):
            for _ in stream.run(count, [total], Clipper(clipping)):
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


MakeStream = Callable[[Callable[..., Any], Read], Stream]

# So many more rows are computed rather than another pass begun. Measured on a CPU with small networks, for
# which a pass costs most rows.
_ROWS_OF_A_PASS = 512


class RecordStreams:
    """Clipped sums of drawn records, each of which is read in a stream of records about as long as itself.

    Every stream has a width that its records are filled up to, a power of two or the longest record's: its
    chunks have one shape, and a chunk size that fits in memory once does so in every batch.

    Args:
        records, take: as for RecordReader, which takes `options`, too (combine, augment, copies, source,
            draws).
        loss: of one row, (params, inputs, target) to (loss, aux).
        params: name -> parameter.
        make: a record's loss and its reader to a stream.
        randomness: of the rows of a record among each other, as for vmap.

    Attributes:
        options: as given.
        drawn: the records of the batch in hand, in the order in which its source has them. There is one batch
            at a time.
    """

    def __init__(
        self,
        records: Records,
        take: Take,
        loss: Callable[..., Any],
        params: Mapping[str, Tensor],
        make: MakeStream,
        *,
        randomness: str = "error",
        **options: Any,
    ) -> None:
        self.records, self.params = records, params
        self._take, self._loss, self._make, self._randomness, self.options = (
            take,
            loss,
            make,
            randomness,
            options,
        )
        self._copies = RecordReader(records, take, **options).copies
        self._streams: dict[int, tuple[RecordReader, Stream]] = {}
        self.drawn: RowNumbers = np.empty(0, dtype=np.int64)

    def source(self, records: npt.ArrayLike, step: int = 0) -> GradientSource:
        """The clipped sum of these records, possibly none. step: the one to which their random draws
        belong.
        """
        drawn = np.asarray(records, dtype=np.int64)
        self.drawn = drawn[np.argsort(-self.records.sizes[drawn], kind="stable")]
        parts = self._parts(self.drawn)

        def source(clipping: Clipping) -> ClippedSum:
            total = Total(clipping, self.params)
            for width, part in parts:
                reader, stream = self._stream(width)
                reader.draw(part, step)
                total.add(stream_source(stream, len(part))(clipping))
            return total.result()

        return source

    def _parts(self, drawn: RowNumbers) -> list[tuple[int, RowNumbers]]:
        """(width, records) of each stream that takes part, for records that come longest first.

        The shortest ones join longer ones if that adds fewer padding rows than a pass of their own costs.
        """
        if not len(drawn):
            return []
        sizes = self.records.sizes[drawn] * self._copies
        widths = np.minimum(
            2 ** np.ceil(np.log2(sizes)).astype(np.int64), self.records.longest * self._copies
        )
        parts, end = [], len(drawn)
        for width, longer in zip(*_distinct_and_next(widths), strict=True):
            start = int(np.searchsorted(-widths, -width))  # where records of this width begin
            if longer is None or (end - start) * (longer - width) > _ROWS_OF_A_PASS:
                parts.append((int(width), drawn[start:end]))
                end = start
        return parts[::-1]

    def _stream(self, width: int) -> tuple[RecordReader, Stream]:
        if width not in self._streams:
            reader = RecordReader(self.records, self._take, width=width, **self.options)
            self._streams[width] = (
                reader,
                self._make(reader.loss_of(self._loss, randomness=self._randomness), reader),
            )
        return self._streams[width]


def _distinct_and_next(widths: RowNumbers) -> tuple[list[int], list[int | None]]:
    """The widths that occur, in rising order, and beside each the next larger one."""
    distinct = np.unique(widths).tolist()
    return distinct, [*distinct[1:], None]
