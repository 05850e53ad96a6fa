"""Embedding: a lookup of rows of a table; EmbeddingBag: a lookup, and one sum, mean or maximum a bag.

PyTorch's kernel of EmbeddingBag does both at once and can't separate samples. As two steps, the lookup is
`embedding`, whose weight gradient a per-sample query never materialises, and the bags are segments of its
rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch

from psgrad.engine.transforms import diagnostics
from psgrad.engine.transforms.rules.families import aten, linear
from psgrad.engine.transforms.rules.registry import Op, define, refuse, replace
from psgrad.engine.transforms.state import state
from psgrad.engine.transforms.tracer import Tracer, innermost
from psgrad.errors import TransformError


def _embedding_back(
    out: torch.Tensor,
    weight: torch.Tensor,
    index: torch.Tensor,
    padding_idx: int = -1,
    scale: bool = False,
    sparse: bool = False,
) -> Callable[[torch.Tensor], torch.Tensor]:
    if scale:
        _refuse_scale()
    count = weight.shape[0]
    return lambda g: aten.embedding_dense_backward.default(g, index, count, padding_idx, False)


def _refuse_scale(layer: str = "embedding") -> NoReturn:
    raise TransformError(
        f"an {layer} with scale_grad_by_freq=True{diagnostics.where()}: its gradient depends on the whole"
        " batch",
        hint=f"build the {layer} with scale_grad_by_freq=False",
    )


def _embedding_batch(
    batch: Any,
    op: Op,
    weight: torch.Tensor,
    index: torch.Tensor,
    padding_idx: int = -1,
    scale: bool = False,
    sparse: bool = False,
) -> torch.Tensor:
    if scale and innermost(weight).requires_grad:
        _refuse_scale()  # outer autograd would count all samples' tokens, or none of a mapped table's
    if not batch.is_mapped(weight):
        return op(weight, batch.raw(index), padding_idx, scale, sparse)
    places = batch.physical(index).long()
    out = looked_up(batch.physical(weight), 1, places.reshape(batch.size, index.numel())).reshape(
        *places.shape, weight.shape[1]
    )
    if padding_idx < 0:
        return out
    # Each sample has a padding row in its own table.
    return torch.where((batch.raw(index) == padding_idx).unsqueeze(-1), _without_gradient(out), out)


def _without_gradient(x: torch.Tensor) -> torch.Tensor:
    """The values of x, with a tangent but without a cotangent: the padding row of a table of one row."""
    row = torch.zeros((), dtype=torch.long, device=x.device)
    return aten.embedding.default(x.reshape(1, x.numel()), row, 0).reshape(x.shape)


def looked_up(x: torch.Tensor, dim: int, places: torch.Tensor) -> torch.Tensor:
    """The slices of each sample's part of `x` [n, ...] along an axis, at its own `places` [n, k]."""
    # gather saves `x` for its derivative, which doesn't need it: a write to `x` would be an error
    if state.attached:
        x = x.movedim(dim, 1)
        samples = torch.arange(x.shape[0], device=x.device).unsqueeze(1)
        outside = x.shape[1]  # so that a negative place is an error, as in the lookup operators
        return x[samples, torch.where(places < 0, outside, places)].movedim(1, dim)
    behind = x.dim() - dim - 1
    spread = places.reshape(places.shape[0], *(1,) * (dim - 1), places.shape[1], *(1,) * behind)
    return torch.gather(x, dim, spread.expand(*x.shape[:dim], -1, *x.shape[dim + 1 :]))


def _embedding_backward_batch(
    batch: Any, op: Op, g: torch.Tensor, index: torch.Tensor, count: int, padding_idx: int, scale: bool
) -> torch.Tensor:
    return scatter_rows(batch.physical(g), batch.physical(index), count, padding_idx)


def scatter_rows(g: torch.Tensor, index: torch.Tensor, count: int, padding_idx: int = -1) -> torch.Tensor:
    """[n, count, d] from g [n, *t, d] and index [n, *t]: rows added where their index says; those of
    `padding_idx` left out.
    """
    n, d = g.shape[0], g.shape[-1]
    count_of_rows = index.shape[1:].numel()
    rows, places = g.reshape(n, count_of_rows, d), index.reshape(n, count_of_rows)
    if padding_idx >= 0:
        rows = rows.masked_fill((places == padding_idx).unsqueeze(-1), 0)
    flat = (places + torch.arange(n, device=g.device).unsqueeze(1) * count).reshape(-1)
    tables = torch.zeros(n * count, d, dtype=g.dtype, device=g.device)
    if isinstance(rows, Tracer) or isinstance(
        flat, Tracer
    ):  # another level below may have samples of its own
        return tables.index_add(0, flat, rows.flatten(0, 1)).reshape(n, count, d)
    return tables.index_add_(0, flat, rows.flatten(0, 1)).reshape(n, count, d)


