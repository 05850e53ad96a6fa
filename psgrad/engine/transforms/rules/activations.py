"""Activations, and the fused kernels that compute their derivatives."""

from __future__ import annotations

from typing import Any

import torch

from psgrad.engine.transforms.interpreter import run
from psgrad.engine.transforms.rules.elementwise import conj
from psgrad.engine.transforms.rules.families import (
    aten,
    broadcasting,
    diagonal_jvp,
    elementwise,
    elementwise_batch,
    first_result,
    shifted,
    sum_to,
)
from psgrad.engine.transforms.rules.registry import Maker, Op, define

elementwise(aten.relu.default, x0=lambda out, x: lambda g: run(aten.threshold_backward.default, g, out, 0))
elementwise(
    aten.threshold.default,
    x0=lambda out, x, threshold, value: lambda g: run(aten.threshold_backward.default, g, x, threshold),
)
elementwise(aten.relu6.default, x0=lambda out, x: lambda g: run(aten.hardtanh_backward.default, g, x, 0, 6))
elementwise(
    aten.gelu.default,
    x0=lambda out, x, approximate="none": (
        lambda g: run(aten.gelu_backward.default, g, x, approximate=approximate)
    ),
)
elementwise(
    aten.elu.default,
    x0=lambda out, x, alpha=1, scale=1, input_scale=1: (
        lambda g: run(aten.elu_backward.default, g, alpha, scale, input_scale, False, x)
    ),
)
elementwise(
    aten.leaky_relu.default,
    x0=lambda out, x, slope=0.01: lambda g: run(aten.leaky_relu_backward.default, g, x, slope, False),
)


def _by_kernel(backward: Op, *defaults: Any) -> Maker:
    """The VJP by a kernel of the cotangent, x and the options, for which it has no defaults itself."""
    return lambda out, x, *options: lambda g: run(backward, g, x, *options, *defaults[len(options) :])


for _name, _defaults in (
    ("silu", ()),
    ("mish", ()),
    ("hardswish", ()),
    ("hardsigmoid", ()),
    ("softplus", (1, 20)),
    ("softshrink", (0.5,)),
    ("hardshrink", (0.5,)),
):
    _backward = getattr(aten, f"{_name}_backward").default
    elementwise(getattr(aten, _name).default, x0=_by_kernel(_backward, *_defaults))


def _prelu_back(position: int) -> Maker:
    return lambda out, x, weight: lambda g: run(aten._prelu_kernel_backward.default, g, x, weight)[position]


# At zero, PyTorch's first derivative of prelu is the left one; its forward mode and its second derivative use
# the right one.
define(
    aten._prelu_kernel.default,
    vjp={position: broadcasting(_prelu_back(position), position) for position in (0, 1)},
    jvp={
        0: diagonal_jvp(lambda out, x, weight: lambda t: torch.where(x >= 0, t, weight * t), 0),
        1: diagonal_jvp(lambda out, x, weight: lambda t: torch.where(x >= 0, 0, x * t), 1),
    },
    batch=elementwise_batch,
)


def _broadcast_batch(batch: Any, op: Any, *args: torch.Tensor, **kwargs: Any) -> Any:
    """Batching for kernels that don't broadcast: oneDNN's kernel of gelu, and that of prelu's derivative."""
    rank = max(x.dim() for x in args)
    return op(*torch.broadcast_tensors(*[batch.aligned(x, rank) for x in args]), **kwargs)


