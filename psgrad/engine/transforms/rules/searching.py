"""Triangles and one-hot vectors; operators that search, and those whose number of results depends on data."""

from __future__ import annotations

from typing import Any

import torch

from psgrad.engine.transforms import diagnostics
from psgrad.engine.transforms.rules.families import aten, leading
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


def _nonzero_static_batch(
    batch: Any, op: Op, x: torch.Tensor, *, size: int, fill_value: int = -1
) -> torch.Tensor:
    """The indices of the first `size` nonzero elements of each sample, in order, by a stable sort."""
    nonzero = batch.physical(x).reshape(batch.size, x.numel()) != 0
    order = nonzero.logical_not().to(torch.uint8).sort(dim=1, stable=True)[1]
    order = torch.constant_pad_nd(order, [0, max(size - order.shape[1], 0)])[:, :size]
    places = torch.stack(torch.unravel_index(order, x.shape), -1) if x.dim() else order.unsqueeze(-1)[..., :0]
    filled = torch.arange(size, device=x.device) < nonzero.sum(1, keepdim=True)
    return torch.where(filled.unsqueeze(-1), places, fill_value)


constant(aten.nonzero_static.default, batch=_nonzero_static_batch)


def _depends_on_data(batch: Any, op: Op, *args: Any, **kwargs: Any) -> Any:
    raise TransformError(
        f"{op.name().removeprefix('aten::')} is not possible on a value that differs between"
        f" samples{diagnostics.where()}; expected a program that is the same for every sample",
        hint=(
            "a Python number, a branch (if, while, assert) or a shape depends on one sample's data;"
            " write the choice with torch.where, or take the number from outside the function"
        ),
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
