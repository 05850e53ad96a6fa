"""The losses of values, pairs, margins and sequences. Most losses are a few elementwise operators and a mean;
PyTorch's tables define them so.
"""

from __future__ import annotations

from typing import Any

import torch

from psgrad.engine.transforms.interpreter import run
from psgrad.engine.transforms.private_torch import schema_of
from psgrad.engine.transforms.rules.families import aten, broadcasting, diagonal_jvp
from psgrad.engine.transforms.rules.registry import Maker, Op, define, replace
from psgrad.engine.transforms.rules.special import no_derivative


def reduced(loss: torch.Tensor, reduction: int) -> torch.Tensor:
    return loss if reduction == 0 else loss.mean() if reduction == 1 else loss.sum()


@replace(aten.mse_loss.default)
def _mse_loss(x: torch.Tensor, y: torch.Tensor, reduction: int = 1) -> torch.Tensor:
    difference = x - y
    return reduced(difference * difference, reduction)


def _element_by_element(op: Op, vjp: dict[int, Maker]) -> None:
    """Rules for a loss of pairs: each element's loss has derivatives, weights and reductions are other
    operators.
    """
    names = [argument.name for argument in schema_of(op).arguments]
    defaults = [argument.default_value for argument in schema_of(op).arguments]
    reduction, weight = names.index("reduction"), names.index("weight") if "weight" in names else None

    def full(args: Any, kwargs: Any) -> list[Any]:
        return [args[i] if i < len(args) else kwargs.get(name, defaults[i]) for i, name in enumerate(names)]

    def written(args: list[Any]) -> torch.Tensor | None:
        """The loss, if it has weights or a reduction."""
        weights = None if weight is None else args[weight]
        if weights is None and args[reduction] == 0:
            return None
        each = [None if i == weight else 0 if i == reduction else a for i, a in enumerate(args)]
        loss = op(*each)
        return reduced(loss if weights is None else loss * weights, args[reduction])

    def batch(batch: Any, _: Op, *args: Any, **kwargs: Any) -> torch.Tensor:
        each = full(args, kwargs)
        if (loss := written(each)) is not None:
            return batch.physical(loss)
        rank = each[0].dim()
        return op(
            *[
                batch.physical(a)
                if isinstance(a, torch.Tensor) and a.dim() == rank
                else batch.aligned(a, rank)
                for a in each
            ]
        )

    define(
        op,
        vjp={position: broadcasting(make, position) for position, make in vjp.items()},
        jvp={position: diagonal_jvp(make, position) for position, make in vjp.items()},
        instead=lambda level, args, kwargs: written(full(args, kwargs)),
        batch=batch,
    )


def _bounded(distance: torch.Tensor, bound: float) -> torch.Tensor:
    """The distance, at most the bound. Its derivative is zero at the bound, and for NaN."""
    return torch.where(distance.abs() < bound, distance, distance.detach().clamp(-bound, bound))


_element_by_element(
    aten.huber_loss.default,
    {
        0: lambda out, x, y, reduction, delta=1.0: lambda g: g * _bounded(x - y, delta),
        1: lambda out, x, y, reduction, delta=1.0: lambda g: g * _bounded(y - x, delta),
    },
)


def _smooth_l1_slope(distance: torch.Tensor, beta: float) -> torch.Tensor:
    return _bounded(distance, beta) / beta if beta else torch.sign(distance)


_element_by_element(
    aten.smooth_l1_loss.default,
    {
        0: lambda out, x, y, reduction, beta=1.0: lambda g: g * _smooth_l1_slope(x - y, beta),
        1: lambda out, x, y, reduction, beta=1.0: lambda g: g * _smooth_l1_slope(y - x, beta),
    },
)

# PyTorch's kernel clamps the logarithms at -100 and, in the derivative in x, the denominator. The derivative
# in y has no such bound.
LEAST_VARIANCE = 9.999999960041972e-13  # 1e-12 in float32, for every dtype
_element_by_element(
    aten.binary_cross_entropy.default,
    {
        0: (
            lambda out, x, y, weight, reduction: (
                lambda g: g * (x - y) / ((1 - x) * x).clamp(min=LEAST_VARIANCE)
            )
        ),
        1: lambda out, x, y, weight, reduction: lambda g: g * -torch.logit(x),
    },
)