linear(aten.embedding.default, back=_embedding_back, batch=_embedding_batch)
define(
    aten.embedding_dense_backward.default,
    vjp={
        0: lambda out, g, index, count, padding_idx, scale: (
            lambda h: _embedding_without_padding(h, index, padding_idx)
        )
    },
    batch=_embedding_backward_batch,
)


def _embedding_without_padding(h: torch.Tensor, index: torch.Tensor, padding_idx: int) -> torch.Tensor:
    out = aten.embedding.default(h, index)
    return (
        out
        if padding_idx < 0
        else torch.where((index == padding_idx).unsqueeze(-1), torch.zeros_like(out), out)
    )


# -- bags ----------------------------------------------------------------------------------------------------

SUM, MEAN, MAX = range(3)


@replace(aten._embedding_bag.default)
@replace(aten._embedding_bag_forward_only.default)
def _embedding_bag(
    weight: torch.Tensor,
    index: torch.Tensor,
    offsets: torch.Tensor,
    scale: bool = False,
    mode: int = SUM,
    sparse: bool = False,
    per_sample_weights: torch.Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int = -1,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    if scale:
        _refuse_scale("embedding bag")
    bags, positions = offsets.shape[0], index.shape[0]
    # A position belongs to the last bag that starts at or before it: if several start there, all but that one
    # are empty.
    order = torch.arange(positions, dtype=offsets.dtype, device=offsets.device)
    bag = torch.searchsorted(offsets.contiguous(), order, right=True) - 1
    counted = index != padding_idx if padding_idx >= 0 else torch.ones_like(index, dtype=torch.bool)
    sizes = torch.zeros(bags, dtype=torch.long, device=bag.device).index_add(0, bag, counted.long())
    rows = aten.embedding.default(weight, index)
    if mode == MAX:
        out = _largest(rows, bag, counted, bags)
    else:
        if per_sample_weights is not None:
            rows = rows * per_sample_weights.unsqueeze(1)
        rows = torch.where(counted.unsqueeze(1), rows, 0)
        out = torch.zeros(bags, rows.shape[1], dtype=rows.dtype, device=rows.device).index_add(0, bag, rows)
        out = out / sizes.clamp(min=1).unsqueeze(1) if mode == MEAN else out
    real = slice(bags - include_last_offset)  # the last offset may be the end of the last bag
    return out[real], bag, sizes[real], sizes[real]


@refuse(aten.embedding_renorm.default)
def _embedding_renorm(
    weight: torch.Tensor, index: torch.Tensor, max_norm: float, norm_type: float
) -> torch.Tensor:
    raise TransformError(
        f"an embedding with max_norm={max_norm:g}{diagnostics.where()}: its forward rescales rows of the"
        " table",
        hint="build it with max_norm=None, and keep the norms small elsewhere, for instance after each step",
    )


def _largest(rows: torch.Tensor, bag: torch.Tensor, counted: torch.Tensor, bags: int) -> torch.Tensor:
    """For each bag and feature the largest value, whose cotangent goes to its first position; zero in an
    empty bag.

    NaN is treated as in PyTorch's kernel, which keeps a value if it is greater than all before: NaN at the
    first position is the result, elsewhere it is skipped.
    """
    positions, features = rows.shape
    if not positions:
        return torch.zeros(bags, features, dtype=rows.dtype, device=rows.device)
    order = torch.arange(positions, device=rows.device)
    begins = order == _earliest(torch.where(counted, order, positions), bag, bags).gather(0, bag)
    where, counted = bag.unsqueeze(1).expand(positions, features), counted.unsqueeze(1)
    values = torch.where(counted, rows.detach(), -torch.inf)
    values = torch.where(
        values.isnan(), torch.where(begins, torch.inf, -torch.inf).to(rows.dtype).unsqueeze(1), values
    )
    lowest = torch.full((bags, features), -torch.inf, dtype=rows.dtype, device=rows.device)
    largest = lowest.scatter_reduce(0, where, values, "amax").gather(0, where)
    first = _earliest(torch.where((values == largest) & counted, order.unsqueeze(1), positions), where, bags)
    return torch.where(first < positions, rows.gather(0, first.clamp(max=positions - 1)), 0)


def _earliest(order: torch.Tensor, bag: torch.Tensor, bags: int) -> torch.Tensor:
    """For each bag the smallest of its entries of `order` along axis 0; the number of positions in an empty
    bag.
    """
    none = torch.full((bags, *order.shape[1:]), order.shape[0], dtype=order.dtype, device=order.device)
    return none.scatter_reduce(0, bag, order, "amin")
