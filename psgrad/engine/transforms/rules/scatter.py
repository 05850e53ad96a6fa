"""Operators that combine several values in one element: scatter_reduce, index_reduce and segment_reduce;
writes by a mask or an index.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from psgrad.engine.transforms.rules.families import aten, cast, wrap_dim
from psgrad.engine.transforms.rules.indexing import along, fit
from psgrad.engine.transforms.rules.registry import JointVJP, Op, define, replace
from psgrad.engine.transforms.state import state
from psgrad.engine.transforms.tracer import Tracer

# -- sums, means, products and extremes by index -------------------------------------------------------------


def _reduce(
    x: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor, kind: str, include_self: bool
) -> Any:
    return aten.scatter_reduce.two(x, dim, index, source, kind, include_self=include_self)


def _scattered(x: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """The sum of the elements that the index sends to each place."""
    return aten.scatter_add.default(torch.zeros_like(x), dim, index, source)


def _instead(
    x: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor, kind: str, include_self: bool = True
) -> Any:
    """Sums and means by scatter_add, which has derivatives; None for other reductions."""
    if kind not in ("sum", "mean"):
        return None
    start = x if include_self else aten.scatter.value(x, dim, index, 0)
    total = aten.scatter_add.default(start, dim, index, source)
    if kind == "sum":
        return total
    counts = _scattered(x, dim, index, torch.ones_like(source)) + int(include_self)
    return total / counts.clamp(min=1)


@dataclass(frozen=True)
class _Destinations:
    """Where values of a source go. include_self: whether the target's own values count there."""

    dim: int
    index: torch.Tensor
    include_self: bool

    def own(self, x: torch.Tensor) -> torch.Tensor:
        """The target's values that count."""
        return x if self.include_self else aten.scatter.value(x, self.dim, self.index, 0)

    def at(self, x: torch.Tensor) -> torch.Tensor:
        """For each value of the source that of the target at its place."""
        return aten.gather.default(x, self.dim, self.index)

    def sum(self, x: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        return aten.scatter_add.default(self.own(x), self.dim, self.index, source)


def _back(
    out: torch.Tensor,
    x: torch.Tensor,
    dim: int,
    index: torch.Tensor,
    source: torch.Tensor,
    kind: str,
    include_self: bool = True,
) -> Any:
    places, shares = (
        _Destinations(dim, index, include_self),
        _product_shares if kind == "prod" else _extreme_shares,
    )

    def back(g: torch.Tensor, positions: Sequence[int]) -> dict[int, Any]:
        own, arriving = shares(out, x, _reached(source, index), places)
        return {0: places.own(g * own), 3: fit(places.at(g) * arriving, source.shape)}

    return back


def _extreme_shares(
    out: torch.Tensor, x: torch.Tensor, source: torch.Tensor, places: _Destinations
) -> tuple[torch.Tensor, torch.Tensor]:
    """The shares of the cotangent for extremes: equal largest (smallest) values share it equally."""
    own, arriving = cast(x == out, out.dtype), cast(source == places.at(out), out.dtype)
    winners = places.sum(own, arriving)
    return places.own(own) / winners, arriving / places.at(winners)


def _product_shares(
    out: torch.Tensor, x: torch.Tensor, source: torch.Tensor, places: _Destinations
) -> tuple[torch.Tensor, torch.Tensor]:
    """For each factor the product of the other factors of its element: the whole product divided by the
    factor, unless the factor is zero.

    For a zero factor it is the product of the nonzero factors if this is the only zero, else zero.
    """
    no_zeros = [torch.where(t == 0, torch.ones_like(t), t) for t in (x, source)]
    zeros = places.sum(cast(x == 0, x.dtype), cast(source == 0, x.dtype))
    zero_sum = places.sum(*[torch.where(t == 0, t, torch.zeros_like(t)) for t in (x, source)])
    product = _reduce(no_zeros[0], places.dim, places.index, no_zeros[1], "prod", places.include_self)

    def others(
        t: torch.Tensor, safe: torch.Tensor, at: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        other_zeros = torch.where(
            at(zeros) == 1,
            torch.ones_like(t),
            torch.where(at(zeros) == 2, at(zero_sum) - t, torch.zeros_like(t)),
        )
        return torch.where(t == 0, at(product) * other_zeros, at(out) / safe)

    return others(x, no_zeros[0], lambda t: t), others(source, no_zeros[1], places.at)


def _reached(source: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """The part of a source that a smaller index reaches."""
    for axis, size in enumerate(index.shape):
        source = source.narrow(axis, 0, size) if source.shape[axis] != size else source
    return source


define(aten.scatter_reduce.two, vjp=JointVJP(_back), instead=_instead, batch=along)


@replace(aten.index_reduce.default)
def _index_reduce(
    x: torch.Tensor,
    dim: int,
    index: torch.Tensor,
    source: torch.Tensor,
    kind: str,
    *,
    include_self: bool = True,
) -> Any:
    places = index.reshape(-1)
    if x.dim():
        dim = wrap_dim(dim, x.dim())
        places = places.reshape(-1, *(1,) * (x.dim() - dim - 1)).expand(source.shape)
    return _reduce(
        x.reshape(1) if not x.dim() else x, dim, places, source.reshape(places.shape), kind, include_self
    ).reshape(x.shape)


_NEUTRAL = {"sum": 0.0, "mean": 0.0, "prod": 1.0, "max": -torch.inf, "min": torch.inf}


def _segments(
    data: torch.Tensor,
    lengths: torch.Tensor | None,
    offsets: torch.Tensor | None,
    axis: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(the length of each segment, the segment of each element in the data's shape). Elements behind the last
    segment get one more segment.
    """
    given, named = (lengths, "lengths") if lengths is not None else (offsets, "offsets")
    _refuse_segments(data, axis, given, named)
    lead, behind = data.shape[:axis], data.shape[axis + 1 :]
    if lengths is None:
        assert offsets is not None
        lengths = offsets.diff(dim=-1)
    positions = torch.arange(data.shape[axis], device=data.device).expand(*lead, -1)
    segment = torch.searchsorted(lengths.cumsum(-1), positions.contiguous(), right=True)
    return lengths, segment.reshape(*segment.shape, *(1,) * len(behind)).expand(data.shape)


def _segment_reduce(
    data: torch.Tensor,
    kind: str,
    *,
    lengths: torch.Tensor | None = None,
    indices: torch.Tensor | None = None,
    offsets: torch.Tensor | None = None,
    axis: int = 0,
    unsafe: bool = False,
    initial: float | None = None,
) -> torch.Tensor:
    """segment_reduce by an index of segments. Elements behind the last segment get a segment that is removed
    at the end.
    """
    axis = wrap_dim(axis, data.dim())
    lengths, index = _segments(data, lengths, offsets, axis)
    segments = lengths.shape[-1]
    sizes = [segments + 1 if d == axis else size for d, size in enumerate(data.shape)]
    start = data.new_full(sizes, _NEUTRAL[kind] if initial is None else initial)
    if kind == "prod":
        out = _product_of_segments(start, axis, index, data)
    else:
        out = _reduce(
            start, axis, index, data, {"mean": "sum", "max": "amax", "min": "amin"}.get(kind, kind), True
        )
    out = out.narrow(axis, 0, segments)
    if kind != "mean":
        return out
    counts = lengths.reshape(*lengths.shape, *(1,) * (data.dim() - axis - 1))
    return torch.where(counts > 0, out / counts.clamp(min=1), torch.nan if initial is None else initial)


def _product_of_segments(
    start: torch.Tensor, axis: int, index: torch.Tensor, data: torch.Tensor
) -> torch.Tensor:
    """The products of the segments. NaNs are a separate factor, whose derivative is the product of the
    others. Elements of the last segment are not multiplied.
    """
    inside = index < start.shape[axis] - 1
    unknown = inside & data.isnan()
    count = _scattered(start, axis, index, cast(unknown, data.dtype))
    factor = _scattered(start, axis, index, torch.where(unknown, data, 0.0))
    factor = torch.where(count == 0, 1.0, factor * torch.where(count > 1, torch.nan, 1.0))
    known = torch.where(inside & ~unknown, data, 1.0)
    return _reduce(start, axis, index, known, "prod", True) * factor


def _segment_instead(data: torch.Tensor, kind: str, **kwargs: Any) -> Any:
    return None if kind in ("max", "min") else _segment_reduce(data, kind, **kwargs)


def _segment_back(
    out: torch.Tensor,
    data: torch.Tensor,
    kind: str,
    *,
    lengths: torch.Tensor | None = None,
    offsets: torch.Tensor | None = None,
    axis: int = 0,
    **others: Any,
) -> Callable[[torch.Tensor], torch.Tensor]:
    """The VJP for extremes. The largest (smallest) elements of a segment, or its NaNs, share its cotangent
    equally; the initial value has no share. Other elements get zero, also for a cotangent that is not finite.
    """
    axis = wrap_dim(axis, data.dim())
    _, index = _segments(data, lengths, offsets, axis)
    segments = out.shape[axis]
    if not segments:
        return lambda g: torch.zeros_like(data)
    inside = index < segments
    index = torch.where(inside, index, 0)
    wins = inside & (data.isnan() | (data == aten.gather.default(out, axis, index)))
    winners = _scattered(out, axis, index, cast(wins, out.dtype)).clamp(min=1)
    return lambda g: torch.where(wins, aten.gather.default(g / winners, axis, index), 0.0)


def _segment_batch(
    batch: Any,
    op: Op,
    data: torch.Tensor,
    kind: str,
    *,
    lengths: torch.Tensor | None = None,
    offsets: torch.Tensor | None = None,
    axis: int = 0,
    **others: Any,
) -> torch.Tensor:
    """The batching rule: the sample axis is one more axis in front of the axis of segments."""
    axis = wrap_dim(axis, data.dim()) + 1
    given = {
        name: batch.physical(x) for name, x in (("lengths", lengths), ("offsets", offsets)) if x is not None
    }
    rows = batch.physical(data)
    # an extreme by scatter_reduce has another derivative; the operator can't run on tensors without values
    is_followed = isinstance(rows, Tracer) or state.attached
    reduce = op if kind in ("max", "min") and is_followed else _segment_reduce
    return reduce(rows, kind, axis=axis, **given, **{**others, "unsafe": True})


define(aten.segment_reduce.default, vjp={0: _segment_back}, instead=_segment_instead, batch=_segment_batch)


def _refuse_segments(data: torch.Tensor, axis: int, given: torch.Tensor | None, named: str) -> None:
    """Raise RuntimeError for wrong shapes. PyTorch's kernel, which checks only some of them, can't run on
    tensors without values.
    """
    if given is None:
        raise RuntimeError("segment_reduce(): Either lengths or offsets must be defined.")
    if axis != given.dim() - 1:
        raise RuntimeError(
            f"segment_reduce(): Expected axis to be the last dimension of {named} but got {axis}."
        )
    if given.shape[:axis] != data.shape[:axis] or (named == "offsets" and not given.shape[axis]):
        wanted = ", ".join([*map(str, data.shape[:axis]), f"number of {named}"])
        raise RuntimeError(
            f"segment_reduce(): Expected {named} of shape ({wanted}) but got {tuple(given.shape)}."
        )


# -- indices of the flattened tensor -------------------------------------------------------------------------


@replace(aten.put.default)
def _put(
    x: torch.Tensor, index: torch.Tensor, source: torch.Tensor, accumulate: bool = False
) -> torch.Tensor:
    return aten.index_put.default(x.reshape(-1), [index.reshape(-1)], source.reshape(-1), accumulate).reshape(
        x.shape
    )


@replace(aten.masked_scatter.default)
def _masked_scatter(x: torch.Tensor, mask: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """masked_scatter by a cumulative sum: true element k of the mask gets element k of the source."""
    x, mask = torch.broadcast_tensors(x, mask)
    number = mask.reshape(-1).cumsum(0) - 1
    # an empty source is valid for a mask without true elements; others raise an error, as in PyTorch
    if not source.numel():
        source, number = source.new_zeros(1), number + 1
    values = aten.index.Tensor(source.reshape(-1), [torch.where(mask, number.reshape(x.shape), 0)])
    return torch.where(mask, values, x)
