"""Writes through views: what a base becomes when one of its views is overwritten."""

from __future__ import annotations

from typing import Any

import torch

from psgrad.engine.transforms.rules.complex import write_part
from psgrad.engine.transforms.rules.families import aten
from psgrad.engine.transforms.rules.registry import Op
from psgrad.engine.transforms.rules.views import inverse_permutation


def write_through(
    op: Op, base: Any, new: Any, rest: tuple[Any, ...], kwargs: dict[str, Any], output: int | None
) -> Any:
    """The base after its view, made by `op(base, *rest)` (result number `output` of it), was overwritten by
    `new`.

    None where a write through this kind of view is not supported (an expanded tensor has several elements at
    one place).
    """
    if op in (
        aten.view.default,
        aten._unsafe_view.default,
        aten.squeeze.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
        aten.unsqueeze.default,
    ):
        return new.reshape(base.shape)
    if op is aten.t.default:
        return aten.t.default(new)
    if op is aten.transpose.int:
        return aten.transpose.int(new, *rest)
    if op is aten.permute.default:
        return aten.permute.default(new, inverse_permutation(rest[0]))
    if op is aten.alias.default:
        return new
    if op is aten.select.int:
        return aten.select_scatter.default(base, new, *rest)
    if op is aten.slice.Tensor:
        return aten.slice_scatter.default(base, new, *rest)
    if op is aten.diagonal.default:
        return aten.diagonal_scatter.default(base, new, *rest)
    if op is aten.as_strided.default:
        return aten.as_strided_scatter.default(base, new, *rest)
    if op is aten.unbind.int and output is not None:
        return aten.select_scatter.default(base, new, rest[0] if rest else 0, output)
    if op in (aten.split.Tensor, aten.split_with_sizes.default) and output is not None:
        dim = rest[1] if len(rest) > 1 else 0
        sizes = rest[0]
        start = output * sizes if isinstance(sizes, int) else sum(sizes[:output])
        return aten.slice_scatter.default(base, new, dim, start, start + new.shape[dim], 1)
    if op in (aten.expand.default, aten.unfold.default):
        return _write_by_place(op, base, new, rest)
    return write_part(op, base, new)


def _write_by_place(
    op: Op, base: torch.Tensor, new: torch.Tensor, rest: tuple[Any, ...]
) -> torch.Tensor | None:
    """For views in which a place of the base may occur several times: right as long as none does."""
    places = op(torch.arange(base.numel(), device=base.device).reshape(base.shape), *rest).reshape(-1)
    if places.unique().numel() != places.numel():
        return None
    return base.reshape(-1).scatter(0, places, new.reshape(-1)).reshape(base.shape)
