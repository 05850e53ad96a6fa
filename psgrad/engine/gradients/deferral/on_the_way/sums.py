"""Sums of deferred values, with others and over their own axes."""

from __future__ import annotations

import math
from typing import Any

import torch

from psgrad.engine.gradients.deferral import linear
from psgrad.engine.gradients.deferral.on_the_way.each import Waiting, of_each, reshaped, scaled
from psgrad.engine.gradients.placed import DeferredGradient, Placed, term_of
from psgrad.engine.transforms.batching import Batch
from psgrad.engine.transforms.operators import Op
from psgrad.engine.transforms.rules.families import wrap_dim

aten = torch.ops.aten


def terms_of(batch: Batch, tensor: torch.Tensor, value: DeferredGradient | None) -> tuple[Placed, ...]:
    return value.terms if value is not None else (Placed.plain(term_of(batch, tensor)),)


def _add(batch: Batch, op: Op, waiting: Waiting, args: Any, kwargs: Any) -> Any:
    alpha = kwargs.get("alpha", 1)
    if not all(isinstance(a, torch.Tensor) for a in args) or args[0].shape != args[1].shape or args[0].dtype != args[1].dtype:
        return NotImplemented
    if op is aten.sub.Tensor:
        alpha = -alpha
    known = next(w for w in waiting if w is not None)
    first, second = (terms_of(batch, argument, value) for argument, value in zip(args, waiting, strict=True))
    return known.with_terms([*first, *(p if alpha == 1 else Placed(p.term.scaled(float(alpha)), p.layout) for p in second)])


def _sum(batch: Batch, op: Op, waiting: Any, args: Any, kwargs: Any) -> Any:
    value = waiting[0]
    rank = len(value.shape)
    dims, keep = [*args[1:], *(None, False)[len(args) - 1 :]][:2]
    if kwargs.get("dtype") not in (None, value.dtype):
        return NotImplemented
    gone = {wrap_dim(d, rank) for d in dims} if dims else set(range(rank))
    shape = [1 if d in gone else size for d, size in enumerate(value.shape)]
    short = [size for d, size in enumerate(value.shape) if d not in gone]
    total = of_each(batch, value, shape, lambda placed: linear.summed(placed, gone))
    if total is NotImplemented or keep:
        return total
    return reshaped(total, short)


def _mean(batch: Batch, op: Op, waiting: Any, args: Any, kwargs: Any) -> Any:
    total = _sum(batch, op, waiting, args, kwargs)
    if total is NotImplemented:
        return total
    value = waiting[0]
    dims = args[1] if len(args) > 1 and args[1] else range(len(value.shape))
    return scaled(total, 1 / max(math.prod(value.shape[d] for d in dims), 1))


SUMS: dict[Op, Any] = {
    aten.add.Tensor: _add,
    aten.sub.Tensor: _add,
    aten.sum.default: _sum,
    aten.sum.dim_IntList: _sum,
    aten.mean.default: _mean,
    aten.mean.dim: _mean,
}
