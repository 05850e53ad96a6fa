"""Convolution: the sample axis is folded into the kernel's batch axis; the per-sample weight gradient is one kernel call a chunk."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from psgrad.engine.transforms.rules.families import aten
from psgrad.engine.transforms.rules.registry import Op, define


class Geometry(NamedTuple):
    """A convolution's arguments behind its tensors, in the operator's order."""

    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]
    transposed: bool
    output_padding: Sequence[int]
    groups: int

    @classmethod
    def of(cls, args: Sequence[Any], axes: int) -> Geometry:
        """PyTorch lets one number stand for all spatial axes."""
        spread: list[Any] = [list(a) * axes if isinstance(a, (list, tuple)) and len(a) == 1 else a for a in args]
        return cls(*spread)


def _input_back(
    out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: Any, *geometry: Any
) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda g: aten.convolution_backward.default(g, x, weight, [0], *geometry, [True, False, False])[0]


def _weight_back(
    out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: Any, *geometry: Any
) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda g: aten.convolution_backward.default(g, x, weight, [0], *geometry, [False, True, False])[1]


def _bias_back(out: torch.Tensor, *args: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda g: g.sum([0, *range(2, g.dim())])


def _batch(batch: Any, op: Op, x: torch.Tensor, weight: torch.Tensor, bias: Any, *args: Any) -> torch.Tensor:
    geometry = Geometry.of(args, weight.dim() - 2)
    if batch.is_mapped(weight):
        out = _own_weights(batch, op, x, weight, geometry)
    elif batch.is_mapped(bias):
        out = batch.unfold(op(batch.fold(x), weight, None, *geometry))
    else:
        return batch.unfold(op(batch.fold(x), weight, bias, *geometry))
    if bias is not None:
        spatial = (1,) * (weight.dim() - 2)
        out = out + (batch.raw(bias).reshape(batch.size, 1, -1, *spatial) if batch.is_mapped(bias) else bias.reshape(-1, *spatial))
    return out


def _own_weights(batch: Any, op: Op, x: torch.Tensor, weight: torch.Tensor, geometry: Geometry) -> torch.Tensor:
    """Each sample has weights of its own (an ensemble, or a second level of vmap): the samples become groups."""
    n, w = batch.size, batch.physical(weight)
    if not batch.is_mapped(x) and geometry.groups == 1 and not geometry.transposed:
        # one input for all: the samples become output channels
        out = op(x, w.flatten(0, 1), None, *geometry)
        return out.unflatten(1, (n, -1)).movedim(1, 0)
    inputs = batch.physical(x).movedim(0, 1).flatten(1, 2)  # [b, n * i, *]
    out = op(inputs, w.flatten(0, 1), None, *geometry[:-1], geometry.groups * n)
    return out.unflatten(1, (n, -1)).movedim(1, 0)


define(aten.convolution.default, vjp={0: _input_back, 1: _weight_back, 2: _bias_back}, batch=_batch)


def _backward_batch(
    batch: Any, op: Op, g: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias_sizes: Any, *args: Any
) -> tuple[torch.Tensor | None, ...]:
    geometry, mask = Geometry.of(args[:-1], weight.dim() - 2), args[-1]
    grad_x = grad_weight = grad_bias = None
    if mask[0]:
        grad_x = _input_gradient(batch, op, g, x, weight, geometry)
    if mask[1]:
        grad_weight = weight_gradients(batch.physical(g), batch.physical(x), weight.shape, geometry)
    if mask[2]:
        grad_bias = batch.physical(g).sum([1, *range(3, g.dim() + 1)])
    return grad_x, grad_weight, grad_bias


def _input_gradient(batch: Any, op: Op, g: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, geometry: Geometry) -> torch.Tensor:
    only = [True, False, False]
    if not batch.is_mapped(weight):
        return batch.unfold(op(batch.fold(g), batch.fold(x), weight, [0], *geometry, only)[0])
    n = batch.size
    folded = [batch.physical(t).movedim(0, 1).flatten(1, 2) for t in (g, x)]
    out = op(*folded, batch.physical(weight).flatten(0, 1), [0], *geometry[:-1], geometry.groups * n, only)[0]
    return out.unflatten(1, (n, -1)).movedim(1, 0)


# Each of the three gradients is linear in the cotangent g and in one of x and weight, so its own derivatives are convolutions again.


def _cotangent_back(out: Any, g: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias_sizes: Any, *args: Any) -> Callable[..., Any]:
    geometry, shape = args[:-1], g.shape

    def back(hs: Sequence[Any]) -> torch.Tensor:
        of_x, of_weight, of_bias = hs
        parts = []
        if of_x is not None:
            parts.append(aten.convolution.default(of_x, weight, None, *geometry))
        if of_weight is not None:
            parts.append(aten.convolution.default(x, of_weight, None, *geometry))
        if of_bias is not None:
            parts.append(of_bias.reshape(-1, *(1,) * (len(shape) - 2)).expand(shape))
        return sum(parts[1:], start=parts[0])

    return back


def _backward_input_back(
    out: Any, g: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias_sizes: Any, *args: Any
) -> Callable[..., Any]:
    only = [True, False, False]
    return lambda hs: aten.convolution_backward.default(g, x, hs[1], [0], *args[:-1], only)[0] if hs[1] is not None else None


def _backward_weight_back(
    out: Any, g: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias_sizes: Any, *args: Any
) -> Callable[..., Any]:
    only = [False, True, False]
    return lambda hs: aten.convolution_backward.default(g, hs[0], weight, [0], *args[:-1], only)[1] if hs[0] is not None else None


define(
    aten.convolution_backward.default,
    vjp={0: _cotangent_back, 1: _backward_input_back, 2: _backward_weight_back},
    batch=_backward_batch,
)


def weight_gradients(g: torch.Tensor, x: torch.Tensor, shape: torch.Size, geometry: Geometry) -> torch.Tensor:
    """Per-sample weight gradients [n, *shape] of a convolution with output cotangents g [n, b, o, *] and inputs x [n, b, i, *]."""
    if not g.shape[0]:
        return g.new_zeros(0, *shape)
    if grouped_kernel_is_fast(g, shape):
        return as_groups(g, x, shape, geometry)
    columns, cotangents = as_matrices(g, x, shape, geometry)
    return torch.matmul(columns.transpose(-2, -1), cotangents).transpose(-2, -1).reshape(g.shape[0], *shape)


def grouped_kernel_is_fast(g: torch.Tensor, shape: torch.Size) -> bool:
    """On a CPU the kernel for float32 takes groups at nearly the price of one sum over all samples, if they have enough channels.

    Measured (benchmarks/convolution.py): 1.1 to 1.9 times the summed gradient with 16 to 64 channels, where patches and a matrix
    product take 2.4 to 3.4 times; with 1 or 3 input channels the other way round. Other devices and types have no such kernel.
    """
    return g.device.type == "cpu" and g.dtype == torch.float32 and min(shape[0], shape[1]) >= 8


def as_groups(g: torch.Tensor, x: torch.Tensor, shape: torch.Size, geometry: Geometry) -> torch.Tensor:
    """The samples as groups of one convolution, whose weight gradient then has a part for each."""
    n = g.shape[0]
    folded = [t.movedim(0, 1).flatten(1, 2) for t in (g, x)]  # [b, n * channels, *]
    weight = torch.empty((), dtype=g.dtype, device=g.device).expand(n * shape[0], *shape[1:])  # asked for its shape alone
    only = [False, True, False]
    grouped = aten.convolution_backward.default(*folded, weight, [0], *geometry[:-1], geometry.groups * n, only)[1]
    return grouped.reshape(n, *shape)


def as_matrices(g: torch.Tensor, x: torch.Tensor, shape: torch.Size, geometry: Geometry) -> tuple[torch.Tensor, torch.Tensor]:
    """A convolution's weight gradient as a matrix product over positions.

    From g [n, b, o, *out] and x [n, b, i, *in] to (patches [n, groups, t, columns], rows [n, groups, t, r]) such that
    rowsᵀ @ patches, per sample and group, is the weight's gradient; t runs over output positions and the inner batch b. A transposed
    convolution is the adjoint of an ordinary one: input and cotangent change places.
    """
    if geometry.transposed:
        g, x = x, g
    kernel, positions = shape[2:], g.shape[3:]
    n, b, groups = x.shape[0], x.shape[1], geometry.groups
    patches = windows(x.flatten(0, 1), kernel, positions, geometry)  # [n * b, i, *kernel, *positions], nothing copied yet
    # Written out with the positions last: whole rows of the input are copied at once.
    patches = patches.reshape(n, b, groups, -1, positions.numel()).permute(0, 2, 3, 1, 4).reshape(n, groups, -1, b * positions.numel())
    rows = g.reshape(n, b, groups, -1, positions.numel()).permute(0, 2, 3, 1, 4).reshape(n, groups, -1, b * positions.numel())
    return patches.transpose(2, 3), rows.transpose(2, 3)


def windows(x: torch.Tensor, kernel: torch.Size, positions: torch.Size, geometry: Geometry) -> torch.Tensor:
    """[m, i, *kernel, *positions]: a view of the padded input x [m, i, *in] in which no patch is written out."""
    spatial = len(kernel)
    x = padded(x, kernel, positions, geometry)
    for d in range(spatial):
        dilation = geometry.dilation[d]
        x = x.unfold(2 + d, (kernel[d] - 1) * dilation + 1, geometry.stride[d]).narrow(2 + d, 0, positions[d])
        if dilation > 1:
            x = x[..., ::dilation]
    return x.permute(0, 1, *range(2 + spatial, 2 + 2 * spatial), *range(2, 2 + spatial))


def padded(x: torch.Tensor, kernel: torch.Size, positions: torch.Size, geometry: Geometry) -> torch.Tensor:
    """The input with zeros around it, as far as the windows reach: padding in front, behind as much as the last window needs."""
    pad: list[int] = []
    for d in reversed(range(len(kernel))):
        reach = (positions[d] - 1) * geometry.stride[d] + (kernel[d] - 1) * geometry.dilation[d] + 1
        pad += [geometry.padding[d], max(0, reach - geometry.padding[d] - x.shape[2 + d])]
    return torch.constant_pad_nd(x, pad) if any(pad) else x
