"""Indexing, gathering, scattering, masks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from psgrad.engine.transforms.rules.embedding import looked_up
from psgrad.engine.transforms.rules.families import aten, linear, sum_to, unchanged, wrap_dim
from psgrad.engine.transforms.rules.registry import Op, define, replace


def along(
    batch: Any, op: Op, x: torch.Tensor, dim: int, index: torch.Tensor, *rest: Any, **kwargs: Any
) -> torch.Tensor:
    """Batching for operators that use an index along one axis."""
    physical, places = batch.physical(x), batch.physical(index)
    source = [batch.physical(r) if isinstance(r, torch.Tensor) else r for r in rest]
    if x.dim() == 0:
        lifted = [_as_vector(t) if isinstance(t, torch.Tensor) else t for t in source]
        out = op(physical.unsqueeze(1), 1, _as_vector(places), *lifted, **kwargs)
        return out.reshape(physical.shape if op is not aten.gather.default else places.shape)
    if index.dim() == 0:  # a single element of a vector
        places = places.unsqueeze(1)
        source = [t.unsqueeze(1) if isinstance(t, torch.Tensor) and t.dim() == 1 else t for t in source]
        out = op(physical, 1, places, *source, **kwargs)
        return out.squeeze(1) if op is aten.gather.default else out
    return op(physical, wrap_dim(dim, x.dim()) + 1, places, *source, **kwargs)


def _as_vector(physical: torch.Tensor) -> torch.Tensor:
    """[n, k]: a vector or a scalar of each sample, as a vector."""
    return physical if physical.dim() == 2 else physical.unsqueeze(1)


def _gather_back(
    out: torch.Tensor, x: torch.Tensor, dim: int, index: torch.Tensor, *args: Any, **kwargs: Any
) -> Any:
    shape, dtype, device = x.shape, x.dtype, x.device
    return lambda g: aten.scatter_add.default(torch.zeros(shape, dtype=dtype, device=device), dim, index, g)


linear(aten.gather.default, back=_gather_back, batch=along)
define(
    aten.scatter_add.default,
    vjp={
        0: unchanged,
        3: lambda out, x, dim, index, source: lambda g: fit(aten.gather.default(g, dim, index), source.shape),
    },
    batch=along,
)
define(
    aten.scatter.src,
    vjp={
        0: lambda out, x, dim, index, source: lambda g: aten.scatter.value(g, dim, index, 0),
        3: lambda out, x, dim, index, source: lambda g: fit(aten.gather.default(g, dim, index), source.shape),
    },
    jvp={
        3: lambda out, x, dim, index, source: lambda t: aten.scatter.src(torch.zeros_like(out), dim, index, t)
    },
    batch=along,
)
define(
    aten.scatter.value,
    vjp={0: lambda out, x, dim, index, value: lambda g: aten.scatter.value(g, dim, index, 0)},
    batch=along,
)


def fit(g: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """The cotangent of the part of the source that the index uses, padded with zeros to the source's
    shape.
    """
    if g.shape == shape:
        return g
    pad: list[int] = []
    for length, padded_length in zip(reversed(g.shape), reversed(shape), strict=True):
        pad += [0, padded_length - length]
    return torch.constant_pad_nd(g, pad)


def _index_select_batch(batch: Any, op: Op, x: torch.Tensor, dim: int, index: torch.Tensor) -> torch.Tensor:
    if x.dim() == 0:
        return batch.physical(x).clone()
    dim = wrap_dim(dim, x.dim())
    if not batch.is_mapped(index):
        return op(batch.physical(x), dim + 1, index)
    return looked_up(batch.physical(x), dim + 1, _as_vector(batch.raw(index)))


def _index_select_back(out: torch.Tensor, x: torch.Tensor, dim: int, index: torch.Tensor) -> Any:
    shape = x.shape
    return lambda g: aten.index_select_backward.default(g, shape, dim, index) if len(shape) else g


linear(aten.index_select.default, back=_index_select_back, batch=_index_select_batch)


def _index_add_batch(
    batch: Any,
    op: Op,
    x: torch.Tensor,
    dim: int,
    index: torch.Tensor,
    source: torch.Tensor,
    *,
    alpha: Any = 1,
) -> torch.Tensor:
    dim = wrap_dim(dim, x.dim())
    if x.dim() == 0:  # a scalar is treated as a vector of length one
        return batch.physical(x) + alpha * _as_vector(batch.physical(source)).sum(1)
    if not batch.is_mapped(index):
        return op(batch.physical(x), dim + 1, index, batch.physical(source), alpha=alpha)
    values = batch.physical(source)
    places = (
        batch.raw(index)
        .reshape(batch.size, *(1,) * dim, index.numel(), *(1,) * (x.dim() - dim - 1))
        .expand(values.shape)
    )
    return torch.scatter_add(batch.physical(x), dim + 1, places, values * alpha)


define(
    aten.index_add.default,
    vjp={
        0: unchanged,
        3: (
            lambda out, x, dim, index, source, alpha=1: (
                lambda g: aten.index_select.default(g, dim, index) * alpha
            )
        ),
    },
    batch=_index_add_batch,
)


def _index_select_backward_batch(
    batch: Any, op: Op, g: torch.Tensor, shape: Sequence[int], dim: int, index: torch.Tensor
) -> torch.Tensor:
    zeros = torch.zeros(shape, dtype=g.dtype, device=g.device)
    return _index_add_batch(batch, aten.index_add.default, zeros, dim, index, g)


define(aten.index_select_backward.default, batch=_index_select_backward_batch)


@replace(aten.index_fill.int_Scalar)
@replace(aten.index_fill.int_Tensor)
def _index_fill(x: torch.Tensor, dim: int, index: torch.Tensor, value: Any) -> torch.Tensor:
    """index_fill by a mask: an element that occurs twice in the index is filled once, and counts once in the
    value's cotangent.
    """
    dim = wrap_dim(dim, x.dim())
    size = x.shape[dim] if x.dim() else 1
    filled = torch.zeros(size, dtype=torch.bool, device=x.device)
    filled = aten.scatter.value(filled, 0, torch.where(index < 0, index + size, index).reshape(-1), True)
    return x.masked_fill(
        filled.reshape(-1, *(1,) * (x.dim() - dim - 1)) if x.dim() else filled.reshape(()), value
    )


# -- x[i, j, ...] --------------------------------------------------------------------------------------------


def _sample_places(batch: Any, x: torch.Tensor, indices: Sequence[Any]) -> list[Any]:
    """Indices into the physical value: each sample reads its own part. If all samples share the indices, the
    sample axis has no index.
    """
    if not any(batch.is_mapped(index) for index in indices):
        return [None, *indices]
    rank = max(index.dim() for index in indices if index is not None)
    aligned = [batch.aligned(index, rank) if index is not None else None for index in indices]
    samples = torch.arange(batch.size, device=x.device).reshape(batch.size, *(1,) * rank)
    return [samples, *aligned]


def _adjacent(indices: Sequence[Any]) -> bool:
    places = [i for i, index in enumerate(indices) if index is not None]
    return places == list(range(places[0], places[-1] + 1))


def _restore(out: torch.Tensor, x: torch.Tensor, indices: Sequence[Any]) -> torch.Tensor:
    """The result with the sample axis in front. If indices are not adjacent, PyTorch puts their axes in front
    of all others.
    """
    if _adjacent(indices):
        return out
    rank = torch.broadcast_shapes(
        *[i.shape for i in indices if i is not None and i.dtype not in (torch.bool, torch.uint8)] or [(1,)]
    )
    return out.movedim(len(rank), 0)


def _counted(batch: Any, indices: Sequence[Any], *, all_masks: bool = False) -> list[Any]:
    """The indices, with masks replaced by the indices of their true elements."""

    def is_mask(i: Any) -> bool:
        return i is not None and i.dtype in (torch.bool, torch.uint8) and (all_masks or batch.is_mapped(i))

    return [part for i in indices for part in (i.nonzero().unbind(1) if is_mask(i) else [i])]


def _index_batch(batch: Any, op: Op, x: torch.Tensor, indices: Sequence[Any]) -> torch.Tensor:
    indices = _counted(batch, indices)
    places = _sample_places(batch, x, indices)
    out = op(batch.physical(x), places)
    if places[0] is None:
        return _restore(out, x, indices)
    if indices[0] is None and _adjacent(indices):
        # logical result: leading sliced axes, then the index axes; physical: sample and index axes in front,
        # then the sliced ones
        lead = next(i for i, index in enumerate(indices) if index is not None)
        rank = max(i.dim() for i in indices if i is not None)
        moved = out.movedim(list(range(1, 1 + rank)), list(range(1 + lead, 1 + lead + rank)))
        # in the layout of one sample's result in PyTorch: `view` and `as_strided` depend on it
        return moved.contiguous()
    return out


def _index_back(out: torch.Tensor, x: torch.Tensor, indices: Sequence[Any]) -> Any:
    shape, dtype, device = x.shape, x.dtype, x.device
    indexed = [i for i, index in enumerate(indices) if index is not None]
    if (
        x.numel()
        and _adjacent(indices)
        and all(indices[i].dtype in (torch.int64, torch.int32) for i in indexed)
    ):
        return lambda g: _add_at_places(g, shape, indexed[0], [indices[i] for i in indexed])
    return lambda g: aten.index_put.default(torch.zeros(shape, dtype=dtype, device=device), indices, g, True)


def _add_at_places(
    g: torch.Tensor, shape: torch.Size, dim: int, indices: Sequence[torch.Tensor]
) -> torch.Tensor:
    """Zeros of this shape, with `g` added at the indices of neighbouring axes from `dim` on. The axes are
    joined to one axis with one index, for which a deferral policy can keep factors.
    """
    sizes = shape[dim : dim + len(indices)]
    place = indices[0] % sizes[0]
    for index, size in zip(indices[1:], sizes[1:], strict=True):
        place = place * size + index % size
    rank = place.dim()
    one_axis = [*shape[:dim], math.prod(sizes), *shape[dim + len(indices) :]]
    g = g.reshape(*g.shape[:dim], place.numel(), *g.shape[dim + rank :])
    return aten.index_select_backward.default(g, one_axis, dim, place.reshape(-1)).reshape(shape)


linear(aten.index.Tensor, back=_index_back, batch=_index_batch)


def _index_put_batch(
    batch: Any,
    op: Op,
    x: torch.Tensor,
    indices: Sequence[Any],
    values: torch.Tensor,
    accumulate: bool = False,
) -> torch.Tensor:
    chosen = _by_mask(x, indices, values, accumulate)
    if chosen is not None:
        return batch.physical(chosen)
    physical = batch.physical(x)
    indices = _counted(batch, indices, all_masks=True)
    full = [
        index if index is not None else torch.arange(x.shape[i], device=x.device)
        for i, index in enumerate([*indices, *[None] * (x.dim() - len(indices))])
    ]
    return _explicit_put(batch, op, physical, x, indices, full, values, accumulate)


def _by_mask(
    x: torch.Tensor, indices: Sequence[Any], values: torch.Tensor, accumulate: bool = False
) -> torch.Tensor | None:
    """x[mask] = value by `where`, if the value is the same for all true elements; else None."""
    indexed = [i for i, index in enumerate(indices) if index is not None]
    mask = indices[indexed[0]] if len(indexed) == 1 else None
    if mask is None or mask.dtype != torch.bool:
        return None
    behind = x.dim() - indexed[0] - mask.dim()
    if values.dim() > behind:
        if values.shape[values.dim() - behind - 1] != 1:
            return None
        split = values.dim() - behind
        values = values.reshape(*values.shape[: split - 1], *(1,) * mask.dim(), *values.shape[split:])
    return torch.where(mask.reshape(*mask.shape, *(1,) * behind), x + values if accumulate else values, x)


def _explicit_put(
    batch: Any,
    op: Op,
    physical: torch.Tensor,
    x: torch.Tensor,
    indices: Sequence[Any],
    full: list[torch.Tensor],
    values: torch.Tensor,
    accumulate: bool,
) -> torch.Tensor:
    """The write with one index for every axis, so that the sample index can be added without moving axes."""
    indexed = [i for i, index in enumerate(indices) if index is not None]
    index_rank = max(full[i].dim() for i in indexed)
    sliced = [i for i in range(x.dim()) if i not in indexed]
    front = [] if not _adjacent(indices) else [i for i in sliced if i < indexed[0]]
    behind = [i for i in sliced if i not in front]
    rank = len(front) + index_rank + len(behind)
    places: list[torch.Tensor] = [torch.arange(batch.size, device=x.device).reshape(-1, *(1,) * rank)]
    for i in range(x.dim()):
        index = full[i]
        if i in indexed:
            aligned = batch.aligned(index, index_rank)
            lead = aligned.shape[:1] if batch.is_mapped(index) else (1,)
            body = aligned.shape[1:] if batch.is_mapped(index) else aligned.shape
            places.append(
                aligned.reshape(
                    *lead, *(1,) * len(front), *(1,) * (index_rank - len(body)), *body, *(1,) * len(behind)
                )
            )
        else:
            position = front.index(i) if i in front else len(front) + index_rank + behind.index(i)
            places.append(index.reshape(1, *(1,) * position, -1, *(1,) * (rank - position - 1)))
    return op(physical, places, batch.aligned(values, rank), accumulate)


def _index_put_source(
    out: torch.Tensor, x: torch.Tensor, indices: Sequence[Any], values: torch.Tensor, accumulate: bool = False
) -> Any:
    shape, dtype = values.shape, values.dtype
    return lambda g: sum_to(aten.index.Tensor(g, indices), shape, dtype)


define(
    aten.index_put.default,
    vjp={
        0: lambda out, x, indices, values, accumulate=False: (
            lambda g: (
                g
                if accumulate
                else aten.index_put.default(
                    g, indices, torch.zeros((), dtype=g.dtype, device=g.device), False
                )
            )
        ),
        2: _index_put_source,
    },
    # If several values are written to one element, the kernel keeps one. The cotangent goes to all of them,
    # as in PyTorch; the tangent is that of the value that is kept.
    jvp={
        2: lambda out, x, indices, values, accumulate=False: (
            lambda t: aten.index_put.default(torch.zeros_like(out), indices, t.to(out.dtype), accumulate)
        )
    },
    instead=_by_mask,
    batch=_index_put_batch,
)
