"""Histograms and hashes, which count each sample's values separately. Their derivative is zero."""

from __future__ import annotations

from typing import Any

import torch

from psgrad.engine.transforms.rules.families import aten, wrap_dim
from psgrad.engine.transforms.rules.registry import Op, constant


def _limits(values: torch.Tensor, low: float, high: float) -> tuple[torch.Tensor, torch.Tensor]:
    """[n, 1] twice: the range of each sample's histogram; the range of its values if none is given."""
    if low == high == 0 and values.shape[1]:
        start, end = values.amin(1, keepdim=True), values.amax(1, keepdim=True)
    else:
        start, end = (values.new_full((len(values), 1), limit) for limit in (low, high))
    half = torch.where(start == end, 0.5, 0.0).to(values.dtype)
    return start - half, end + half


def _histc_batch(
    batch: Any, op: Op, x: torch.Tensor, bins: int = 100, low: float = 0, high: float = 0
) -> torch.Tensor:
    values = batch.physical(x).reshape(batch.size, x.numel())
    start, end = _limits(values, *((low, high) if low != high else (0, 0)))
    place = ((values - start) * bins / (end - start)).long().clamp(0, bins - 1)
    counted = ((values >= start) & (values <= end)).to(values.dtype)
    return values.new_zeros(batch.size, bins).scatter_add(1, place, counted)


constant(aten.histc.default, batch=_histc_batch)


def _between_edges(
    batch: Any, x: torch.Tensor, edges: torch.Tensor, weight: Any, density: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The histogram of each sample, given its edges [n, bins + 1]. A bin does not contain its upper edge,
    except for the last one.
    """
    values, bins = batch.physical(x).reshape(batch.size, x.numel()), edges.shape[1] - 1
    place = torch.searchsorted(edges.contiguous(), values.contiguous(), right=True) - 1
    place = torch.where(values == edges[:, -1:], bins - 1, place)
    counted = (
        torch.ones_like(values)
        if weight is None
        else batch.physical(weight).reshape(batch.size, weight.numel())
    )
    counted = torch.where((values >= edges[:, :1]) & (values <= edges[:, -1:]), counted, 0)
    counts = values.new_zeros(batch.size, bins).scatter_add(1, place.clamp(0, bins - 1), counted)
    return (counts / counts.sum(1, keepdim=True) / edges.diff(dim=1) if density else counts), edges


def _histogram_batch(
    batch: Any,
    op: Op,
    x: torch.Tensor,
    bins: int = 100,
    *,
    range: Any = None,
    weight: Any = None,
    density: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    start, end = _limits(
        batch.physical(x).reshape(batch.size, x.numel()), *(range or (0, 1 if not x.numel() else 0))
    )
    number = torch.arange(bins + 1, dtype=x.dtype, device=x.device)
    step = (end - start) / bins
    # as torch.linspace counts: from either end
    edges = torch.where(number < (bins + 1) // 2, start + step * number, end - step * (bins - number))
    return _between_edges(batch, x, edges, weight, density)


constant(aten.histogram.bin_ct, batch=_histogram_batch)
constant(
    aten.histogram.bins_tensor,
    batch=lambda batch, op, x, edges, *, weight=None, density=False: _between_edges(
        batch, x, batch.physical(edges).clone(), weight, density
    ),
)


def _hash_batch(
    batch: Any, op: Op, x: torch.Tensor, dims: Any = (), *, keepdim: bool = False, **kwargs: Any
) -> torch.Tensor:
    physical = batch.physical(x).reshape(batch.size, *(x.shape or (1,)))
    axes = [wrap_dim(d, x.dim()) + 1 for d in dims] or list(range(1, physical.dim()))
    out = op(physical, axes, keepdim=keepdim, **kwargs)
    return out if x.dim() else out.reshape(batch.size)


constant(aten.hash_tensor.default, batch=_hash_batch)
