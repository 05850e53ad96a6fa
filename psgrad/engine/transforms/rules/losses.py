"""The losses of values, pairs, margins between classes, and sequences. Most losses are a few elementwise
operators and a mean; PyTorch's tables define them so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from psgrad.engine.transforms.interpreter import run
from psgrad.engine.transforms.private_torch import schema_of
from psgrad.engine.transforms.rules.families import (
    aten,
    broadcasting,
    diagonal_jvp,
    first_result,
    of_one_if_empty,
)
from psgrad.engine.transforms.rules.registry import Maker, Op, define, replace
from psgrad.engine.transforms.rules.special import no_derivative
from psgrad.engine.transforms.shape_checks import refuse_shapes
from psgrad.engine.transforms.tracer import map_tracers


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
        instead=lambda *args, **kwargs: written(full(args, kwargs)),
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
    return lambda g: run(
        backward, g, x, targets, input_lengths, target_lengths, losses, log_alpha, blank, forgive
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


@of_one_if_empty
def _ctc_batch(batch: Any, op: Op, *args: Any) -> Any:
    return batch.unfold(op(*_ctc_folded(batch, args[:4]), *args[4:]), args[0].shape[1])


@of_one_if_empty
def _ctc_backward_batch(batch: Any, op: Op, g: torch.Tensor, *args: Any) -> torch.Tensor:
    grad = op(batch.fold(g), *_ctc_folded(batch, args[:4]), *[batch.fold(t) for t in args[4:6]], *args[6:])
    return grad.unflatten(1, (batch.size, -1)).transpose(0, 1)


@replace(aten.ctc_loss.Tensor)
def _ctc_loss(x: torch.Tensor, targets: Any, *lengths_and_options: Any) -> torch.Tensor:
    """PyTorch takes lengths on the CPU with log-probabilities on a GPU, but its kernels for traced tensors
    don't.
    """
    lengths = (length.to(x.device) for length in lengths_and_options[:2])
    return aten.ctc_loss.Tensor.decompose(x, targets, *lengths, *lengths_and_options[2:])


for _overload in ("default", "Tensor"):
    for _library in ("cudnn", "miopen"):  # whose kernels are not used: they have no second derivative
        replace(getattr(getattr(aten, f"_use_{_library}_ctc_loss"), _overload))(lambda *_: False)
    define(getattr(aten._ctc_loss, _overload), vjp={0: first_result(_ctc_back)}, batch=_ctc_batch)
    define(
        getattr(aten._ctc_loss_backward, _overload),
        vjp={
            0: _ctc_backward_back,
            **dict.fromkeys((1, 5, 6), no_derivative("aten::_ctc_loss_backward", "log_probs")),
        },
        batch=_ctc_backward_batch,
    )


# -- margins between classes ---------------------------------------------------------------------------------


def _by_rows(op: Op, back: Maker, of_rows: Callable[..., Any]) -> None:
    """Declare a loss of (scores, targets). back: its VJP for rows and without a reduction; of_rows: the loss
    in all other cases, by that of rows; None where it is that already.
    """

    def rule(batch: Any, op: Op, x: torch.Tensor, target: torch.Tensor, *rest: Any) -> Any:
        loss = of_rows(x, target, *rest)
        if loss is not None:
            return map_tracers(batch.physical, loss)
        return batch.unfold(op(batch.fold(x), batch.fold(target), *rest), x.shape[0])

    define(op, vjp={0: back}, instead=of_rows, batch=rule)


# PyTorch's kernels multiply each class's slope, zeros too, with the cotangent: zero times infinity is NaN.


def _multi_margin_of_rows(
    x: torch.Tensor,
    target: torch.Tensor,
    p: float = 1,
    margin: float = 1,
    weight: Any = None,
    reduction: int = 1,
) -> torch.Tensor | None:
    """The loss by that of rows alone, which has the rules; None where it is that already."""
    if (x.dim(), target.dim(), weight, reduction) == (2, 1, None, 0):
        return None
    refuse_shapes(aten.multi_margin_loss.default, (x, target, p, margin, weight, reduction), {})
    labels = torch.atleast_1d(target)
    loss = aten.multi_margin_loss.default(torch.atleast_2d(x), labels, p, margin, None, 0)
    loss = loss if weight is None else loss * weight[labels]
    return reduced(loss if target.dim() else loss.reshape(()), reduction)


def _multi_margin_back(
    out: Any, x: torch.Tensor, target: torch.Tensor, p: float = 1, margin: float = 1, *_: Any
) -> Any:
    """What is not above zero, NaN too, counts for nothing."""
    labels = target.unsqueeze(1)
    excess = margin - x.gather(1, labels) + x
    counts = (excess > 0) & (torch.arange(x.shape[1], device=x.device) != labels)
    slopes = torch.where(counts, 2 * excess if p == 2 else 1, 0).to(x.dtype) / x.shape[1]
    slopes = slopes.scatter(1, labels, -slopes.sum(1, keepdim=True))
    return lambda g: g.unsqueeze(1) * slopes


_by_rows(aten.multi_margin_loss.default, _multi_margin_back, _multi_margin_of_rows)


def _multilabel_margin_of_rows(
    x: torch.Tensor, target: torch.Tensor, reduction: int
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """(loss, which classes are targets) by those of rows alone; None where they are that already."""
    if x.dim() == 2 and reduction == 0:
        return None
    rows, labels = torch.atleast_2d(x), torch.atleast_2d(target)
    loss, is_target = aten.multilabel_margin_loss_forward.default(rows, labels, 0)
    return reduced(loss if x.dim() == 2 else loss.reshape(()), reduction), is_target.reshape(target.shape)


def _multilabel_margin_back(out: Any, x: torch.Tensor, target: torch.Tensor, reduction: int) -> Any:
    """Labels count up to the first -1."""
    listed = (target == -1).cumsum(1) == 0
    labels = torch.where(listed, target, 0)
    margins = 1 - x.gather(1, labels).unsqueeze(2) + x.unsqueeze(1)  # [row, label, class]
    counted = listed.unsqueeze(2) & (out[1] == 0).unsqueeze(1) & (margins > 0)  # NaN is not above zero
    slopes = counted.sum(1).scatter_add(1, labels, -counted.sum(2)).to(x.dtype) / x.shape[1]
    return lambda g: g.unsqueeze(1) * slopes


_by_rows(
    aten.multilabel_margin_loss_forward.default,
    first_result(_multilabel_margin_back),
    _multilabel_margin_of_rows,
)
