"""Sources of clipped sums: a batch in memory, rows that are read chunk by chunk, and records of several rows.

Everything here is private: noise is added later. A source guarantees that a record adds no more than its
bounds, whatever it holds, that the sum is finite, and that a batch may be empty. A record's numbers depend on
no other record, also not by rounding: chunks have a fixed size (fixed_chunks.py). Records of several rows are
read in streams of records of about the same length, so that a user of two rows is not padded to a thousand.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from psgrad.engine.execution.loading import Read
from psgrad.engine.execution.memory import is_out_of_memory
from psgrad.engine.execution.streaming import Stream
from psgrad.engine.gradients.per_sample import BatchPass
from psgrad.engine.privacy.clipped_sums import ClippedSum as ClippedSum
from psgrad.engine.privacy.clipped_sums import Clipper, Total
from psgrad.engine.privacy.clipped_sums import RecordColumns as RecordColumns
from psgrad.engine.privacy.clipping import Clipping
from psgrad.engine.privacy.fixed_chunks import ROWS_TRIED, choose_samples, independent_samples
from psgrad.engine.privacy.record_draws import (
    StepDraws,
    begin_run,
    drawing_by_record,
    labels_of,
    without_draws,
)
from psgrad.engine.privacy.records import RecordReader, Records, RowNumbers, Take
from psgrad.engine.privacy.sum_programs import SumPrograms

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
    samples: int | None = None,
    programs: SumPrograms | None = None,
) -> GradientSource:
    """The gradient source of a batch in memory. Each sample is a record; the batch may be empty. The
    arguments are those of `per_sample_weighted_sum`.

    samples: how many records are computed together, where fewer are filled up: a number that does not depend
    on the batch, and that `independent_samples` found for this loss. If it is None, a number for batches of
    any size is found when this loss first gets tensors of these shapes.

    programs: of this loss, kept by the caller from batch to batch; None computes each chunk itself.

    A loss that draws random numbers (randomness='different') needs two more: the draws of the step, and the
    number [n] of each record. Without them a record's draws would depend on the others, and the sum would
    have no bound.

    Raises ValueError for draws without records, or with randomness='same'. The source raises ModelError for a
    loss that draws without them.
    """
    count = BatchPass(loss, params, batch, in_dims, has_aux, randomness).level.size
    if (draws is None) != (records is None) or (draws is not None and randomness == "same"):
        raise ValueError(
            "batch_source: draws go with the numbers of the records, and not with randomness='same'"
        )
    given = loss
    if draws is not None and records is not None:
        in_dims = (*(in_dims if isinstance(in_dims, (tuple, list)) else [in_dims] * len(batch)), 0)
        batch = (*batch, torch.from_numpy(labels_of(records, 1)[:, 0]).to(next(iter(params.values())).device))
        loss = _by_record(loss, draws)

    options = {"in_dims": in_dims, "has_aux": has_aux, "randomness": randomness}

    def source(clipping: Clipping) -> ClippedSum:
        if not count:
            return Total(clipping, params).result()
        job = BatchPass(loss, params, batch, **options)
        with without_draws() if draws is None else drawing_by_record(draws):
            together = samples or _found(
                given, lambda: independent_samples(loss, params, *batch, **options), job
            )
            places = torch.arange(count, device=next(iter(params.values())).device)
            while True:
                total, clipper = Total(clipping, params), Clipper(clipping, together, memory, programs)
                for some in places.split(together):
                    total.add(clipper(loss, params, *job.batch_of(some), **options))
                if clipper.samples == together:
                    return total.result()
                together = clipper.samples  # memory ran out: all again, in chunks of one size

    return source


# For a loss, or the object whose method it is, as long as that exists: shapes -> how many samples are
# computed together.
_FOUND: WeakKeyDictionary[Any, dict[Any, int]] = WeakKeyDictionary()


def _found(loss: Callable[..., Any], find: Callable[[], int], job: BatchPass) -> int:
    try:
        known = _FOUND.setdefault(getattr(loss, "__self__", loss), {})
    except TypeError:  # an object that can't be a key is checked each time
        return find()
    key = (
        getattr(loss, "__name__", None),
        tuple((x.dtype, x.device, x.shape) for x in job.params.values()),
        tuple((x.dtype, x.shape[1:]) for x in job.flat if isinstance(x, Tensor)),
    )
    if key not in known:
        known[key] = find()
    return known[key]


def _by_record(loss: Callable[..., Any], draws: StepDraws) -> Callable[..., Any]:
    """The loss of a sample whose label is its last part."""

    def of_sample(params: Any, *sample: Any) -> Any:
        begin_run(draws, sample[-1])
        return loss(params, *sample[:-1])

    return of_sample


def stream_source(
    stream: Stream, count: int, samples: int | None = None, programs: SumPrograms | None = None
) -> GradientSource:
    """The gradient source of the rows 0, ..., count - 1 of a stream, in chunks that fit in memory. Each row
    is a record; count may be 0.

    samples: how many records are computed together, as `choose_samples` found it for the stream; None finds
    it at each call of the source. programs: of the stream's loss; None computes each chunk itself.

    The parameters are read as they are when the source is called. Raises ModelError for a loss that draws
    random numbers, where the stream's reader has no draws by record.
    """

    def source(clipping: Clipping) -> ClippedSum:
        if not count:
            return Total(clipping, stream.params).result()
        with without_draws() if stream.draws is None else drawing_by_record(stream.draws):
            clipper = Clipper(clipping, samples or choose_samples(stream, count), programs=programs)
            while True:
                total, before = _TotalOfChunks(clipping, stream.params), clipper.samples
                for _ in stream.run(count, [total], clipper):
                    pass
                if clipper.samples == before:
                    return total.result()
                stream.fix_chunk_size(clipper.samples)  # memory ran out: all again, in chunks of one size

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


class RecordStreams:
    """Clipped sums of drawn records, each of which is read in a stream of records about as long as itself.

    Every stream has a width that its records are filled up to, which follows from the size of a record alone:
    a power of two, times the copies. So its chunks have one shape, no record is computed in another shape for
    the sake of another record, and a chunk size that fits in memory once does so in every batch.

    Args:
        records, take: as for RecordReader, which takes `options`, too (combine, augment, copies, source,
            draws).
        loss: of one row, (params, inputs, target) to (loss, aux).
        params: name -> parameter.
        make: a record's loss and its reader to a stream.
        randomness: of the rows of a record among each other, as for vmap.
        expected: records of a batch, as far as they are computed here: a public number.
        zero_on_error: whether a record that can't be read or computed adds zero, as one whose gradient is not
            finite does, and no error is raised.

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
        expected: float | None = None,
        zero_on_error: bool = False,
        **options: Any,
    ) -> None:
        self.records, self.params, self.expected = records, params, expected
        self.zero_on_error = zero_on_error
        self._take, self._loss, self._make, self._randomness, self.options = (
            take,
            loss,
            make,
            randomness,
            options,
        )
        self._copies = RecordReader(records, take, **options).copies
        self._streams: dict[int, tuple[RecordReader, Stream]] = {}
        self._samples: dict[int, int] = {}  # width -> how many records are computed together
        self._programs: dict[int, SumPrograms] = {}  # width -> those of its stream's loss
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
                total.add(self._sum(width, part, step, clipping))
            return total.result()

        return source

    def _sum(self, width: int, part: RowNumbers, step: int, clipping: Clipping) -> ClippedSum:
        """The clipped sum of records of one width."""
        try:
            samples = self._together(width)
            reader, stream = self._stream(width)
            reader.draw(part, step)
            if width not in self._programs and stream.replays:
                self._programs[width] = SumPrograms()
            return stream_source(stream, len(part), samples, self._programs.get(width))(clipping)
        except Exception as error:
            if not self.zero_on_error or any(map(is_out_of_memory, (error, error.__cause__ or error))):
                raise
        # Outside the handler, where the tensors of the attempt are free. The record is in one of the halves.
        total = Total(clipping, self.params)
        if len(part) == 1:
            return replace(total.result(), records=RecordColumns.without_gradient(len(clipping.groups)))
        for half in np.array_split(part, 2):
            total.add(self._sum(width, half, step, clipping))
        return total.result()

    def _parts(self, drawn: RowNumbers) -> list[tuple[int, RowNumbers]]:
        """(width, records) of each stream that takes part, the widest first."""
        widths = self._widths(drawn)
        return [(int(width), drawn[widths == width]) for width in np.unique(widths)[::-1]]

    def _widths(self, records: RowNumbers) -> RowNumbers:
        return self._copies * 2 ** np.ceil(np.log2(self.records.sizes[records])).astype(np.int64)

    def _together(self, width: int) -> int:
        """How many records of a width are computed together; found by the first ones of the dataset."""
        if width not in self._samples:
            reader, stream = self._stream(width)
            alike = np.flatnonzero(self._widths(np.arange(len(self.records))) == width)[:ROWS_TRIED]
            reader.draw(alike)
            expected = None if self.expected is None else self.expected * self._copies / width
            try:
                with without_draws() if stream.draws is None else drawing_by_record(stream.draws):
                    self._samples[width] = choose_samples(stream, len(alike), expected)
            except Exception:
                if not self.zero_on_error:
                    raise
                self._samples[width] = 1
        return self._samples[width]

    def _stream(self, width: int) -> tuple[RecordReader, Stream]:
        if width not in self._streams:
            reader = RecordReader(self.records, self._take, width=width, **self.options)
            self._streams[width] = (
                reader,
                self._make(reader.loss_of(self._loss, randomness=self._randomness), reader),
            )
        return self._streams[width]
