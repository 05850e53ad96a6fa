"""The weight gradient of a convolution for every sample, and its norms.

There are three orders of computation. `as_groups`: the samples are groups of one convolution. `shifted`: one
batched matrix product for each place of the kernel, of the cotangents with the shifted input; patches are
never materialised. `as_matrices`: patches are materialised, for thin inputs, and where positions are needed.
`grams` computes only the norms.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from psgrad.engine.transforms.rules.families import aten


class Geometry(NamedTuple):
    """A convolution's arguments behind its tensors, in the operator's order."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    transposed: bool
    output_padding: tuple[int, ...]
    groups: int

    @classmethod
    def of(cls, args: Sequence[Any], axes: int) -> Geometry:
        """PyTorch lets one number stand for all spatial axes. The result is hashable."""
        spread: list[Any] = [
            tuple(a) * (axes if len(a) == 1 else 1) if isinstance(a, (list, tuple)) else a for a in args
        ]
        return cls(*spread)


def weight_gradients(g: torch.Tensor, x: torch.Tensor, shape: torch.Size, geometry: Geometry) -> torch.Tensor:
    """Per-sample weight gradients [n, *shape] of a convolution with output cotangents g [n, b, o, *] and
    inputs x [n, b, i, *].
    """
    if not g.shape[0]:
        return g.new_zeros(0, *shape)
    if grouped_kernel_is_fast(g, shape, geometry):
        return as_groups(g, x, shape, geometry)
    if materialises_patches(g, shape, geometry):
        patches, cotangents = as_matrices(g, x, shape, geometry)
        return (
            torch.matmul(patches.transpose(-2, -1), cotangents).transpose(-2, -1).reshape(g.shape[0], *shape)
        )
    out = g.new_empty(g.shape[0], *shape)
    for place, part in shifted(g, x, shape, geometry):
        at: tuple[Any, ...] = (..., *place)
        out[at] = part
    return out


# Measured with benchmarks/convolution.py on a CPU: multiples of the summed gradient's time.
_FEW_COLUMNS = 4  # with fewer, patches (1.8 to 2.4) beat groups (2.0 to 4.0)
_LARGE_MATRIX = 128 * 128  # with larger ones, groups (2.3 to 5.3) fall behind matrix products (1.3 to 1.5)
# with fewer columns, a matrix product for each place of the kernel (2.7 to 6) falls behind patches (1.5 to
# 2.3)
_THIN = 32


def grouped_kernel_is_fast(g: torch.Tensor, shape: torch.Size, geometry: Geometry) -> bool:
    """Whether the convolution kernel takes the samples as groups at nearly the price of one sum over all of
    them (1.0 to 1.5 times).

    It does on a CPU, for matrices that are neither thin nor large; other devices have no such kernel.
    """
    rows, columns = shape[0] // geometry.groups, shape[1]
    wide = columns >= _FEW_COLUMNS or geometry.groups > 1
    return (
        g.device.type == "cpu"
        and g.dtype in (torch.float32, torch.float64)
        and wide
        and rows * columns <= _LARGE_MATRIX
    )


def materialises_patches(g: torch.Tensor, shape: torch.Size, geometry: Geometry) -> bool:
    """Whether patches are materialised, for a few samples at a time: if a product for each place would be
    thin, and on a GPU, where one kernel that does more takes less time than one for each place (norms of a
    small ResNet on an H200: .8 of the time).
    """
    return not grouped_kernel_is_fast(g, shape, geometry) and (shape[1] < _THIN or g.device.type == "cuda")


def as_groups(g: torch.Tensor, x: torch.Tensor, shape: torch.Size, geometry: Geometry) -> torch.Tensor:
    """The samples as groups of one convolution, whose weight gradient then has a part for each."""
    n = g.shape[0]
    folded = [t.movedim(0, 1).flatten(1, 2) for t in (g, x)]  # [b, n * channels, *]
    weight = torch.empty((), dtype=g.dtype, device=g.device).expand(
        n * shape[0], *shape[1:]
    )  # only its shape is used
    only = [False, True, False]
    grouped = aten.convolution_backward.default(
        *folded, weight, [0], *geometry[:-1], geometry.groups * n, only
    )[1]
    return grouped.reshape(n, *shape)