def _prelu_back_toward_g(out: Any, g: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> Any:
    def back(hs: list[Any]) -> torch.Tensor:
        below = [h * factor for h, factor in zip(hs, (weight, x), strict=True) if h is not None]
        return torch.where(x >= 0, 0 if hs[0] is None else hs[0], sum(below[1:], below[0]))

    return back


def _prelu_back_toward_x(out: Any, g: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> Any:
    return lambda hs: torch.where(x >= 0, 0, g * hs[1]) if hs[1] is not None else None


def _prelu_back_toward_weight(out: Any, g: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> Any:
    return lambda hs: (
        sum_to(torch.where(x >= 0, 0, g * hs[0]), weight.shape, weight.dtype) if hs[0] is not None else None
    )


define(
    aten._prelu_kernel_backward.default,
    vjp={0: _prelu_back_toward_g, 1: _prelu_back_toward_x, 2: _prelu_back_toward_weight},
    batch=_broadcast_batch,
)
define(
    aten.log_sigmoid_forward.default,
    vjp={0: first_result(lambda out, x: lambda g: g * _dlogsigmoid(x))},
    batch=elementwise_batch,
)


def _dlogsigmoid(x: torch.Tensor) -> torch.Tensor:
    """sigmoid(-x). For large x it is computed as exp(-x), because the kernel of sigmoid(-x) divides by
    infinity there.
    """
    large = x > 40  # 1 + exp(-40) is 1 in every type
    return torch.where(large, torch.exp(-torch.where(large, x, 40)), torch.sigmoid(-x))


def _glu_back(out: torch.Tensor, x: torch.Tensor, dim: int = -1) -> Any:
    values, gates = x.chunk(2, dim)
    open_gates = torch.sigmoid(gates)
    return lambda g: torch.cat([open_gates * g, (1 - open_gates) * open_gates * g * values], dim)


define(aten.glu.default, vjp={0: _glu_back}, batch=shifted(1))

# The fused kernels of the rules above. Second derivatives go through PyTorch's decompositions of them.
elementwise(
    aten.threshold_backward.default,
    x0=lambda out, g, x, threshold: lambda h: aten.threshold_backward(h, x, threshold),
)
elementwise(
    aten.tanh_backward.default,
    x0=lambda out, g, y: lambda h: aten.tanh_backward(h, conj(y)),
    x1=lambda out, g, y: lambda h: conj(h) * g * conj(-2 * y),
)
elementwise(
    aten.sigmoid_backward.default,
    x0=lambda out, g, y: lambda h: aten.sigmoid_backward(h, conj(y)),
    x1=lambda out, g, y: lambda h: conj(h) * g * conj(1 - 2 * y),
)


def _elu_second(
    g: torch.Tensor, alpha: Any, scale: Any, input_scale: Any, is_result: bool, x: torch.Tensor
) -> torch.Tensor:
    """The VJP of elu_backward in x: zero for positive x, for which the exponential in PyTorch's table is
    infinite.
    """
    below = g * input_scale
    return torch.where(
        x < 0,
        below if is_result else run(aten.elu_backward.default, below, alpha, scale, input_scale, False, x),
        0,
    )


def _softplus_second(g: torch.Tensor, x: torch.Tensor, beta: Any, threshold: Any) -> torch.Tensor:
    """The VJP of softplus_backward in x: zero from the threshold on, where the exponential in PyTorch's table
    may be infinite.
    """
    wide = x * beta
    return torch.where(wide < threshold, run(aten.sigmoid_backward.default, g, torch.sigmoid(wide)) * beta, 0)


elementwise(
    aten.elu_backward.default,
    x0=lambda out, g, *rest: lambda h: run(aten.elu_backward.default, h, *rest),
    x5=lambda out, g, *rest: lambda h: _elu_second(h * g, *rest),
)
elementwise(
    aten.softplus_backward.default,
    x0=lambda out, g, *rest: lambda h: run(aten.softplus_backward.default, h, *rest),
    x1=lambda out, g, *rest: lambda h: _softplus_second(h * g, *rest),
)
define(aten.gelu_backward.default, batch=_broadcast_batch)
define(
    aten.silu_backward.default,
    aten.mish_backward.default,
    aten.hardsigmoid_backward.default,
    aten.leaky_relu_backward.default,
    batch=elementwise_batch,
)
for _op in (
    aten.softshrink_backward.default,
    aten.hardshrink_backward.default,
    aten.hardtanh_backward.default,
):
    elementwise(_op, x0=lambda out, g, x, *bounds, op=_op: lambda h: run(op, h, x, *bounds))
elementwise(
    aten.hardswish_backward.default,
    x0=lambda out, g, x: lambda h: run(aten.hardswish_backward.default, h, x),
    x1=lambda out, g, x: lambda h: torch.where((x > -3) & (x < 3), h * g / 3, 0),
)
