"""How many records are computed together: a number for which no record's numbers depend on the others.

Kernels round a sample's numbers by the size of the batch, and some by its place in it. So a private run has
chunks of one size. Before that size is used, copies of some records are computed in all places, and these
records together: each must give the same numbers, to the last bit. Where no size does so, records are
computed one by one. The size depends on the memory of the machine and on the expected size of a batch, which
is public, not on how many records were drawn.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from psgrad.engine.execution.memory import is_out_of_memory
from psgrad.engine.execution.streaming import PREDICTED_FROM, Stream
from psgrad.engine.gradients import PerSampleGradients, per_sample_gradients
from psgrad.engine.gradients.bounded_sums import in_type
from psgrad.engine.gradients.per_sample import BatchPass
from psgrad.engine.gradients.terms import accumulating_dtype, blocks
from psgrad.engine.privacy.full_precision import in_full_precision
from psgrad.engine.privacy.record_draws import drawn_outside_of_torch
from psgrad.errors import PsgradError

# Kernels take one of these numbers of samples, or numbers, at a time. In a batch of another size the last
# ones are often rounded in another way than the others.
_MULTIPLES = (8, 16, 64)
_SMALLER = (64, 32, 16, 8)
ROWS_TRIED = 8
"""A kernel that rounds by place gives many numbers alike: so many records are tried, as far as there are."""


def choose_samples(stream: Stream, count: int, expected: float | None = None) -> int:
    """How many of a stream's rows to compute together from now on; 1 where rows differ in length. The
    stream's chunks have this size, too.

    count: rows that can be read now, at least one. expected: of a batch, a public number; None for as many as
    fit in memory.
    """
    block = stream.load_block(0, min(count, ROWS_TRIED))
    if block.ragged is not None:
        return 1
    automatic, dims = stream.automatic, (0, None if block.target is None else 0)
    stream.choose_chunk_size(PREDICTED_FROM, readable=count)  # a run has many batches
    most = stream.chunk_size
    sizes = _sizes(most, expected) if automatic else [most, *_below(most)]
    check = partial(records_stay, stream.loss, stream.params, block.inputs, block.target, in_dims=dims)
    try:
        found = _first(sizes, partial(check, has_aux=True, randomness=stream.randomness))
    except PsgradError:
        raise
    except Exception:
        stream.gradients_at(range(min(count, ROWS_TRIED)))  # which names the row that the model fails on
        raise
    if found == 1 and most > 1 and drawn_outside_of_torch():
        stream.say(
            "the model draws random numbers by NumPy or Python's random, so records are computed one by one,"
            " each with numbers of its own; torch.rand and its like draw for many records at once"
        )
    elif found == 1 and most > 1:
        stream.say(
            f"the kernels of this model round a record by its place in a chunk of {sizes[0]}, so records are"
            " computed one by one; a multiple of 64 as engine.chunk_size may be faster"
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
    """How many samples to compute together, of batches in memory that are like this one: 64 at most.

    expected: of a batch, a public number. The other arguments are those of `per_sample_gradients`.
    """
    return _first(_sizes(_SMALLER[0], expected), partial(records_stay, loss, params, *batch, **options))


def records_stay(
    loss: Callable[..., Any],
    params: Mapping[str, torch.Tensor],
    *batch: Any,
    samples: int,
    in_dims: Any = 0,
    has_aux: bool = False,
    randomness: str = "error",
) -> bool:
    """Whether the numbers of each sample of a batch, of the first few, stay the same, to the last bit, in
    each place of a batch of `samples` samples, and beside the others. The other arguments are those of
    `per_sample_gradients`.
    """
    options: dict[str, Any] = {"in_dims": in_dims, "has_aux": has_aux, "randomness": randomness}
    with torch.no_grad(), in_full_precision(loss, params) as loss:
        job = BatchPass(loss, params, batch, **options)
        places = torch.arange(samples, device=next(iter(params.values())).device)

        def gradients(rows: torch.Tensor) -> PerSampleGradients:
            return per_sample_gradients(loss, params, *job.batch_of(rows), **options)

        rows = min(job.level.size, ROWS_TRIED)
        first: list[list[torch.Tensor]] = []  # of each row, and of each of its numbers, [1, ...]
        for row in range(rows):
            numbers = list(_numbers(gradients(torch.full_like(places, row))))
            if drawn_outside_of_torch():
                return False
            if not all(_same(x, x[:1]) for x in numbers):
                return False
            first.append([x[:1].clone() for x in numbers])
        mixed = gradients(places % rows)
        if len(mixed.parts) > 1:  # records that disagree on a branch are computed apart
            return True
        each = zip(_numbers(mixed), *first, strict=True)
        return all(_same(x, torch.cat(own)[places[: len(x)] % rows]) for x, *own in each)


def _first(sizes: Sequence[int], check: Callable[..., bool]) -> int:
    """The first of these numbers of samples that passes the check; 1 if none does, or memory runs out."""

    def passes(samples: int) -> bool:
        try:
            return samples == 1 or check(samples=samples)
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
    return list(dict.fromkeys([*rounded, *_below(min(most, wanted))]))


def _below(most: int) -> list[int]:
    """Smaller numbers, multiples of the processor's."""
    return [size for size in (most // 64 * 64, most // 16 * 16, *_SMALLER) if 0 < size < most]


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
