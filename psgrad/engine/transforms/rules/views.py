"""Views and other rearrangements of elements. The VJP is the inverse rearrangement; batching moves axes
behind the sample axis.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from psgrad.engine.transforms.interpreter import run
from psgrad.engine.transforms.refused_writes import memory_of
from psgrad.engine.transforms.rules.families import (
    aten,
    broadcasting,
    cast,
    leading,
    linear,
    shifted,
    unchanged,
    wrap_dim,
)
from psgrad.engine.transforms.rules.registry import Op, define

# -- shape ---------------------------------------------------------------------------------------------------


def _back_to_shape(
    out: torch.Tensor, x: torch.Tensor, *args: Any, **kwargs: Any
) -> Callable[[torch.Tensor], torch.Tensor]:
    shape = x.shape
    return lambda g: run(aten.reshape.default, g, shape)


def _view_batch(batch: Any, op: Op, x: torch.Tensor, size: Sequence[int]) -> torch.Tensor:
    physical = batch.physical(x)
    if -1 in size:  # resolved for one sample, because it would be ambiguous for an empty batch
        product = 1
        for s in size:
            product *= s if s != -1 else 1
        size = [x.numel() // max(product, 1) if s == -1 else s for s in size]
    return op(physical, [physical.shape[0], *size])


def _along_shape(out: torch.Tensor, *args: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """A tangent need not have the memory layout of its value."""
    shape = out.shape
    return lambda t: t.reshape(shape)


define(aten.view.default, vjp={0: _back_to_shape}, jvp={0: _along_shape}, batch=_view_batch)
# With derivatives it is decomposed to decide whether it is a view. With the sample axis in front it is a view
# in the same cases.
define(aten.reshape.default, batch=_view_batch)
# This view has no other users. After batching the memory layout may not allow it, so it is a reshape.
define(
    aten._unsafe_view.default,
    aten._reshape_alias.default,
    vjp={0: _back_to_shape},
    jvp={0: _along_shape},
    batch=lambda batch, op, x, size, *stride: _view_batch(batch, aten.reshape.default, x, size),
)
linear(
    aten.squeeze.default,
    back=_back_to_shape,
    batch=lambda batch, op, x: _view_batch(batch, aten.view.default, x, [s for s in x.shape if s != 1]),
)


def _squeeze_batch(batch: Any, op: Op, x: torch.Tensor, dims: Any) -> torch.Tensor:
    wanted = {wrap_dim(d, x.dim()) for d in ([dims] if isinstance(dims, int) else dims)}
    return aten.squeeze.dims(batch.physical(x), [d + 1 for d in wanted if x.dim() and x.shape[d] == 1])


linear(aten.squeeze.dim, aten.squeeze.dims, back=_back_to_shape, batch=_squeeze_batch)
linear(
    aten.unsqueeze.default,
    back=_back_to_shape,
    batch=lambda batch, op, x, dim: op(batch.physical(x), wrap_dim(dim, x.dim() + 1) + 1),
)
linear(aten.alias.default, aten.lift_fresh.default, aten.lift.default, back=unchanged, batch=leading)
define(aten.detach.default, vjp={}, batch=leading)


def _expand_batch(
    batch: Any, op: Op, x: torch.Tensor, size: Sequence[int], implicit: bool = False
) -> torch.Tensor:
    physical = batch.aligned(x, len(size))
    return op(
        physical,
        [
            physical.shape[0],
            *(s if s != -1 else x.shape[i - len(size) + x.dim()] for i, s in enumerate(size)),
        ],
    )


linear(aten.expand.default, back=broadcasting(unchanged, 0), batch=_expand_batch)


def _repeat_back(
    out: torch.Tensor, x: torch.Tensor, repeats: Sequence[int]
) -> Callable[[torch.Tensor], torch.Tensor]:
    shape, rank = x.shape, len(repeats)

    def back(g: torch.Tensor) -> torch.Tensor:
        padded = (1,) * (rank - len(shape)) + tuple(shape)
        g = g.reshape([n for pair in zip(repeats, padded, strict=True) for n in pair])
        return g.sum(list(range(0, 2 * rank, 2))).reshape(shape) if rank else g

    return back


linear(
    aten.repeat.default,
    back=_repeat_back,
    batch=lambda batch, op, x, repeats: op(batch.aligned(x, len(repeats)), [1, *repeats]),
)

# -- order of axes -------------------------------------------------------------------------------------------

linear(
    aten.t.default,
    back=lambda out, x: lambda g: run(aten.t.default, g),
    batch=lambda batch, op, x: batch.physical(x).transpose(1, 2) if x.dim() == 2 else batch.physical(x),
)
linear(
    aten.transpose.int,
    back=lambda out, x, d0, d1: lambda g: run(aten.transpose.int, g, d0, d1),
    batch=shifted(1, 2),
)


def _permute_back(
    out: torch.Tensor, x: torch.Tensor, dims: Sequence[int]
) -> Callable[[torch.Tensor], torch.Tensor]:
    inverse = inverse_permutation(dims)
    return lambda g: aten.permute.default(g, inverse)


def inverse_permutation(dims: Sequence[int]) -> list[int]:
    inverse = [0] * len(dims)
    for place, dim in enumerate(dims):
        inverse[wrap_dim(dim, len(dims))] = place
    return inverse


linear(
    aten.permute.default,
    back=_permute_back,
    batch=lambda batch, op, x, dims: op(batch.physical(x), [0, *(wrap_dim(d, x.dim()) + 1 for d in dims)]),
)
linear(aten.flip.default, back=lambda out, x, dims: lambda g: aten.flip.default(g, dims), batch=shifted(1))


def _roll_batch(
    batch: Any, op: Op, x: torch.Tensor, shifts: Sequence[int], dims: Sequence[int] = ()
) -> torch.Tensor:
    physical = batch.physical(x)
    if not dims:
        return op(physical.reshape(batch.size, x.numel()), shifts, [1]).reshape(physical.shape)
    return op(physical, shifts, [wrap_dim(d, x.dim()) + 1 for d in dims])


linear(
    aten.roll.default,
    back=lambda out, x, shifts, dims=(): lambda g: aten.roll.default(g, [-s for s in shifts], dims),
    batch=_roll_batch,
)


def _shuffle_batch(batch: Any, op: Op, x: torch.Tensor, groups: int) -> torch.Tensor:
    folded = batch.fold(x)
    out = op(folded, groups)
    # on a CPU the kernel always copies; on other devices PyTorch may return a view
    return batch.unfold(out.clone() if memory_of(out) == memory_of(folded) else out, x.shape[0])  # type: ignore[no-any-return]


def _shuffled_back(out: torch.Tensor, x: torch.Tensor, groups: int) -> Callable[[torch.Tensor], torch.Tensor]:
    others = x.shape[1] // groups
    return lambda g: aten.channel_shuffle.default(g, others) if others else g


linear(
    aten.channel_shuffle.default,
    aten.native_channel_shuffle.default,
    back=_shuffled_back,
    batch=_shuffle_batch,
)

# -- parts ---------------------------------------------------------------------------------------------------


def _declare_part(
    view: Op, backward: Op, scatter: Op, axes: Sequence[int], complete: Callable[..., tuple[Any, ...]]
) -> None:
    """Declare a view of a part of a tensor; the operator that puts the part's cotangent into zeros; and the
    one that writes a value, perhaps of another dtype, into the part.

    axes: which of the view's arguments are axes. complete: (shape of the tensor, arguments) -> all arguments.
    """

    def of_whole(out: torch.Tensor, x: torch.Tensor, *where: Any) -> Callable[[torch.Tensor], torch.Tensor]:
        shape = x.shape
        return lambda g: backward(g, shape, *complete(shape, *where))

    def of_source(
        out: torch.Tensor, x: torch.Tensor, source: torch.Tensor, *where: Any
    ) -> Callable[[torch.Tensor], torch.Tensor]:
        dtype = source.dtype
        return lambda g: cast(view(g, *where), dtype)

    def behind_samples(shape: Sequence[int], where: Sequence[Any]) -> list[Any]:
        return [wrap_dim(a, len(shape)) + 1 if i in axes else a for i, a in enumerate(where)]

    linear(view, back=of_whole, batch=shifted(*(axis + 1 for axis in axes)))
    linear(
        backward,
        back=lambda out, g, shape, *where: lambda h: view(h, *where),
        batch=lambda batch, op, g, shape, *where: op(
            batch.physical(g), [batch.size, *shape], *behind_samples(shape, where)
        ),
    )
    define(
        scatter,
        vjp={
            0: lambda out, x, source, *where: lambda g: scatter(g, torch.zeros_like(view(g, *where)), *where),
            1: of_source,
        },
        batch=lambda batch, op, x, source, *where: op(
            batch.physical(x), batch.physical(source), *behind_samples(x.shape, complete(x.shape, *where))
        ),
    )


def _bounded_slice(
    shape: Sequence[int], dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> tuple[int, ...]:
    size = shape[dim] if shape else 0  # a number has no axis to slice: the operator refuses it
    first, last, _ = slice(start, end).indices(size)
    return dim, first, last, step


_declare_part(
    aten.select.int,
    aten.select_backward.default,
    aten.select_scatter.default,
    (0,),
    lambda shape, dim, index: (dim, index),
)
_declare_part(
    aten.slice.Tensor, aten.slice_backward.default, aten.slice_scatter.default, (0,), _bounded_slice
)
_declare_part(
    aten.diagonal.default,
    aten.diagonal_backward.default,
    aten.diagonal_scatter.default,
    (1, 2),
    lambda shape, offset=0, dim1=0, dim2=1: (offset, dim1, dim2),
)


def _unfold_back(
    out: torch.Tensor, x: torch.Tensor, dim: int, size: int, step: int
) -> Callable[[torch.Tensor], torch.Tensor]:
    shape = x.shape
    return lambda g: aten.unfold_backward.default(g, shape, dim, size, step)


linear(
    aten.unfold.default,
    back=_unfold_back,
    batch=lambda batch, op, x, dim, size, step: (
        op(batch.physical(x), wrap_dim(dim, x.dim()) + 1, size, step)
        if x.dim()
        else op(batch.physical(x).unsqueeze(1), 1, size, step).squeeze(1)
    ),
)
linear(
    aten.unfold_backward.default,
    back=lambda out, g, shape, dim, size, step: lambda h: aten.unfold.default(h, dim, size, step),
    batch=lambda batch, op, g, shape, dim, size, step: (
        op(batch.physical(g), [batch.size, *shape], wrap_dim(dim, len(shape)) + 1, size, step)
        if len(shape)
        else batch.physical(g).sum(1)
    ),
)


def _sum_of_parts(
    gs: list[Any],
    join: Callable[[list[torch.Tensor]], torch.Tensor],
    into_zeros: Callable[[int, torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """The cotangent of a tensor from those of all its parts, in order; None stands for zero."""
    if all(g is not None for g in gs):
        return join(gs)
    parts = [into_zeros(place, g) for place, g in enumerate(gs) if g is not None]
    return functools.reduce(aten.add.Tensor, parts)


def _split_back(
    out: Sequence[torch.Tensor], x: torch.Tensor, size: Any, dim: int = 0
) -> Callable[[list[Any]], torch.Tensor]:
    shape = x.shape
    ends = list(itertools.accumulate(part.shape[dim] for part in out))

    def into_zeros(place: int, g: torch.Tensor) -> torch.Tensor:
        return aten.slice_backward.default(g, shape, dim, ends[place] - g.shape[dim], ends[place], 1)

    return lambda gs: _sum_of_parts(gs, lambda gs: aten.cat.default(gs, dim), into_zeros)


linear(
    aten.split.Tensor,
    aten.split_with_sizes.default,
    aten.unsafe_split.Tensor,
    aten.unsafe_split_with_sizes.default,
    back=_split_back,
    batch=shifted(2),
)


def _unbind_back(
    out: Sequence[torch.Tensor], x: torch.Tensor, dim: int = 0
) -> Callable[[list[Any]], torch.Tensor]:
    shape = x.shape
    return lambda gs: _sum_of_parts(
        gs,
        lambda gs: aten.stack.default(gs, dim),
        lambda place, g: aten.select_backward.default(g, shape, dim, place),
    )


linear(aten.unbind.int, back=_unbind_back, batch=shifted(1))
