"""Layer norm and group norm, by the statistics of a sample."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from psgrad.engine.transforms.interpreter import run
from psgrad.engine.transforms.rules.families import aten, cast, first_result, sum_to
from psgrad.engine.transforms.rules.registry import JointVJP, Op, define

# -- layer norm ----------------------------------------------------------------------------------------------


def _through_statistics(
    x: torch.Tensor, mean: torch.Tensor, rstd: torch.Tensor, gs: Sequence[Any]
) -> torch.Tensor:
    """The input's cotangent from those of its mean and reciprocal deviation, which occur in second
    derivatives only.

    x is [m, k] and the others are [m, 1]: m sets of k elements, each normalised separately.
    """
    total = torch.zeros_like(x)
    if gs[0] is not None:
        total = total + gs[0] / x.shape[1]
    if gs[1] is not None:
        total = total - gs[1] * rstd**3 * (x - mean) / x.shape[1]
    return total


def _input_back(
    result_back: Callable[[torch.Tensor], torch.Tensor],
    x: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
) -> Callable[..., Any]:
    """The function from the cotangents of (result, mean, rstd) to the input's. result_back: the same from the
    result's cotangent alone.
    """

    def back(gs: Sequence[Any]) -> torch.Tensor | None:
        through_result = result_back(gs[0]) if gs[0] is not None else None
        if gs[1] is None and gs[2] is None:
            return through_result
        sets = mean.numel()
        elements = x.reshape(sets, x.numel() // max(sets, 1))
        of_statistics = [g.reshape(sets, 1) if g is not None else None for g in gs[1:]]
        through = (
            _through_statistics(elements, mean.reshape(sets, 1), rstd.reshape(sets, 1), of_statistics)
            .reshape(x.shape)
            .to(x.dtype)
        )
        return through if through_result is None else through_result + through

    return back


def _layer_norm_input(
    out: Any, x: torch.Tensor, shape: Sequence[int], weight: Any, bias: Any, eps: float
) -> Callable[[list[Any]], Any]:
    _, mean, rstd = out
    return _input_back(
        lambda g: run(
            aten.native_layer_norm_backward.default,
            g,
            x,
            shape,
            mean,
            rstd,
            weight,
            bias,
            [True, False, False],
        )[0],
        x,
        mean,
        rstd,
    )


def _layer_norm_weight(
    out: Any, x: torch.Tensor, shape: Sequence[int], weight: torch.Tensor, bias: Any, eps: float
) -> Callable[[torch.Tensor], torch.Tensor]:
    _, mean, rstd = out
    size, dtype = weight.shape, weight.dtype
    wide = torch.promote_types(x.dtype, torch.float32)  # the sum over positions must not be in half precision
    return lambda g: sum_to(cast(g, wide) * ((x - mean) * rstd), size, dtype)


def _layer_norm_bias(
    out: Any, x: torch.Tensor, shape: Sequence[int], weight: Any, bias: torch.Tensor, eps: float
) -> Callable[[torch.Tensor], torch.Tensor]:
    size, dtype = bias.shape, bias.dtype
    return lambda g: sum_to(g, size, dtype)


def _layer_norm_batch(
    batch: Any, op: Op, x: torch.Tensor, shape: Sequence[int], weight: Any, bias: Any, eps: float
) -> Any:
    if not (batch.is_mapped(weight) or batch.is_mapped(bias)):
        return op(batch.physical(x), shape, weight, bias, eps)
    out, mean, rstd = op(batch.physical(x), shape, None, None, eps)
    return _scaled_and_shifted(batch, out, weight, bias, x.dim()), mean, rstd


def _scaled_and_shifted(batch: Any, out: torch.Tensor, weight: Any, bias: Any, rank: int) -> torch.Tensor:
    """A normalised value [n, *] of logical rank `rank`, times a weight and plus a bias that broadcast to one
    sample of it; None for neither.
    """
    out = out if weight is None else out * batch.aligned(weight, rank)
    return out if bias is None else out + batch.aligned(bias, rank)


def _layer_norm_of_halves(
    x: torch.Tensor, shape: Sequence[int], weight: Any, bias: Any, eps: float
) -> tuple[torch.Tensor, ...] | None:
    """The layer norm of half-precision values, computed in single precision on a CPU. The CPU's kernel rounds
    means and deviations to the type of `x`, and higher derivatives magnify this error. Other devices return
    them in single precision.
    """
    if x.dtype not in (torch.float16, torch.bfloat16) or x.device.type != "cpu":
        return None
    wide = [None if t is None else cast(t, torch.float32) for t in (x, weight, bias)]
    out, mean, rstd = aten.native_layer_norm.default(wide[0], shape, *wide[1:], eps)
    narrow = x.dtype if weight is None else weight.dtype
    return cast(out, x.dtype), cast(mean, narrow), cast(rstd, narrow)


define(
    aten.native_layer_norm.default,
    vjp={0: _layer_norm_input, 2: first_result(_layer_norm_weight), 3: first_result(_layer_norm_bias)},
    batch=_layer_norm_batch,
    instead=_layer_norm_of_halves,
)


def _layer_norm_backward_batch(
    batch: Any,
    op: Op,
    g: torch.Tensor,
    x: torch.Tensor,
    shape: Sequence[int],
    mean: Any,
    rstd: Any,
    weight: Any,
    bias: Any,
    mask: Sequence[bool],
) -> Any:
    assert not any(mask[1:]), "the rules above compute only the input's cotangent by this kernel"
    cotangent = batch.physical(g)
    if batch.is_mapped(weight):
        cotangent, weight = cotangent * batch.aligned(weight, g.dim()), None
    return op(
        cotangent,
        batch.physical(x),
        shape,
        batch.physical(mean),
        batch.physical(rstd),
        weight,
        None if batch.is_mapped(bias) else bias,
        mask,
    )


define(aten.native_layer_norm_backward.default, batch=_layer_norm_backward_batch)

# -- group norm ----------------------------------------------------------------------------------------------


def _group_norm_back(
    out: Any, x: torch.Tensor, weight: Any, bias: Any, b: int, c: int, hw: int, groups: int, eps: float
) -> Any:
    _, mean, rstd = out

    def back(gs: Sequence[Any], positions: Sequence[int]) -> dict[int, Any]:
        grads: Any = (None, None, None)
        if gs[0] is not None:
            wanted = [position in positions for position in range(3)]
            grads = run(
                aten.native_group_norm_backward.default,
                gs[0].contiguous(),
                x,
                mean,
                rstd,
                weight,
                b,
                c,
                hw,
                groups,
                wanted,
            )
        to_input = _input_back(lambda _: grads[0], x, mean, rstd)(gs) if 0 in positions else None
        return {0: to_input, 1: grads[1], 2: grads[2]}

    return back


def _group_norm_of_halves(x: torch.Tensor, weight: Any, bias: Any, *sizes: Any) -> Any:
    """The group norm of half-precision values, computed in single precision. The kernel rounds means and
    deviations to the type of `x`, and second derivatives magnify this error.
    """
    if x.dtype not in (torch.float16, torch.bfloat16):
        return None
    wide = [None if t is None else cast(t, torch.float32) for t in (x, weight, bias)]
    return tuple(cast(t, x.dtype) for t in aten.native_group_norm.default(*wide, *sizes))


def _group_norm_batch(
    batch: Any, op: Op, x: torch.Tensor, weight: Any, bias: Any, b: int, c: int, *sizes: Any
) -> Any:
    mapped = batch.is_mapped(weight) or batch.is_mapped(bias)
    out, mean, rstd = batch.unfold(
        op(batch.fold(x), None if mapped else weight, None if mapped else bias, b * batch.size, c, *sizes), b
    )
    if mapped:
        weight, bias = (t if t is None else t.reshape(c, *(1,) * (x.dim() - 2)) for t in (weight, bias))
        out = _scaled_and_shifted(batch, out, weight, bias, x.dim())
    return out, mean, rstd


define(
    aten.native_group_norm.default,
    vjp=JointVJP(_group_norm_back),
    instead=_group_norm_of_halves,
    batch=_group_norm_batch,
)


def _group_norm_backward_batch(
    batch: Any,
    op: Op,
    g: torch.Tensor,
    x: torch.Tensor,
    mean: Any,
    rstd: Any,
    weight: Any,
    b: int,
    c: int,
    hw: int,
    groups: int,
    mask: Any,
) -> Any:
    """The batching rule. The samples become channels of a single image, so that the kernel's sums over images
    do not add samples, also for the weights.
    """
    images = batch.size * b
    values = [batch.physical(t).reshape(1, images * c, hw) for t in (g, x)]
    statistics = [batch.physical(t).reshape(1, images * groups) for t in (mean, rstd)]
    each = None
    if weight is not None:
        each = (
            batch.physical(weight).unsqueeze(1).expand(-1, b, -1).reshape(-1)
            if batch.is_mapped(weight)
            else weight.repeat(images)
        )
    dx, dweight, dbias = op(*values, *statistics, each, 1, images * c, hw, images * groups, mask)
    of_parameters = [
        (grad.reshape(images, c) if b == 1 else grad.reshape(batch.size, b, c).sum(1)) if wanted else None
        for grad, wanted in ((dweight, mask[1]), (dbias, mask[2]))
    ]
    return (dx.reshape(batch.physical(x).shape) if mask[0] else None, *of_parameters)


define(aten.native_group_norm_backward.default, batch=_group_norm_backward_batch)
