"""Images at other sizes: pooling, upsampling and grid sampling, on the kernels of both directions. The sample
axis is folded into the kernels' batch axis.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from psgrad.engine.transforms.private_torch import decomposition_table
from psgrad.engine.transforms.rules.families import aten, first_result, folded, one_by_one, pooled
from psgrad.engine.transforms.rules.registry import JointVJP, Op, define, replace

# -- the largest values: a backward kernel puts each cotangent to one place ----------------------------------


def _declare_largest(name: str, axes: int, back: Callable[[Op], Any], batch: Callable[..., Any]) -> None:
    """Declare an operator that returns values and their places, and its backward kernel, whose last argument
    are these places. back: from the backward kernel to the VJP.
    """
    forward, backward = getattr(aten, name).default, getattr(aten, f"{name}_backward").default

    def values_at_places(out: torch.Tensor, g: torch.Tensor, x: torch.Tensor, *args: Any) -> Any:
        index, shape = args[-1].flatten(-axes), g.shape
        return lambda h: h.flatten(-axes).gather(-1, index).reshape(shape)

    define(forward, vjp={0: first_result(back(backward))}, batch=batch)
    define(backward, vjp={0: values_at_places}, batch=batch)


def _max_pool_back(spatial: int) -> Any:
    def fill(value: Any, default: Any) -> Any:
        return default if value in ((), []) else [value] * spatial if isinstance(value, int) else value

    return lambda backward: (
        lambda out, x, kernel, stride=(), padding=0, dilation=1, ceil_mode=False: (
            lambda g: backward(
                g, x, kernel, fill(stride, kernel), fill(padding, 0), fill(dilation, 1), ceil_mode, out[1]
            )
        )
    )


def _adaptive_back(backward: Op) -> Any:
    return lambda out, x, size: lambda g: backward(g, x, out[1])


def _fractional_back(backward: Op) -> Any:
    return lambda out, x, kernel, size, samples: lambda g: backward(g, x, kernel, size, out[1])


for _axes in (2, 3):
    _declare_largest(f"max_pool{_axes}d_with_indices", _axes, _max_pool_back(_axes), pooled(_axes))
    _declare_largest(f"adaptive_max_pool{_axes}d", _axes, _adaptive_back, pooled(_axes))
    # of places that are drawn outside
    _declare_largest(f"fractional_max_pool{_axes}d", _axes, _fractional_back, one_by_one)

# -- averages ------------------------------------------------------------------------------------------------


def _declare_average(axes: int) -> None:
    forward, backward = (getattr(aten, f"avg_pool{axes}d{end}").default for end in ("", "_backward"))
    adaptive, adaptive_backward = (
        getattr(aten, f"_adaptive_avg_pool{axes}d{end}").default for end in ("", "_backward")
    )

    def back(
        out: torch.Tensor,
        x: torch.Tensor,
        kernel: Any,
        stride: Any = (),
        padding: Any = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
    ) -> Any:
        spatial = [padding] if isinstance(padding, int) else padding
        return lambda g: backward(
            g, x, kernel, stride or kernel, spatial, ceil_mode, count_include_pad, divisor_override
        )

    def adaptive_second(out: torch.Tensor, g: torch.Tensor, x: torch.Tensor) -> Any:
        size = g.shape[-axes:]
        return lambda h: adaptive(h, size)

    define(forward, vjp={0: back}, batch=pooled(axes))
    define(backward, vjp={0: lambda out, g, x, *args: lambda h: forward(h, *args)}, batch=pooled(axes))
    define(adaptive, vjp={0: lambda out, x, size: lambda g: adaptive_backward(g, x)}, batch=pooled(axes))
    define(adaptive_backward, vjp={0: adaptive_second}, batch=pooled(axes))


_declare_average(2)
_declare_average(3)


# -- upsampling: linear, so each kernel is the other one's derivative ----------------------------------------


def _upsample_back(backward: Op) -> Any:
    return lambda out, x, size, *rest: lambda g, shape=x.shape: backward(g, size, shape, *rest)


def _upsample_backward_batch(
    batch: Any, op: Op, g: torch.Tensor, size: Any, shape: Sequence[int], *rest: Any
) -> torch.Tensor:
    return batch.unfold(op(batch.fold(g), size, [batch.size * shape[0], *shape[1:]], *rest), shape[0])


def _by_factors(op: Op, axes: int) -> Callable[..., torch.Tensor]:
    """The operator that takes the new size or the factors, written with the one that takes both."""

    def upsample(x: torch.Tensor, size: Sequence[int] | None, *align_and_factors: Any) -> torch.Tensor:
        *align, factors = align_and_factors
        if size is None:
            size = [int(s * factor) for s, factor in zip(x.shape[2:], factors, strict=True)]
        return op(x, size, *align, *(factors or [None] * axes))

    return upsample


for _name, _axes in (
    *(
        (f"{kind}{axes}d", axes)
        for kind in ("upsample_nearest", "_upsample_nearest_exact")
        for axes in (1, 2, 3)
    ),
    ("upsample_linear1d", 1),
    ("upsample_bilinear2d", 2),
    ("upsample_bicubic2d", 2),
    ("upsample_trilinear3d", 3),
    ("_upsample_bilinear2d_aa", 2),
    ("_upsample_bicubic2d_aa", 2),
    ("_upsample_lanczos2d_aa", 2),
):
    if not hasattr(aten, _name):  # missing in older versions of PyTorch
        continue
    _forward, _backward = getattr(aten, _name), getattr(aten, f"{_name}_backward").default
    define(_forward.default, vjp={0: _upsample_back(_backward)}, batch=folded(0))
    define(
        _backward,
        vjp={
            0: lambda out, g, size, shape, *rest, forward=_forward.default: lambda h: forward(h, size, *rest)
        },
        batch=_upsample_backward_batch,
    )
    replace(_forward.vec)(_by_factors(_forward.default, _axes))

# -- sampling at places that are data themselves -------------------------------------------------------------

BILINEAR, NEAREST, BICUBIC = range(3)
ZEROS, BORDER, REFLECTION = range(3)


@replace(aten.grid_sampler.default)
def _grid_sampler(x: torch.Tensor, grid: torch.Tensor, *options: Any) -> torch.Tensor:
    return (aten.grid_sampler_2d if x.dim() == 4 else aten.grid_sampler_3d).default(x, grid, *options)


def _grid_back(backward: Op) -> JointVJP:
    def make(out: torch.Tensor, x: torch.Tensor, grid: torch.Tensor, *options: Any) -> Any:
        return lambda g, positions: dict(
            enumerate(backward(g, x, grid, *options, [0 in positions, 1 in positions]))
        )

    return JointVJP(make)


def _grid_backward_batch(batch: Any, op: Op, *args: Any) -> Any:
    results = op(*[batch.fold(a) for a in args[:3]], *args[3:])
    return tuple(batch.unfold(result, args[0].shape[0]) if result is not None else None for result in results)


def _grid_backward(
    g: torch.Tensor, x: torch.Tensor, grid: torch.Tensor, mode: int, padding: int, align: bool, wanted: Any
) -> Any:
    """The function of the backward kernels, for its derivative: the derivative of sampling as a sum over
    corners.
    """
    from psgrad.engine.transforms.grad import vjp

    def sample(x: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
        if mode == BICUBIC:
            return decomposition_table[aten.grid_sampler_2d.default](x, grid, mode, padding, align)
        return _by_corners(x, grid, mode, padding, align)

    return vjp(sample, x, grid)[1](g)


def _by_corners(x: torch.Tensor, grid: torch.Tensor, mode: int, padding: int, align: bool) -> torch.Tensor:
    """Sampling as a sum: for each corner of the cell of a place, its value times its share."""
    sizes = x.shape[2:]
    # the last axis of the grid counts the axes of the image from behind
    places = [_placed(grid[..., -1 - axis], size, padding, align) for axis, size in enumerate(sizes)]
    corners = [place.round() if mode == NEAREST else place.floor() for place in places]
    shares = [
        None if mode == NEAREST else place - corner for place, corner in zip(places, corners, strict=True)
    ]
    values, total = x.flatten(2), torch.zeros((), dtype=x.dtype, device=x.device)
    for steps in itertools.product((0, 1), repeat=len(sizes) if mode == BILINEAR else 0):
        index, weight = torch.zeros_like(corners[0]), torch.ones_like(corners[0])
        for corner, share, step, size in zip(
            corners, shares, steps or itertools.repeat(0), sizes, strict=False
        ):
            at = corner + step
            inside = (at >= 0) & (at < size)
            index = index * size + torch.where(inside, at, 0)
            weight = torch.where(
                inside, weight if share is None else weight * (share if step else 1 - share), 0
            )
        flat = index.long().flatten(1).unsqueeze(1).expand(-1, x.shape[1], -1)
        total = total + values.gather(2, flat).unflatten(2, grid.shape[1:-1]) * weight.unsqueeze(1)
    return total


def _placed(coordinate: torch.Tensor, size: int, padding: int, align: bool) -> torch.Tensor:
    """From [-1, 1] to a place between the pixels; places outside are moved to the border, or mirrored
    there.
    """
    place = (coordinate + 1) / 2 * (size - 1) if align else ((coordinate + 1) * size - 1) / 2
    if padding == REFLECTION:
        low, span = (0.0, size - 1.0) if align else (-0.5, float(size))
        if span == 0:
            return torch.zeros_like(place)
        distance = torch.remainder((place - low).abs(), 2 * span)
        place = torch.where(distance > span, 2 * span - distance, distance) + low
    return place if padding == ZEROS else place.clamp(0, size - 1)


for _axes in (2, 3):
    _forward, _backward = (
        getattr(aten, f"grid_sampler_{_axes}d").default,
        getattr(aten, f"grid_sampler_{_axes}d_backward").default,
    )
    define(_forward, vjp=_grid_back(_backward), batch=folded(0, 1))
    define(_backward, batch=_grid_backward_batch)
    replace(_backward)(_grid_backward)
