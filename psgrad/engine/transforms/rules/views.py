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
from psgrad.engine.transforms.read_only import memory_of
from psgrad.engine.transforms.rules.families import aten, cast, leading, shifted, sum_to, wrap_dim
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
    vjp={0: _back_to_shape},
    jvp={0: _along_shape},
    batch=lambda batch, op, x, size: _view_batch(batch, aten.reshape.default, x, size),
)
define(
    aten._reshape_alias.default,
    vjp={0: _back_to_shape},
    jvp={0: _along_shape},
    batch=lambda batch, op, x, size, stride: _view_batch(batch, aten.reshape.default, x, size),
)
define(aten.squeeze.dim, aten.squeeze.dims, aten.unsqueeze.default, vjp={0: _back_to_shape}, linear=(0,))
define(
    aten.squeeze.default,
    vjp={0: _back_to_shape},
    linear=(0,),
    batch=lambda batch, op, x: _view_batch(batch, aten.view.default, x, [s for s in x.shape if s != 1]),
)


def _squeeze_batch(batch: Any, op: Op, x: torch.Tensor, dims: Any) -> torch.Tensor:
    wanted = {wrap_dim(d, x.dim()) for d in ([dims] if isinstance(dims, int) else dims)}
    return aten.squeeze.dims(batch.physical(x), [d + 1 for d in wanted if x.dim() and x.shape[d] == 1])


define(aten.squeeze.dim, aten.squeeze.dims, batch=_squeeze_batch)
define(
    aten.unsqueeze.default,
    batch=lambda batch, op, x, dim: op(batch.physical(x), wrap_dim(dim, x.dim() + 1) + 1),
)
define(
    aten.alias.default,
    aten.lift_fresh.default,
    aten.lift.default,
    vjp={0: lambda out, x: lambda g: g},
    linear=(0,),
    batch=leading,
)
define(aten.detach.default, vjp={}, batch=leading)


def _sum_back(
    out: torch.Tensor, x: torch.Tensor, *args: Any, **kwargs: Any
) -> Callable[[torch.Tensor], torch.Tensor]:
    shape, dtype = x.shape, x.dtype
    return lambda g: sum_to(g, shape, dtype)


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


define(aten.expand.default, vjp={0: _sum_back}, linear=(0,), batch=_expand_batch)


def _repeat_back(
    out: torch.Tensor, x: torch.Tensor, repeats: Sequence[int]
) -> Callable[[torch.Tensor], torch.Tensor]:
    shape, rank = x.shape, len(repeats)

    def back(g: torch.Tensor) -> torch.Tensor:
        padded = (1,) * (rank - len(shape)) + tuple(shape)
        g = g.reshape([n for pair in zip(repeats, padded, strict=True) for n in pair])
        return g.sum(list(range(0, 2 * rank, 2))).reshape(shape) if rank else g

    return back


define(
    aten.repeat.default,
    vjp={0: _repeat_back},
    linear=(0,),
    batch=lambda batch, op, x, repeats: op(batch.aligned(x, len(repeats)), [1, *repeats]),
)

# -- order of axes -------------------------------------------------------------------------------------------