def shifted(
    g: torch.Tensor, x: torch.Tensor, shape: torch.Size, geometry: Geometry
) -> Iterator[tuple[tuple[int, ...], torch.Tensor]]:
    """The per-sample weight gradients, place by place of the kernel: pairs of a place and [n, *shape[:2]].

    With the input padded, and cut into its phases where the stride is more than one, the window at a place of
    the kernel is the whole image from some element on: a view, if the cotangents get the input's row length.
    """
    g, x, axes = _as_plain_convolution(g, x, shape, geometry)
    positions = g.shape[2:]
    sides = [
        p + (axis.kernel - 1) * axis.dilation // axis.stride for p, axis in zip(positions, axes, strict=True)
    ]  # of one phase
    sides[0] += any(
        side > p for side, p in zip(sides[1:], positions[1:], strict=True)
    )  # windows that begin inside a row end inside one
    length = positions[0] * math.prod(sides[1:])
    x = torch.constant_pad_nd(
        x, [v for a in reversed(range(len(sides))) for v in (0, sides[a] * axes[a].stride - x.shape[2 + a])]
    )
    g = torch.constant_pad_nd(
        g, [v for a in reversed(range(1, len(sides))) for v in (0, sides[a] - positions[a])]
    )
    matrices = g.shape[0] * geometry.groups
    cotangents = g.reshape(matrices, -1, length)
    steps = [math.prod(sides[a + 1 :]) for a in range(len(sides))]
    phases: dict[tuple[int, ...], torch.Tensor] = {}
    for place in itertools.product(*(range(axis.kernel) for axis in axes)):
        far = [k * axis.dilation for k, axis in zip(place, axes, strict=True)]
        first = tuple(f % axis.stride for f, axis in zip(far, axes, strict=True))
        if first not in phases:
            cut: list[Any] = [slice(at, None, axis.stride) for at, axis in zip(first, axes, strict=True)]
            phases[first] = x[(..., *cut)].reshape(matrices, -1, math.prod(sides))
        start = sum(f // axis.stride * step for f, axis, step in zip(far, axes, steps, strict=True))
        value = torch.bmm(cotangents, phases[first].narrow(2, start, length).transpose(1, 2))
        yield place[len(place) - len(shape) + 2 :], value.reshape(g.shape[0], shape[0], shape[1])


def grams(
    g: torch.Tensor, x: torch.Tensor, shape: torch.Size, geometry: Geometry
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gram matrices over positions, [n * groups, t, t] each: of the cotangents, and of the patches, which are
    not materialised.

    The inner product of two patches is a sum over the places of the kernel of inner products of pixels, so it
    is the pixels' Gram matrix, added up along its diagonals, one axis of the kernel after the other.
    """
    g, x, axes = _as_plain_convolution(g, x, shape, geometry)
    positions, sides = g.shape[2:], x.shape[2:]
    matrices = g.shape[0] * geometry.groups
    cotangents, pixels = g.reshape(matrices, -1, positions.numel()), x.reshape(matrices, -1, sides.numel())
    total = torch.bmm(pixels.transpose(1, 2), pixels).reshape(matrices, *sides, *sides)
    for a, axis in enumerate(axes):
        reach = (positions[a] - 1) * axis.stride + 1
        parts = []
        for k in range(axis.kernel):
            cut: list[Any] = [slice(None)] * total.dim()
            cut[1 + a] = cut[1 + a + len(axes)] = slice(
                k * axis.dilation, k * axis.dilation + reach, axis.stride
            )
            parts.append(total[tuple(cut)])
        total = parts[0] if len(parts) == 1 else parts[0] + parts[1]
        for part in parts[2:]:
            total += part
    return torch.bmm(cotangents.transpose(1, 2), cotangents), total.reshape(
        matrices, positions.numel(), positions.numel()
    )


class _Axis(NamedTuple):
    """A convolution along one axis."""

    kernel: int
    stride: int
    dilation: int


def _as_plain_convolution(
    g: torch.Tensor, x: torch.Tensor, shape: torch.Size, geometry: Geometry
) -> tuple[torch.Tensor, torch.Tensor, list[_Axis]]:
    """An ordinary convolution without padding or inner batch: (cotangents [n, rows, *positions], padded
    inputs [n, columns, *], axes).

    A transposed convolution is the adjoint of an ordinary one: input and cotangent change places. An inner
    batch is one more axis.
    """
    if geometry.transposed:
        g, x = x, g
    axes = [_Axis(*each) for each in zip(shape[2:], geometry.stride, geometry.dilation, strict=True)]
    x = padded(x.flatten(0, 1), shape[2:], g.shape[3:], geometry).unflatten(0, x.shape[:2])
    if x.shape[1] == 1:
        return g.squeeze(1), x.squeeze(1), axes
    return g.movedim(1, 2), x.movedim(1, 2), [_Axis(1, 1, 1), *axes]


def as_matrices(
    g: torch.Tensor, x: torch.Tensor, shape: torch.Size, geometry: Geometry
) -> tuple[torch.Tensor, torch.Tensor]:
    """A convolution's weight gradient as a matrix product over positions.

    From g [n, b, o, *out] and x [n, b, i, *in] to (patches [n, groups, t, columns], rows [n, groups, t, r])
    such that rowsᵀ @ patches, per sample and group, is the weight's gradient; t runs over output positions
    and the inner batch b. A transposed convolution is the adjoint of an ordinary one: input and cotangent
    change places.
    """
    if geometry.transposed:
        g, x = x, g
    kernel, positions = shape[2:], g.shape[3:]
    n, b, groups = x.shape[0], x.shape[1], geometry.groups
    patches = windows(
        x.flatten(0, 1), kernel, positions, geometry
    )  # [n * b, i, *kernel, *positions], a view so far

    def by_group(x: torch.Tensor) -> torch.Tensor:
        """Copied with the positions last, so that whole rows of the input are copied at once."""
        x = x.reshape(n, b, groups, -1, positions.numel()).permute(0, 2, 3, 1, 4)
        return x.reshape(n, groups, -1, b * positions.numel()).transpose(2, 3)

    return by_group(patches), by_group(g)


def windows(x: torch.Tensor, kernel: torch.Size, positions: torch.Size, geometry: Geometry) -> torch.Tensor:
    """[m, i, *kernel, *positions]: a view of the padded input x [m, i, *in], without materialised patches."""
    spatial = len(kernel)
    x = padded(x, kernel, positions, geometry)
    for d in range(spatial):
        dilation = geometry.dilation[d]
        x = x.unfold(2 + d, (kernel[d] - 1) * dilation + 1, geometry.stride[d]).narrow(2 + d, 0, positions[d])
        if dilation > 1:
            x = x[..., ::dilation]
    return x.permute(0, 1, *range(2 + spatial, 2 + 2 * spatial), *range(2, 2 + spatial))


def padded_sides(
    sides: Sequence[int], kernel: Sequence[int], positions: Sequence[int], geometry: Geometry
) -> list[int]:
    """The input's sides with its padding: in front as declared, behind as far as the last window reaches."""
    reach = [
        (p - 1) * s + (k - 1) * d + 1
        for p, k, s, d in zip(positions, kernel, geometry.stride, geometry.dilation, strict=True)
    ]
    return [max(r, pad + side) for r, pad, side in zip(reach, geometry.padding, sides, strict=True)]


def padded(x: torch.Tensor, kernel: torch.Size, positions: torch.Size, geometry: Geometry) -> torch.Tensor:
    """The input [m, i, *in] with zeros around it."""
    front, sides = geometry.padding, x.shape[2:]
    whole = padded_sides(sides, kernel, positions, geometry)
    pad = [v for a in reversed(range(len(sides))) for v in (front[a], whole[a] - front[a] - sides[a])]
    return torch.constant_pad_nd(x, pad) if any(pad) else x
