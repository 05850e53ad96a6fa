"""Triangles and one-hot vectors; operators that search and count; and those whose number of results depends
on data.
"""

from __future__ import annotations

from typing import Any

import torch

from psgrad.engine.transforms import diagnostics
from psgrad.engine.transforms.rules.families import aten, leading, one_by_one
from psgrad.engine.transforms.rules.registry import Op, constant, define, replace
from psgrad.errors import TransformError

for _op in (aten.tril.default, aten.triu.default):
    define(
        _op,
        vjp={0: lambda out, x, diagonal=0, op=_op: lambda g: op(g, diagonal)},
        batch=leading,
    )
constant(aten.one_hot.default, batch=leading)


def _search_batch(batch: Any, op: Op, *args: Any, sorter: Any = None, **kwargs: Any) -> torch.Tensor:
    """Batching of searchsorted(boundaries, x) and bucketize(x, boundaries): each sample searches its own
    boundaries.
    """
    x, boundaries = args if op is aten.bucketize.Tensor else args[::-1]
    shared = not batch.is_mapped(boundaries) and not batch.is_mapped(sorter)
    if shared and boundaries.dim() == 1:
        return op(*[batch.raw(a) for a in args], **kwargs, **({} if sorter is None else {"sorter": sorter}))
    lead = boundaries.shape[:-1] if boundaries.dim() > 1 else ()
    places, values = batch.physical(boundaries), batch.physical(x)
    rows = values.reshape(batch.size, *lead, x.shape[-1] if lead else x.numel())
    order = None if sorter is None else batch.physical(sorter)
    return torch.searchsorted(places.contiguous(), rows.contiguous(), sorter=order, **kwargs).reshape(
        values.shape
    )


constant(aten.bucketize.Tensor, aten.searchsorted.Tensor, batch=_search_batch)


constant(
    aten.nonzero_static.default,
    aten.histogram.bin_ct,
    aten.histogram.bins_tensor,
    aten.hash_tensor.default,
    batch=one_by_one,
)


def _histc_batch(
    batch: Any, op: Op, x: torch.Tensor, bins: int = 100, low: float = 0, high: float = 0
) -> torch.Tensor:
    """The counts of each sample, between its own least and largest value if no limits are given."""
    values = batch.physical(x).reshape(batch.size, x.numel())
    if low == high and values.shape[1]:
        start, end = values.amin(1, keepdim=True), values.amax(1, keepdim=True)
    else:
        start, end = (values.new_full((len(values), 1), limit) for limit in (low, high))
    half = torch.where(start == end, 0.5, 0.0).to(values.dtype)
    start, end = start - half, end + half
    place = ((values - start) * bins / (end - start)).long().clamp(0, bins - 1)
    counted = ((values >= start) & (values <= end)).to(values.dtype)
    return values.new_zeros(batch.size, bins).scatter_add(1, place, counted)


constant(aten.histc.default, batch=_histc_batch)


def _depends_on_data(batch: Any, op: Op, *args: Any, **kwargs: Any) -> Any:
    raise TransformError(
        f"{op.name().removeprefix('aten::')} is not possible on a value that differs between"
        f" samples{diagnostics.where()}",
        hint="write the choice with torch.where, or take the number from outside the function",
    )


constant(
    aten._unique2.default,
    aten.unique_dim.default,
    aten.unique_consecutive.default,
    aten.bincount.default,
    batch=_depends_on_data,
)


@replace(aten.masked_select.default)
def _masked_select(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    x, mask = torch.broadcast_tensors(x, mask)
    return x[mask]
