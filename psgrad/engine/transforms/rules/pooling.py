"""Pooling and resampling: the sample axis is folded into the kernels' batch axis."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from psgrad.engine.transforms.rules.families import aten, folded
from psgrad.engine.transforms.rules.registry import Op, define


def pooled(axes: int, tensors: int = 1) -> Callable[..., Any]:
    """Batching for a kernel that takes `tensors` tensors first, each with `axes` spatial axes, a channel axis
    and perhaps a batch axis.
    """

    def rule(batch: Any, op: Op, *args: Any, **kwargs: Any) -> Any:
        rank = axes + 2
        if args[0].dim() == rank:
            return folded(*range(len(args)))(batch, op, *args, **kwargs)
        return op(*[batch.physical(a) if isinstance(a, torch.Tensor) else a for a in args], **kwargs)

    return rule


def _max_pool_back(backward: Op, spatial: int) -> Any:
    def make(
        out: Any,
        x: torch.Tensor,
        kernel: Any,
        stride: Any = (),
        padding: Any = 0,
        dilation: Any = 1,
        ceil_mode: bool = False,
    ) -> Any:
        def fill(value: Any, default: Any) -> Any:
            return default if value in ((), []) else [value] * spatial if isinstance(value, int) else value

        return lambda gs: (
            backward(
                gs[0], x, kernel, fill(stride, kernel), fill(padding, 0), fill(dilation, 1), ceil_mode, out[1]
            )
            if gs[0] is not None
            else None
        )

    return make


def _picked(spatial: int) -> Any:
    """The VJP of a max pool's backward, which puts each cotangent to one place: the values at those
    places.
    """

    def make(out: torch.Tensor, g: torch.Tensor, x: torch.Tensor, *args: Any) -> Any:
        index, shape = args[-1].flatten(-spatial), g.shape
        return lambda h: h.flatten(-spatial).gather(-1, index).reshape(shape)

    return make


define(
    aten.max_pool2d_with_indices.default,
    vjp={0: _max_pool_back(aten.max_pool2d_with_indices_backward.default, 2)},
    batch=pooled(2),
)
define(
    aten.max_pool3d_with_indices.default,
    vjp={0: _max_pool_back(aten.max_pool3d_with_indices_backward.default, 3)},
    batch=pooled(3),
)
define(aten.max_pool2d_with_indices_backward.default, vjp={0: _picked(2)}, batch=pooled(2))
define(aten.max_pool3d_with_indices_backward.default, vjp={0: _picked(3)}, batch=pooled(3))

define(
    aten.adaptive_max_pool2d.default,
    vjp={
        0: lambda out, x, size: (
            lambda gs: (
                aten.adaptive_max_pool2d_backward.default(gs[0], x, out[1]) if gs[0] is not None else None
            )
        )
    },
    batch=pooled(2),
)
define(
    aten.adaptive_max_pool3d.default,
    vjp={
        0: lambda out, x, size: (
            lambda gs: (
                aten.adaptive_max_pool3d_backward.default(gs[0], x, out[1]) if gs[0] is not None else None
            )
        )
    },
    batch=pooled(3),
)
define(aten.adaptive_max_pool2d_backward.default, vjp={0: _picked(2)}, batch=pooled(2))
define(aten.adaptive_max_pool3d_backward.default, vjp={0: _picked(3)}, batch=pooled(3))


# -- fractional max pooling: the places are drawn outside and come as an argument ----------------------------


def _fractional_back(backward: Op) -> Any:
    return lambda out, x, kernel, size, samples: (
        lambda gs: backward(gs[0], x, kernel, size, out[1]) if gs[0] is not None else None
    )


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
    _forward = getattr(aten, f"fractional_max_pool{_axes}d").default
    _backward = getattr(aten, f"fractional_max_pool{_axes}d_backward").default
    define(_forward, vjp={0: _fractional_back(_backward)}, batch=_fractional_batch(_axes))
    define(_backward, vjp={0: _picked(_axes)}, batch=_fractional_batch(_axes))

# -- averages ------------------------------------------------------------------------------------------------


def _avg_back(backward: Op) -> Any:
    def make(
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

    return make


define(aten.avg_pool2d.default, vjp={0: _avg_back(aten.avg_pool2d_backward.default)}, batch=pooled(2))
define(aten.avg_pool3d.default, vjp={0: _avg_back(aten.avg_pool3d_backward.default)}, batch=pooled(3))
define(
    aten.avg_pool2d_backward.default,
    vjp={0: lambda out, g, x, *args: lambda h: aten.avg_pool2d.default(h, *args)},
    batch=pooled(2),
)
define(
    aten.avg_pool3d_backward.default,
    vjp={0: lambda out, g, x, *args: lambda h: aten.avg_pool3d.default(h, *args)},
    batch=pooled(3),
)
define(
    aten._adaptive_avg_pool2d.default,
    vjp={0: lambda out, x, size: lambda g: aten._adaptive_avg_pool2d_backward.default(g, x)},
    batch=pooled(2),
)
define(
    aten._adaptive_avg_pool3d.default,
    vjp={0: lambda out, x, size: lambda g: aten._adaptive_avg_pool3d_backward.default(g, x)},
    batch=pooled(3),
)
define(
    aten._adaptive_avg_pool2d_backward.default,
    vjp={0: lambda out, g, x: lambda h, size=g.shape[-2:]: aten._adaptive_avg_pool2d.default(h, size)},
    batch=pooled(2),
)
define(
    aten._adaptive_avg_pool3d_backward.default,
    vjp={0: lambda out, g, x: lambda h, size=g.shape[-3:]: aten._adaptive_avg_pool3d.default(h, size)},
    batch=pooled(3),
)
