"""Sources of clipped sums: a batch in memory, or rows that are read chunk by chunk.

Everything here is private: noise comes later. What a source answers for is that a record, whatever is in it, adds no more than its bounds,
that the sum is finite, and that a batch may be empty.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from psgrad.engine.gradients.per_sample import Pass
from psgrad.engine.gradients.streaming import Stream
from psgrad.engine.privacy.clipped import ClippedSum as ClippedSum
from psgrad.engine.privacy.clipped import Clipper, Total
from psgrad.engine.privacy.clipped import RecordColumns as RecordColumns
from psgrad.engine.privacy.clipping import Clipping

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
) -> GradientSource:
    """The source of a batch that is in memory, a sample a record, none even. The arguments are those of `per_sample_weighted_sum`."""
    count = Pass(loss, params, batch, in_dims, has_aux, randomness).level.size

    def source(clipping: Clipping) -> ClippedSum:
        total = Total(clipping, params)
        if count:
            clipper = Clipper(clipping, memory)
            total.add(clipper(loss, params, *batch, in_dims=in_dims, has_aux=has_aux, randomness=randomness))
        return total.found()

    return source


def stream_source(stream: Stream, count: int) -> GradientSource:
    """The source of the rows 0, ..., count - 1 of a stream, a row a record, none even, in chunks that fit in memory.

    The parameters are read as they are when the source is called.
    """

    def source(clipping: Clipping) -> ClippedSum:
        total = _TotalOfChunks(clipping, stream.params)
        for _ in stream.run(count, [total], Clipper(clipping)):
            pass
        return total.found()

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
