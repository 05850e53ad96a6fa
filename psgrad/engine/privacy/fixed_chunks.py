"""How many records are computed together: a number for which no record's numbers depend on the others.

Kernels round a sample's numbers by the size of the batch, and some by its place in it. So a private run has
chunks of one size, and before that size is used, copies of a record are computed in all places, and between
another record: each must give the same numbers, to the last bit. Where no size does so, records are computed
one by one. The size depends on the memory of the machine and on the expected size of a batch, which is
public, not on how many records were drawn.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from psgrad.engine.execution.memory import is_out_of_memory
from psgrad.engine.execution.streaming import PREDICTED_FROM, Stream
from psgrad.engine.gradients import PerSampleGradients, per_sample_gradients
from psgrad.engine.gradients.bounded_sums import in_type
from psgrad.engine.gradients.per_sample import Pass
from psgrad.engine.gradients.terms import accumulating_dtype, blocks
from psgrad.engine.privacy.full_precision import in_full_precision

# Kernels take so many samples at a time, the processor's own number of them or a multiple. In a batch of
# another size the last samples are often rounded in another way than the others.
_MULTIPLES = (4, 8, 16)
_SMALLER = (64, 32, 16, 8)


def settle_samples(stream: Stream, count: int, expected: float | None = None) -> int:
    """How many of a stream's rows to compute together from now on; 1 where rows differ in length. The
    stream's chunks have this size, too.

    count: rows that can be read now, at least one. expected: of a batch, a public number; None for as many as
    fit in memory.
    """
    block = stream.load_block(0, min(count, 2))
    if block.ragged is not None:
        return 1
    automatic = stream.automatic
    stream.settle_chunk_size(PREDICTED_FROM, readable=count)  # a run has many batches
    most = stream.chunk_size
    sizes = _sizes(most, expected) if automatic else [most, *_below(most)]

    found = _first(sizes, lambda samples: bool(stream.computed(RecordsStay(samples), block)))
    if found == 1 and most > 1:
        stream.say(
            f"the kernels of this model round a record by its place in a chunk of {sizes[0]}, so records are"
            " computed one by one"
        )
    stream.fix_chunk_size(found)
    return found


def independent_samples(
    loss: Callable[..., Any],
    params: Mapping[str, torch.Tensor],
    *batch: Any,
    expected: float | None = None,
    **options: Any,
) -> int:
    """How many samples to compute together, of batches in memory that are like this one: 64 at most, and 16
    for an unknown size.

    expected: of a batch, a public number. The other arguments are those of `per_sample_gradients`.
    """
    most = _SMALLER[2] if expected is None else _SMALLER[0]
    return _first(
        _sizes(most, expected), lambda samples: RecordsStay(samples)(loss, params, *batch, **options)
    )


def _first(sizes: Iterable[int], checked: Callable[[int], bool]) -> int:
    """The first of these numbers of samples that passes the check; 1 if none does, or memory runs out."""

    def passes(samples: int) -> bool:
        try:
            return samples == 1 or checked(samples)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            return False

    return next(filter(passes, sizes), 1)


def _sizes(most: int, expected: float | None) -> list[int]:
    """Numbers of samples to try, the best first.

    A batch of the expected size, and two standard deviations more, takes as few chunks as possible, and fills
    them.
    """
    likely = math.inf if expected is None else expected + 2 * math.sqrt(expected)
    wanted = most if likely >= most * 64 else math.ceil(likely / math.ceil(likely / most))
    rounded = [min(most, math.ceil(wanted / multiple) * multiple) for multiple in _MULTIPLES]
    return [*rounded, *_below(min(most, wanted))]


def _below(most: int) -> list[int]:
    """Smaller numbers, multiples of the processor's."""
    return [size for size in (most // 16 * 16, *_SMALLER) if 0 < size < most]


class RecordsStay:
    """Whether the numbers of the first and the last sample of a batch stay the same, to the last bit, in each
    place of a batch of `samples` samples: a computation for a stream, or by itself.
    """

    keeps_factors = True

    def __init__(self, samples: int) -> None:
        self.samples = samples

    @torch.no_grad()
    def __call__(
        self,
        loss: Callable[..., Any],
        params: Mapping[str, torch.Tensor],
        *batch: Any,
        in_dims: Any = 0,
        has_aux: bool = False,
        randomness: str = "error",
    ) -> bool:
        """The arguments are those of `per_sample_gradients`."""
        options: dict[str, Any] = {"in_dims": in_dims, "has_aux": has_aux, "randomness": randomness}
        with in_full_precision(loss, params) as loss:
            job = Pass(loss, params, batch, **options)
            device = next(iter(params.values())).device

            def gradients(rows: torch.Tensor) -> PerSampleGradients:
                return per_sample_gradients(loss, params, *job.batch_of(rows.to(device)), **options)

            places, last = torch.arange(self.samples), job.level.size - 1
            copies = [
                list(_numbers(gradients(torch.full_like(places, row))))
                for row in ((0, last) if last else (0,))
            ]
            if not all(_same(x, x[:1]) for numbers in copies for x in numbers):
                return False
            mixed = gradients(places % 2 * last)
            if not last or len(mixed.parts) > 1:  # of one kind only, or computed apart
                return True
            return all(
                _same(both[::2], x[: len(both[::2])]) and _same(both[1::2], y[: len(both[1::2])])
                for x, y, both in zip(*copies, _numbers(mixed), strict=True)
            )


def _numbers(gradients: PerSampleGradients) -> Iterator[torch.Tensor]:
    """[samples, ...] each: losses, factors, and values of the first samples."""
    yield gradients.losses
    samples = len(gradients)
    for gradient in gradients.gradients.values():
        yield from (x for x in gradient.factors if x.dim() and len(x) == samples and x.stride(0))
        if gradient.terms:
            kind = accumulating_dtype(gradient.terms[0].term.dtype)
            first = next(blocks(samples, 3 * kind.itemsize * gradient.shape.numel(), gradient.device))
            yield in_type(gradient, first, kind).materialise()


def _same(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether two tensors, one of which may have one row for all, are equal; NaN equals NaN."""
    return bool(((x == y) | ((x != x) & (y != y))).all())
