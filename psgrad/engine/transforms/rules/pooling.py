"""Pooling: the sample axis is folded into the kernels' batch axis."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from psgrad.engine.transforms.rules.families import aten, first_result, folded, on_physical
from psgrad.engine.transforms.rules.registry import Op, define


def pooled(axes: int) -> Callable[..., Any]:
    """Batching for a kernel on tensors with `axes` spatial axes, a channel axis and perhaps a batch axis."""

    def rule(batch: Any, op: Op, *args: Any, **kwargs: Any) -> Any:
        if args[0].dim() == axes + 2:
            return folded(*range(len(args)))(batch, op, *args, **kwargs)
        return on_physical(batch, op, *args, **kwargs)

    return rule


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


def _fractional_batch(axes: int) -> Callable[..., Any]:
    """Images may have a batch axis or none; the drawn places [b, c, axes], an argument of the forward
    operator only, always have one.
    """

    def rule(batch: Any, op: Op, *args: Any) -> Any:
        def images(x: torch.Tensor) -> torch.Tensor:
            return batch.physical(x).reshape(-1, *x.shape[-(axes + 1) :])

        *given, last = args
        # the backward kernel's indices are images
        last = images(last) if last.dtype == torch.long else batch.fold(last)
        result = op(*[images(a) if isinstance(a, torch.Tensor) else a for a in given], last)
        return result if args[0].dim() == axes + 1 else batch.unfold(result)

    return rule


for _axes in (2, 3):
    _declare_largest(f"max_pool{_axes}d_with_indices", _axes, _max_pool_back(_axes), pooled(_axes))
    _declare_largest(f"adaptive_max_pool{_axes}d", _axes, _adaptive_back, pooled(_axes))
    # of places that are drawn outside
    _declare_largest(f"fractional_max_pool{_axes}d", _axes, _fractional_back, _fractional_batch(_axes))

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
