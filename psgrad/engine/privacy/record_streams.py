"""Drawn records as a clipped sum, in streams of records about as long: a user of two rows is not filled up to a thousand."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from psgrad.engine.gradients.loading import Read
from psgrad.engine.gradients.streaming import Stream
from psgrad.engine.privacy.clipped import ClippedSum, Total
from psgrad.engine.privacy.clipping import Clipping
from psgrad.engine.privacy.records import RecordReader, Records, Rows, Take
from psgrad.engine.privacy.source import GradientSource, stream_source

MakeStream = Callable[[Callable[..., Any], Read], Stream]

# So many rows more are computed rather than another pass begun. Measured on a CPU with small networks, for which a pass costs most rows.
_ROWS_OF_A_PASS = 512


class RecordStreams:
    """Clipped sums of drawn records, each of which is read in a stream of records about as long as itself.

    Every stream has a width that its records are filled up to, a power of two or the longest record's: its chunks have one shape, and
    a chunk size that fits in memory once does so in every batch.

    Args:
        records, take: as for RecordReader, which takes `options`, too (combine, augment, copies, source, draws).
        loss: of one row, (params, inputs, target) to (loss, aux).
        params: name -> parameter.
        make: a record's loss and its reader to a stream.
        randomness: of the rows of a record among each other, as for vmap.

    Attributes:
        options: as given.
        drawn: the records of the batch in hand, in the order in which its source has them. There is one batch at a time.
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
        self._take, self._loss, self._make, self._randomness, self.options = take, loss, make, randomness, options
        self._copies = RecordReader(records, take, **options).copies
        self._streams: dict[int, tuple[RecordReader, Stream]] = {}
        self.drawn: Rows = np.empty(0, dtype=np.int64)

    def source(self, records: npt.ArrayLike, step: int = 0) -> GradientSource:
        """The clipped sum of these records, none even. step: to which their random draws belong."""
        drawn = np.asarray(records, dtype=np.int64)
        self.drawn = drawn[np.argsort(-self.records.sizes[drawn], kind="stable")]
        parts = self._parts(self.drawn)

        def source(clipping: Clipping) -> ClippedSum:
            total = Total(clipping, self.params)
            for width, part in parts:
                reader, stream = self._stream(width)
                reader.draw(part, step)
                total.add(stream_source(stream, len(part))(clipping))
            return total.found()

        return source

    def _parts(self, drawn: Rows) -> list[tuple[int, Rows]]:
        """(width, records) of each stream that takes part, for records that come longest first.

        The shortest ones go along with longer ones where that fills up fewer rows than a pass of their own is worth.
        """
        if not len(drawn):
            return []
        sizes = self.records.sizes[drawn] * self._copies
        widths = np.minimum(2 ** np.ceil(np.log2(sizes)).astype(np.int64), self.records.longest * self._copies)
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
            self._streams[width] = reader, self._make(reader.loss_of(self._loss, randomness=self._randomness), reader)
        return self._streams[width]


def _distinct_and_next(widths: Rows) -> tuple[list[int], list[int | None]]:
    """The widths that occur, in rising order, and beside each the next larger one."""
    distinct = np.unique(widths).tolist()
    return distinct, [*distinct[1:], None]
