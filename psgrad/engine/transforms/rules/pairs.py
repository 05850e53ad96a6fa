"""Pairs of vectors: distances between two sets, bilinear forms."""

from __future__ import annotations

from typing import Any

import torch

from psgrad.engine.transforms.interpreter import run
from psgrad.engine.transforms.rules.families import aten, sum_to
from psgrad.engine.transforms.rules.registry import Op, define, replace

# -- distances --------------------------------------------------------------------------------------------------------------------


@replace(aten.cdist.default)
def _cdist(x: torch.Tensor, y: torch.Tensor, p: float = 2.0, compute_mode: int | None = None) -> torch.Tensor:
    return aten._cdist_forward.default(x, y, p, compute_mode)


def _cdist_batch(batch: Any, op: Op, x: torch.Tensor, y: torch.Tensor, p: float, compute_mode: int | None) -> torch.Tensor:
    rank = max(x.dim(), y.dim())
    return op(batch.aligned(x, rank), batch.aligned(y, rank), p, compute_mode)


def _cdist_x(out: torch.Tensor, x: torch.Tensor, y: torch.Tensor, p: float, compute_mode: int | None) -> Any:
    return lambda g: sum_to(_pull(g, x, y, p, out), x.shape, x.dtype)


def _cdist_y(out: torch.Tensor, x: torch.Tensor, y: torch.Tensor, p: float, compute_mode: int | None) -> Any:
    return lambda g: sum_to(_pull(g.mT, y, x, p, out.mT), y.shape, y.dtype)


def _pull(g: torch.Tensor, x: torch.Tensor, y: torch.Tensor, p: float, distances: torch.Tensor) -> torch.Tensor:
    """The cotangent of `x`, with all leading axes. The kernel does not broadcast."""
    lead = g.shape[:-2]
    full = [t.expand(*lead, *t.shape[-2:]) for t in (x, y)]
    return run(aten._cdist_backward.default, g, *full, p, distances)  # type: ignore[no-any-return]


define(aten._cdist_forward.default, vjp={0: _cdist_x, 1: _cdist_y}, batch=_cdist_batch)


def _cdist_backward_batch(batch: Any, op: Op, g: torch.Tensor, x: torch.Tensor, y: torch.Tensor, p: float, distances: torch.Tensor) -> Any:
    return op(*[batch.physical(t) for t in (g, x, y)], p, batch.physical(distances))


define(aten._cdist_backward.default, batch=_cdist_backward_batch)


@replace(aten._cdist_backward.default)
def _cdist_backward(g: torch.Tensor, x: torch.Tensor, y: torch.Tensor, p: float, distances: torch.Tensor) -> torch.Tensor:
    """What the kernel sums, spelled out pair by pair, for its own derivative. At distance zero the derivative is taken as zero."""
    apart = x.unsqueeze(-2) - y.unsqueeze(-3)
    g, distances = g.unsqueeze(-1), distances.unsqueeze(-1)
    if p == 0:
        return torch.zeros_like(x)
    if p == 1:
        return (g * torch.sgn(apart)).sum(-2)
    if p == float("inf"):
        return (g * torch.sgn(apart) * (apart.abs() == distances)).sum(-2)
    together = distances == 0
    safe = torch.where(together, 1, distances)
    if p == 2:
        return torch.where(together, 0, g * apart / safe).sum(-2)
    size = torch.where(apart == 0, 1, apart.abs())
    return torch.where(apart == 0, 0, g * torch.sgn(apart) * (size / safe) ** (p - 1)).sum(-2)


@replace(aten._pdist_forward.default)
def _pdist(x: torch.Tensor, p: float = 2.0) -> torch.Tensor:
    """The pairs above the diagonal; by differences, as the way through a matrix product loses digits where two points are close."""
    first, second = torch.triu_indices(len(x), len(x), 1, device=x.device).unbind()
    by_differences = 2
    return aten.index.Tensor(aten._cdist_forward.default(x, x, p, by_differences), [first, second])


# -- bilinear forms -----------------------------------------------------------------------------------------------------------------


@replace(aten.bilinear.default)
def _bilinear(x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """A linear layer from x to one vector an output feature, each then multiplied with y."""
    outputs, inputs, others = weight.shape
    vectors = aten.linear.default(x, weight.transpose(1, 2).reshape(outputs * others, inputs))
    out = torch.matmul(vectors.unflatten(-1, (outputs, others)), y.unsqueeze(-1)).squeeze(-1)
    return out if bias is None else out + bias
