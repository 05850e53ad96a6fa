"""Order statistics: the largest and smallest elements, medians, sorted values, quantiles."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from psgrad.engine.transforms.interpreter import run
from psgrad.engine.transforms.rules.families import aten, first_result, shifted, wrap_dim
from psgrad.engine.transforms.rules.registry import Op, define
from psgrad.engine.transforms.state import state


def _max_all_back(out: torch.Tensor, x: torch.Tensor) -> Any:
    shape = x.shape

    def back(g: torch.Tensor) -> torch.Tensor:
        hit = _equal_to(out, x)
        return torch.where(hit, g / hit.sum(), 0)

    return back if len(shape) else lambda g: g


_STATISTICS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "max": lambda rows: rows.amax(1),
    "min": lambda rows: rows.amin(1),
    # these kernels read memory that stands for several elements (expand) as if it were contiguous
    "median": lambda rows: rows.contiguous().median(1).values,
    "nanmedian": lambda rows: rows.contiguous().nanmedian(1).values,
}
_library = torch.library.Library("psgrad", "FRAGMENT")
_library.define("order_statistic(Tensor rows, str kind) -> Tensor")
_library.impl("order_statistic", lambda rows, kind: _STATISTICS[kind](rows), "CompositeExplicitAutograd")
# [n, k] -> [n]: an order statistic of each row, with the derivative of one over all elements of a tensor:
# those equal to the result share the cotangent. PyTorch's derivatives of the kernels of rows differ.
_order_statistic = torch.ops.psgrad.order_statistic.default


def _equal_to(out: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Which elements are equal to the result, as far as NaN is equal to NaN."""
    return (x == out) | (x.isnan() & out.isnan())


def _order_statistic_back(out: torch.Tensor, rows: torch.Tensor, kind: str) -> Any:
    def back(g: torch.Tensor) -> torch.Tensor:
        hit = _equal_to(out.unsqueeze(1), rows)
        return torch.where(hit, (g / hit.sum(1)).unsqueeze(1), 0)

    return back


def _order_statistic_of_batches(batch: Any, _: Op, rows: torch.Tensor, kind: str) -> torch.Tensor:
    batches = batch.physical(rows)
    return run(_order_statistic, batches.flatten(0, 1), kind).unflatten(0, batches.shape[:2])


define(_order_statistic, vjp={0: _order_statistic_back}, batch=_order_statistic_of_batches)


def _of_samples(kind: str) -> Callable[..., Any]:
    """Batching of an order statistic over all elements. If PyTorch's autograd records, it gets the mean of
    the elements that are equal to the result, with the result written into it.
    """

    def rule(batch: Any, _: Op, x: torch.Tensor) -> torch.Tensor:
        rows = batch.physical(x).flatten(1) if x.dim() else batch.physical(x).unsqueeze(1)
        if not (state.attached and x.is_floating_point()):
            return run(_order_statistic, rows, kind)
        with torch.no_grad():
            out = run(_order_statistic, rows, kind)
            hit = _equal_to(out.unsqueeze(1), rows)
        shown = torch.where(hit, rows / hit.sum(1, keepdim=True), 0).sum(1)
        with torch.no_grad():
            shown.copy_(out)
        return shown

    return rule


for _kind in _STATISTICS:
    define(getattr(aten, _kind).default, vjp={0: _max_all_back}, batch=_of_samples(_kind))


def _pick_back(dim_position: int) -> Any:
    """The VJP of operators that return values and their indices: the cotangent goes to those indices."""

    def make(out: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        shape, dtype, device, index = x.shape, x.dtype, x.device, out[1]
        dim = args[dim_position - 1] if len(args) >= dim_position else kwargs.get("dim", -1)
        keepdim = index.dim() == len(shape)

        def back(g: torch.Tensor) -> torch.Tensor:
            if not len(shape):
                return g
            zeros = torch.zeros(shape, dtype=dtype, device=device)
            if keepdim:
                return zeros.scatter(dim, index, g)
            return zeros.scatter(dim, index.unsqueeze(dim), g.unsqueeze(dim))

        return back

    return first_result(make)


define(
    aten.max.dim,
    aten.min.dim,
    aten.median.dim,
    aten.nanmedian.dim,
    aten.mode.default,
    aten.sort.default,
    vjp={0: _pick_back(1)},
    batch=shifted(1),
)
define(
    aten.sort.stable,
    vjp={0: _pick_back(1)},
    batch=lambda batch, op, x, *, stable, dim=-1, descending=False: op(
        batch.physical(x), stable=stable, dim=wrap_dim(dim, x.dim()) + 1, descending=descending
    ),
)
define(aten.topk.default, aten.kthvalue.default, vjp={0: _pick_back(2)}, batch=shifted(2))
