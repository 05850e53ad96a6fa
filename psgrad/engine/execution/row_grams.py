"""Inner products of all rows of a set with one another, or with those of another set, by their factors.

As many rows as memory holds are multiplied with all others, chunk by chunk. And how many operations such
products are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from psgrad.engine.execution.chunk_memory import factor_bytes
from psgrad.engine.execution.examples import Examples
from psgrad.engine.execution.output_rows import OutputRows
from psgrad.engine.gradients import PerSampleGradients
from psgrad.engine.gradients.inner.inner_products import inner_seconds
from psgrad.engine.gradients.machine import machine

# Bytes that the factors of rows may take that are held against all others at once.
_SLAB_BYTES = 1 << 30
# A Gram matrix has this many slabs, each multiplied with the rows that follow, where the numbers of a row's
# factors times the rows are at least _WORTH_PASSES times those of the parameters. Else a pass takes longer.
_PASSES, _WORTH_PASSES = 4, 12
# Rows whose inner products are priced, and bytes of their factors at most.
_PRICED, _PRICED_BYTES = 1024, 64 << 20


def gram_matrix(rows: Examples, most_bytes: int = _SLAB_BYTES) -> torch.Tensor:
    """[N, N] float64, on the rows' device: the inner products of all rows with one another. most_bytes: of
    factors that are held.
    """
    whole = torch.empty(len(rows), len(rows), dtype=torch.float64, device=rows.device)
    for held, slab in _slabs(rows, most_bytes, passes=_PASSES):
        _add_products(whole, rows, held, slab, start=held.start)
        whole[held, held.stop :] = whole[held.stop :, held].t()
    return whole


def inner_products(rows: Examples, others: Examples, most_bytes: int = _SLAB_BYTES) -> torch.Tensor:
    """[N, M] float64, on the rows' device: the inner products of all rows with all others, by the factors of
    both. most_bytes: of the others' factors that are held.
    """
    whole = torch.empty(len(rows), len(others), dtype=torch.float64, device=rows.device)
    for held, slab in _slabs(others, most_bytes):
        _add_products(whole, rows, held, slab)
    return whole


def inner_product_operations(rows: Examples) -> float:
    """Operations that the inner product of two of many rows is predicted to take, at the rate of a large
    matrix product in float64: by the first sample's rows, repeated.
    """
    found = rows.gradients(range(1))
    part = found.parts[0]
    count = max(1, min(_PRICED, _PRICED_BYTES * len(found) // max(factor_bytes(found), 1)))
    places = torch.arange(count, device=rows.device) % len(part)
    many = [gradient.at(places) for gradient in part.gradients.values()]
    on = machine(rows.device)
    seconds = inner_seconds([(each, each) for each in many], on)
    return seconds * on.product_rate(torch.float64) / count**2


def _add_products(
    whole: torch.Tensor, rows: Examples, held: slice, slab: Sequence[PerSampleGradients], start: int = 0
) -> None:
    """Set the columns `held` of `whole`, from row `start` on, to inner products with a slab."""

    def products(gradients: PerSampleGradients) -> dict[str, torch.Tensor]:
        return {"": torch.cat([gradients.inner(each) for each in slab], 1)}

    for found_rows, found in rows.each(products, start=start):
        whole[found_rows, held] = found[""].to(whole.device)


def _slabs(
    rows: Examples, most_bytes: int, passes: int = 1
) -> Iterator[tuple[slice, list[PerSampleGradients]]]:
    """Deferred gradients of the rows, in order, as many at once as may be held: their rows, and the gradients
    chunk by chunk.

    passes: the least number of slabs, where inner products take longer than a pass.
    """
    each = rows.per_sample if isinstance(rows, OutputRows) else 1
    step = rows.agreed_chunk() // each
    most, first, held, slab = rows.count, 0, 0, list[PerSampleGradients]()
    for start in range(0, rows.count, step):
        stop = min(start + step, rows.count)
        slab.append(rows.gradients(range(start, stop)))
        held += factor_bytes(slab[-1])
        if not start:
            numbers = held // (slab[-1].losses.itemsize * len(slab[-1]))
            if len(rows) * numbers >= _WORTH_PASSES * rows.flat.size:
                most = -(-rows.count // passes)
        if held >= most_bytes or stop - first >= most or stop == rows.count:
            yield slice(first * each, stop * each), slab
            first, held, slab = stop, 0, []
