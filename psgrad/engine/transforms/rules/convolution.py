"""Convolution: the sample axis is folded into the kernel's batch axis; the per-sample weight gradient is one
kernel call a chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from psgrad.engine.transforms.interpreter import run
from psgrad.engine.transforms.rules.convolution_weights import Geometry, weight_gradients
from psgrad.engine.transforms.rules.families import aten, of_one_if_empty
from psgrad.engine.transforms.rules.registry import Op, define, replace

INPUT, WEIGHT = range(2)


def _gradient(which: int, g: Any, x: torch.Tensor, weight: torch.Tensor, geometry: Any) -> torch.Tensor:
    """The kernel's gradient in the input or in the weight."""
    mask = [which == INPUT, which == WEIGHT, False]
    return run(aten.convolution_backward.default, g, x, weight, [0], *geometry, mask)[which]  # type: ignore[no-any-return]


def _bias_back(out: torch.Tensor, *args: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda g: g.sum([0, *range(2, g.dim())])


def _batch(batch: Any, op: Op, x: torch.Tensor, weight: torch.Tensor, bias: Any, *args: Any) -> torch.Tensor:
    geometry = Geometry.of(args, weight.dim() - 2)
    if batch.is_mapped(weight):
        out = _own_weights(batch, op, x, weight, geometry)
    elif batch.is_mapped(bias):
        out = batch.unfold(op(batch.fold(x), weight, None, *geometry), x.shape[0])
    else:
        return batch.unfold(op(batch.fold(x), weight, bias, *geometry), x.shape[0])
    if bias is not None:
        spatial = (1,) * (weight.dim() - 2)
        out = out + (
            batch.raw(bias).reshape(batch.size, 1, bias.shape[0], *spatial)
            if batch.is_mapped(bias)
            else bias.reshape(bias.shape[0], *spatial)
        )
    return out


@of_one_if_empty
def _own_weights(
    batch: Any, op: Op, x: torch.Tensor, weight: torch.Tensor, geometry: Geometry
) -> torch.Tensor:
    """Each sample has weights of its own (an ensemble, or a second level of vmap): the samples become
    groups.
    """
    n, w = batch.size, batch.physical(weight)
    if not batch.is_mapped(x) and geometry.groups == 1 and not geometry.transposed:
        # one input for all: the samples become output channels
        out = op(x, w.flatten(0, 1), None, *geometry)
        return out.unflatten(1, (n, -1)).movedim(1, 0)
    inputs = batch.physical(x).movedim(0, 1).flatten(1, 2)  # [b, n * i, *]
    out = op(inputs, w.flatten(0, 1), None, *geometry[:-1], geometry.groups * n)
    return out.unflatten(1, (n, -1)).movedim(1, 0)


define(
    aten.convolution.default,
    vjp={
        0: lambda out, x, weight, bias, *geometry: lambda g: _gradient(INPUT, g, x, weight, geometry),
        1: lambda out, x, weight, bias, *geometry: lambda g: _gradient(WEIGHT, g, x, weight, geometry),
        2: _bias_back,
    },
    batch=_batch,
)


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


def _input_gradient(
    batch: Any, op: Op, g: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, geometry: Geometry
) -> torch.Tensor:
    only = [True, False, False]
    if not batch.is_mapped(weight):
        return batch.unfold(op(batch.fold(g), batch.fold(x), weight, [0], *geometry, only)[0], x.shape[0])
    return _input_gradient_of_own_weights(batch, op, g, x, weight, geometry)


@of_one_if_empty
def _input_gradient_of_own_weights(
    batch: Any, op: Op, g: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, geometry: Geometry
) -> torch.Tensor:
    n, only = batch.size, [True, False, False]
    folded = [batch.physical(t).movedim(0, 1).flatten(1, 2) for t in (g, x)]
    out = op(*folded, batch.physical(weight).flatten(0, 1), [0], *geometry[:-1], geometry.groups * n, only)[0]
    return out.unflatten(1, (n, -1)).movedim(1, 0)


# Each of the three gradients is linear in the cotangent g and in one of x and weight, so its own derivatives
# are convolutions again.


def _cotangent_back(
    out: Any, g: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias_sizes: Any, *args: Any
) -> Callable[..., Any]:
    geometry, shape = args[:-1], g.shape

    def back(hs: Sequence[Any]) -> torch.Tensor:
        of_x, of_weight, of_bias = hs
        parts = []
        if of_x is not None:
            parts.append(aten.convolution.default(of_x, weight, None, *geometry))
        if of_weight is not None:
            parts.append(aten.convolution.default(x, of_weight, None, *geometry))
        if of_bias is not None:
            parts.append(of_bias.reshape(shape[1], *(1,) * (len(shape) - 2)).expand(shape))
        return sum(parts[1:], start=parts[0])

    return back


def _backward_input_back(
    out: Any, g: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias_sizes: Any, *args: Any
) -> Callable[..., Any]:
    return lambda hs: _gradient(INPUT, g, x, hs[1], args[:-1]) if hs[1] is not None else None


def _backward_weight_back(
    out: Any, g: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias_sizes: Any, *args: Any
) -> Callable[..., Any]:
    return lambda hs: _gradient(WEIGHT, g, hs[0], weight, args[:-1]) if hs[0] is not None else None


define(
    aten.convolution_backward.default,
    vjp={0: _cotangent_back, 1: _backward_input_back, 2: _backward_weight_back},
    batch=_backward_batch,
)


def _ordinary(op: Op, axes: int) -> None:
    """A layer's convolution as the general operator, without PyTorch's composite definition at each level."""

    def convolution(
        x: Any,
        weight: Any,
        bias: Any = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> Any:
        spread = [
            [value] * axes if isinstance(value, int) else value for value in (stride, padding, dilation)
        ]
        # one image without a batch axis; complex numbers, which PyTorch decomposes; dtypes that PyTorch
        # refuses
        if x.dim() != axes + 2 or x.dtype.is_complex or x.dtype != weight.dtype:
            return op.decompose(x, weight, bias, *spread, groups)
        return run(aten.convolution.default, x, weight, bias, *spread, False, [0] * axes, groups)

    replace(op)(convolution)


for _op, _axes in ((aten.conv1d.default, 1), (aten.conv2d.default, 2), (aten.conv3d.default, 3)):
    _ordinary(_op, _axes)