define(
    aten.t.default,
    vjp={0: lambda out, x: lambda g: run(aten.t.default, g)},
    linear=(0,),
    batch=lambda batch, op, x: batch.physical(x).transpose(1, 2) if x.dim() == 2 else batch.physical(x),
)
define(
    aten.transpose.int,
    vjp={0: lambda out, x, d0, d1: lambda g: run(aten.transpose.int, g, d0, d1)},
    linear=(0,),
    batch=lambda batch, op, x, d0, d1: (
        op(batch.physical(x), wrap_dim(d0, x.dim()) + 1, wrap_dim(d1, x.dim()) + 1)
        if x.dim()
        else batch.physical(x)
    ),
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


define(
    aten.permute.default,
    vjp={0: _permute_back},
    linear=(0,),
    batch=lambda batch, op, x, dims: op(batch.physical(x), [0, *(wrap_dim(d, x.dim()) + 1 for d in dims)]),
)
define(
    aten.flip.default,
    vjp={0: lambda out, x, dims: lambda g: aten.flip.default(g, dims)},
    linear=(0,),
    batch=shifted(1),
)


def _roll_batch(
    batch: Any, op: Op, x: torch.Tensor, shifts: Sequence[int], dims: Sequence[int] = ()
) -> torch.Tensor:
    physical = batch.physical(x)
    if not dims:
        return op(physical.reshape(batch.size, x.numel()), shifts, [1]).reshape(physical.shape)
    return op(physical, shifts, [wrap_dim(d, x.dim()) + 1 for d in dims])


define(
    aten.roll.default,
    vjp={0: lambda out, x, shifts, dims=(): lambda g: aten.roll.default(g, [-s for s in shifts], dims)},
    linear=(0,),
    batch=_roll_batch,
)


def _shuffle_batch(batch: Any, op: Op, x: torch.Tensor, groups: int) -> torch.Tensor:
    folded = batch.fold(x)
    out = op(folded, groups)
    # on a CPU the kernel always copies; on other devices PyTorch may return a view
    return batch.unfold(out.clone() if memory_of(out) == memory_of(folded) else out)  # type: ignore[no-any-return]


def _shuffled_back(out: torch.Tensor, x: torch.Tensor, groups: int) -> Callable[[torch.Tensor], torch.Tensor]:
    others = x.shape[1] // groups
    return lambda g: aten.channel_shuffle.default(g, others) if others else g


define(
    aten.channel_shuffle.default,
    aten.native_channel_shuffle.default,
    vjp={0: _shuffled_back},
    linear=(0,),
    batch=_shuffle_batch,
)

# -- parts ---------------------------------------------------------------------------------------------------


def _shape_of(make: Callable[..., Any]) -> Callable[..., Any]:
    """A maker of a VJP that needs the argument's shape, and must not hold its value."""
    return lambda out, x, *args, **kwargs: make(x.shape, *args, **kwargs)


define(
    aten.select.int,
    vjp={
        0: _shape_of(lambda shape, dim, index: lambda g: aten.select_backward.default(g, shape, dim, index))
    },
    linear=(0,),
    batch=shifted(1),
)
define(
    aten.slice.Tensor,
    vjp={
        0: _shape_of(
            lambda shape, dim=0, start=None, end=None, step=1: (
                lambda g: aten.slice_backward.default(
                    g, shape, dim, *_slice_bounds(shape[dim], start, end), step
                )
            )
        )
    },
    linear=(0,),
    batch=shifted(1, defaults={1: 0}),
)


def _slice_bounds(size: int, start: int | None, end: int | None) -> tuple[int, int]:
    first, last, _ = slice(start, end).indices(size)
    return first, last


define(
    aten.select_backward.default,
    vjp={0: lambda out, g, shape, dim, index: lambda h: aten.select.int(h, dim, index)},
    linear=(0,),
    batch=lambda batch, op, g, shape, dim, index: op(
        batch.physical(g), [batch.size, *shape], wrap_dim(dim, len(shape)) + 1, index
    ),
)
define(
    aten.slice_backward.default,
    vjp={
        0: lambda out, g, shape, dim, start, end, step: lambda h: aten.slice.Tensor(h, dim, start, end, step)
    },
    linear=(0,),
    batch=lambda batch, op, g, shape, dim, start, end, step: op(
        batch.physical(g), [batch.size, *shape], wrap_dim(dim, len(shape)) + 1, start, end, step
    ),
)
define(
    aten.diagonal.default,
    vjp={
        0: _shape_of(
            lambda shape, offset=0, dim1=0, dim2=1: (
                lambda g: aten.diagonal_backward.default(g, shape, offset, dim1, dim2)
            )
        )
    },
    linear=(0,),
    batch=shifted(2, 3, defaults={2: 0, 3: 1}),
)
define(
    aten.diagonal_backward.default,
    vjp={0: lambda out, g, shape, offset, dim1, dim2: lambda h: aten.diagonal.default(h, offset, dim1, dim2)},
    linear=(0,),
    batch=lambda batch, op, g, shape, offset, dim1, dim2: op(
        batch.physical(g),
        [batch.size, *shape],
        offset,
        wrap_dim(dim1, len(shape)) + 1,
        wrap_dim(dim2, len(shape)) + 1,
    ),
)


define(
    aten.unfold.default,
    vjp={
        0: _shape_of(
            lambda shape, dim, size, step: lambda g: aten.unfold_backward.default(g, shape, dim, size, step)
        )
    },
    linear=(0,),
    batch=lambda batch, op, x, dim, size, step: (
        op(batch.physical(x), wrap_dim(dim, x.dim()) + 1, size, step)
        if x.dim()
        else op(batch.physical(x).unsqueeze(1), 1, size, step).squeeze(1)
    ),
)
define(
    aten.unfold_backward.default,
    vjp={0: lambda out, g, shape, dim, size, step: lambda h: aten.unfold.default(h, dim, size, step)},
    linear=(0,),
    batch=lambda batch, op, g, shape, dim, size, step: (
        op(batch.physical(g), [batch.size, *shape], wrap_dim(dim, len(shape)) + 1, size, step)
        if len(shape)
        else batch.physical(g).sum(1)
    ),
)


def _scatter_batch(
    batch: Any, op: Op, x: torch.Tensor, source: torch.Tensor, dim: int = 0, *args: Any, **kwargs: Any
) -> torch.Tensor:
    return op(batch.physical(x), batch.physical(source), wrap_dim(dim, x.dim()) + 1, *args, **kwargs)


def _scattered_back(view: Op) -> Callable[..., Any]:
    """The VJP in a value that is written into a view. The value may have another dtype than the tensor."""

    def made(
        out: torch.Tensor, x: torch.Tensor, source: torch.Tensor, *where: Any
    ) -> Callable[[torch.Tensor], torch.Tensor]:
        dtype = source.dtype
        return lambda g: cast(view(g, *where), dtype)

    return made


define(
    aten.select_scatter.default,
    vjp={
        0: lambda out, x, source, dim, index: (
            lambda g: aten.select_scatter.default(
                g, torch.zeros_like(aten.select.int(g, dim, index)), dim, index
            )
        ),
        1: _scattered_back(aten.select.int),
    },
    batch=_scatter_batch,
)
define(
    aten.slice_scatter.default,
    vjp={
        0: lambda out, x, source, *where: (
            lambda g: aten.slice_scatter.default(g, torch.zeros_like(aten.slice.Tensor(g, *where)), *where)
        ),
        1: _scattered_back(aten.slice.Tensor),
    },
    batch=_scatter_batch,
)
define(
    aten.diagonal_scatter.default,
    vjp={
        0: lambda out, x, source, *where: (
            lambda g: aten.diagonal_scatter.default(
                g, torch.zeros_like(aten.diagonal.default(g, *where)), *where
            )
        ),
        1: _scattered_back(aten.diagonal.default),
    },
    batch=lambda batch, op, x, source, offset=0, dim1=0, dim2=1: op(
        batch.physical(x),
        batch.physical(source),
        offset,
        wrap_dim(dim1, x.dim()) + 1,
        wrap_dim(dim2, x.dim()) + 1,
    ),
)


def _split_back(
    out: Sequence[torch.Tensor], x: torch.Tensor, size: Any, dim: int = 0
) -> Callable[[list[Any]], torch.Tensor]:
    shape, sizes = x.shape, [part.shape[dim] for part in out]

    def back(gs: list[Any]) -> torch.Tensor:
        if all(g is not None for g in gs):
            return aten.cat.default(gs, dim)
        starts = itertools.accumulate(sizes, initial=0)
        parts = [
            aten.slice_backward.default(g, shape, dim, start, start + size, 1)
            for g, start, size in zip(gs, starts, sizes, strict=False)
            if g is not None
        ]
        return functools.reduce(aten.add.Tensor, parts)

    return back


define(
    aten.split.Tensor,
    aten.split_with_sizes.default,
    aten.unsafe_split.Tensor,
    aten.unsafe_split_with_sizes.default,
    vjp={0: _split_back},
    linear=(0,),
    batch=shifted(2, defaults={2: 0}),
)


def _unbind_back(
    out: Sequence[torch.Tensor], x: torch.Tensor, dim: int = 0
) -> Callable[[list[Any]], torch.Tensor]:
    shape = x.shape

    def back(gs: list[Any]) -> torch.Tensor:
        if all(g is not None for g in gs):
            return aten.stack.default(gs, dim)
        parts = [
            aten.select_backward.default(g, shape, dim, place) for place, g in enumerate(gs) if g is not None
        ]
        return functools.reduce(aten.add.Tensor, parts)

    return back


define(aten.unbind.int, vjp={0: _unbind_back}, linear=(0,), batch=shifted(1, defaults={1: 0}))