def _with_logits_x(
    out: torch.Tensor, x: torch.Tensor, y: torch.Tensor, weight: Any, pos_weight: Any, reduction: int
) -> Any:
    if pos_weight is None:
        return lambda g: g * (torch.sigmoid(x) - y)
    return lambda g: g * ((pos_weight * y + 1 - y) * torch.sigmoid(x) - pos_weight * y)


def _with_logits_y(
    out: torch.Tensor, x: torch.Tensor, y: torch.Tensor, weight: Any, pos_weight: Any, reduction: int
) -> Any:
    if pos_weight is None:
        return lambda g: g * -x
    return lambda g: g * (log_sigmoid(-x) - log_sigmoid(x) * pos_weight)


log_sigmoid = torch.nn.functional.logsigmoid
_element_by_element(
    aten.binary_cross_entropy_with_logits.default,
    {
        0: _with_logits_x,
        1: _with_logits_y,
        3: lambda out, x, y, weight, pos_weight, reduction: lambda g: g * -y * log_sigmoid(x),
    },
)


# -- connectionist temporal classification -------------------------------------------------------------------


def _ctc_back(
    out: Any,
    x: torch.Tensor,
    targets: Any,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    forgive: bool = False,
) -> Any:
    losses, log_alpha = out
    backward = (
        aten._ctc_loss_backward.Tensor
        if isinstance(input_lengths, torch.Tensor)
        else aten._ctc_loss_backward.default
    )
    return lambda gs: (
        run(backward, gs[0], x, targets, input_lengths, target_lengths, losses, log_alpha, blank, forgive)
        if gs[0] is not None
        else None
    )


def _ctc_backward_back(out: torch.Tensor, g: torch.Tensor, *args: Any) -> Any:
    """The kernel multiplies each sequence's part by its cotangent: with cotangents of one it returns the
    factor.
    """
    op = (
        aten._ctc_loss_backward.Tensor
        if isinstance(args[2], torch.Tensor)
        else aten._ctc_loss_backward.default
    )
    return lambda h: (h * op(torch.ones_like(g), *args)).sum([0, 2])


def _ctc_folded(batch: Any, args: Any) -> list[Any]:
    """Log-probabilities [t, b, c], targets [b, s] or all in a row, lengths [b] or one: all samples' sequences
    become one batch.
    """
    log_probabilities, targets, *lengths = args
    if targets.dim() not in (1, 2):
        raise RuntimeError(f"ctc_loss: targets must have one or two axes, not shape {tuple(targets.shape)}")
    rows = batch.physical(log_probabilities).transpose(0, 1).flatten(1, 2)
    labels = batch.physical(targets).flatten(0, 1)
    return [
        rows,
        labels,
        *[
            batch.fold(t.reshape(-1)) if isinstance(t, torch.Tensor) else list(t) * batch.size
            for t in lengths
        ],
    ]


def _ctc_batch(batch: Any, op: Op, *args: Any, **kwargs: Any) -> Any:
    return batch.unfold(op(*_ctc_folded(batch, args[:4]), *args[4:], **kwargs))


def _ctc_backward_batch(batch: Any, op: Op, g: torch.Tensor, *args: Any) -> torch.Tensor:
    grad = op(batch.fold(g), *_ctc_folded(batch, args[:4]), *[batch.fold(t) for t in args[4:6]], *args[6:])
    return grad.unflatten(1, (batch.size, -1)).transpose(0, 1)


for _overload in ("default", "Tensor"):
    define(getattr(aten._ctc_loss, _overload), vjp={0: _ctc_back}, batch=_ctc_batch)
    define(
        getattr(aten._ctc_loss_backward, _overload),
        vjp={
            0: _ctc_backward_back,
            **dict.fromkeys((1, 5, 6), no_derivative("aten::_ctc_loss_backward", "log_probs")),
        },
        batch=_ctc_backward_batch,
    )
