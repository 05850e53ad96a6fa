"""Sources of clipped sums: a batch in memory, or rows that are read chunk by chunk.

Everything here is private: noise comes later. What a source answers for is that a record, whatever is in it, adds no more than its bounds,
that the sum is finite, and that a batch may be empty.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy.typing as npt
import torch

from psgrad.engine.gradients.per_sample import Pass
from psgrad.engine.gradients.streaming import Stream
from psgrad.engine.privacy.clipped import ClippedSum as ClippedSum
from psgrad.engine.privacy.clipped import Clipper, Total
from psgrad.engine.privacy.clipped import RecordColumns as RecordColumns
from psgrad.engine.privacy.clipping import Clipping
from psgrad.engine.privacy.record_draws import StepDraws, begin_run, drawing_by_record, labels_of, without_draws

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
    """The source of a batch that is in memory, a sample a record, none even. The arguments are those of `per_sample_weighted_sum`.

    A loss that draws random numbers (randomness='different') needs two more: the draws of the step, and the number [n] of each record.
    Without them a record's draws would depend on the others, and the sum would have no bound.

    Raises ValueError for draws without records, or with randomness='same'. The source raises ModelError for a loss that draws without them.
    """
    count = Pass(loss, params, batch, in_dims, has_aux, randomness).level.size
    if (draws is None) != (records is None) or (draws is not None and randomness == "same"):
        raise ValueError("batch_source: draws go with the numbers of the records, and not with randomness='same'")
    if draws is not None and records is not None:
        in_dims = (*(in_dims if isinstance(in_dims, (tuple, list)) else [in_dims] * len(batch)), 0)
        batch = (*batch, torch.from_numpy(labels_of(records, 1)[:, 0]).to(next(iter(params.values())).device))
        loss = _by_record(loss, draws)

    def source(clipping: Clipping) -> ClippedSum:
        total = Total(clipping, params)
        if count:
            clipper = Clipper(clipping, memory)
            with without_draws() if draws is None else drawing_by_record(draws):
                total.add(clipper(loss, params, *batch, in_dims=in_dims, has_aux=has_aux, randomness=randomness))
        return total.found()

    return source


def _by_record(loss: Callable[..., Any], draws: StepDraws) -> Callable[..., Any]:
    """The loss of a sample whose label is its last part."""

    def of_sample(params: Any, *sample: Any) -> Any:
        begin_run(draws, sample[-1])
        return loss(params, *sample[:-1])

    return of_sample


def stream_source(stream: Stream, count: int) -> GradientSource:
    """The source of the rows 0, ..., count - 1 of a stream, a row a record, none even, in chunks that fit in memory.

    The parameters are read as they are when the source is called. Raises ModelError for a loss that draws random numbers, where the
    stream's reader has no draws by record.
    """

    def source(clipping: Clipping) -> ClippedSum:
        total = _TotalOfChunks(clipping, stream.params)
        with without_draws() if stream.draws is None else drawing_by_record(stream.draws):
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
