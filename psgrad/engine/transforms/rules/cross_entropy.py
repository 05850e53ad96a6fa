"""Softmax, and the losses of labels: the negative log-likelihood and cross-entropy."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch

from psgrad.engine.transforms.interpreter import run
from psgrad.engine.transforms.rules.families import aten, first_result, shifted, wrap_dim
from psgrad.engine.transforms.rules.registry import Op, define, replace
from psgrad.engine.transforms.rules.special import no_derivative
from psgrad.engine.transforms.shape_checks import refuse_shapes


def _softmax_backward_batch(
    batch: Any, op: Op, g: torch.Tensor, out: torch.Tensor, dim: int, dtype: torch.dtype
) -> torch.Tensor:
    if g.dim() == 0:
        return op(batch.physical(g).unsqueeze(1), batch.physical(out).unsqueeze(1), 1, dtype).squeeze(1)
    # The kernel's result is contiguous, whatever strides g has. In a capture PyTorch gives it those of g, and
    # a later reshape would be captured as a view.
    return op(batch.physical(g).contiguous(), batch.physical(out), wrap_dim(dim, g.dim()) + 1, dtype)


for _forward, _backward in (
    (aten._softmax.default, aten._softmax_backward_data.default),
    (aten._log_softmax.default, aten._log_softmax_backward_data.default),
):
    define(
        _forward,
        vjp={
            0: lambda out, x, dim, half_to_float, backward=_backward: (
                lambda g, dtype=x.dtype: run(backward, g, out, dim, dtype)
            )
        },
        batch=shifted(1),
    )
    define(_backward, batch=_softmax_backward_batch)

define(
    aten._softmax_backward_data.default,
    vjp={
        0: lambda out, g, y, dim, dtype: lambda h: aten._softmax_backward_data.default(h, y, dim, dtype),
        1: (
            lambda out, g, y, dim, dtype: (
                lambda h: h * (g - (g * y).sum(dim, keepdim=True)) - g * (h * y).sum(dim, keepdim=True)
            )
        ),
    },
)
define(
    aten._log_softmax_backward_data.default,
    vjp={
        0: lambda out, g, y, dim, dtype: lambda h: h - (h * torch.exp(y)).sum(dim, keepdim=True),
        1: lambda out, g, y, dim, dtype: lambda h: -h * torch.exp(y) * g.sum(dim, keepdim=True),
    },
)
define(
    aten._safe_softmax.default,
    vjp={
        0: lambda out, x, dim, dtype=None: (
            lambda g, kind=x.dtype: aten._softmax_backward_data.default(g, out, dim, kind)
        )
    },
    batch=shifted(1),
)


@replace(aten.cross_entropy_loss.default)
def _cross_entropy_loss(
    x: torch.Tensor,
    target: torch.Tensor,
    weight: Any = None,
    reduction: int = 1,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """With labels: log-softmax and the negative log-likelihood. PyTorch's own definition of other ranks runs
    many more operators; with smoothing it writes in place, by a target that may be all that is traced.
    """
    if label_smoothing and not target.is_floating_point():
        return _smoothed(x, target, weight, reduction, ignore_index, label_smoothing)
    if target.is_floating_point() or x.dim() not in (1, 2, 4):
        return aten.cross_entropy_loss.default.decompose(
            x, target, weight, reduction, ignore_index, label_smoothing
        )
    axis = 0 if x.dim() == 1 else 1
    nll = aten.nll_loss2d_forward.default if x.dim() == 4 else aten.nll_loss_forward.default
    return run(nll, run(aten._log_softmax.default, x, axis, False), target, weight, reduction, ignore_index)[
        0
    ]


def _smoothed(
    x: torch.Tensor, target: torch.Tensor, weight: Any, reduction: int, ignore_index: int, smoothing: float
) -> torch.Tensor:
    """The loss of labels, mixed with the mean of the losses of all classes."""
    axis = 0 if x.dim() == 1 else 1
    logs, classes = torch.log_softmax(x, axis), x.shape[axis]
    of_labels = aten.nll_loss_nd.default(logs, target, weight, reduction, ignore_index)
    each = logs if weight is None else logs * weight.reshape(classes, *(1,) * (x.dim() - axis - 1))
    of_all = torch.where(target == ignore_index, 0, -each.sum(axis))
    if reduction:
        of_all = of_all.sum()
    if reduction == 1:
        counts = target != ignore_index
        of_all = (
            of_all
            / (
                counts if weight is None else torch.where(counts, weight[torch.where(counts, target, 0)], 0)
            ).sum()
        )
    return (1 - smoothing) * of_labels + of_all * (smoothing / classes)


def _weights_of_labels(
    labels: torch.Tensor, weight: torch.Tensor | None, ignore_index: int, dtype: torch.dtype
) -> torch.Tensor:
    """The weight of each label: one, or that of its class; zero if the label is ignored. weight: [classes],
    or [n, classes] for labels [n, *].
    """
    counted = labels != ignore_index
    if weight is None:
        return counted.to(dtype)
    labels = torch.where(counted, labels, 0)
    each = (
        weight[labels]
        if weight.dim() == 1
        else weight.gather(1, labels.reshape(len(labels), labels.shape[1:].numel())).reshape(labels.shape)
    )
    return torch.where(counted, each, 0)


@replace(aten.nll_loss_backward.default)
@replace(aten.nll_loss2d_backward.default)
def _nll_loss_backward(
    g: torch.Tensor,
    x: torch.Tensor,
    target: torch.Tensor,
    weight: Any,
    reduction: int,
    ignore_index: int,
    total: torch.Tensor,
) -> torch.Tensor:
    axis, counted = 0 if x.dim() == 1 else 1, target != ignore_index
    each = -g * _weights_of_labels(target, weight, ignore_index, x.dtype)
    # zero if the label is ignored, also if all labels are, whose mean is nan
    each = torch.where(counted, each / total if reduction == 1 else each, 0)
    labels = torch.where(counted, target, 0)
    return torch.zeros_like(x).scatter(axis, labels.unsqueeze(axis), each.unsqueeze(axis))


def _as_one_batch(batch: Any, x: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The log-probabilities and labels [n, *] of all samples as one batch of PyTorch's kernel."""
    values, first = batch.physical(x), min(x.dim(), 2)  # the axes in front of the classes
    rows = values.shape[:first].numel()
    return values.reshape(rows, *values.shape[first:]), labels.reshape(rows, *labels.shape[first:])


def _nll_batch(
    batch: Any, op: Op, x: torch.Tensor, target: torch.Tensor, weight: Any, reduction: int, ignore_index: int
) -> Any:
    labels = batch.physical(target).long()
    losses = op(*_as_one_batch(batch, x, labels), None, 0, ignore_index)[0].reshape(labels.shape)
    weights = _weights_of_labels(labels, batch.raw(weight), ignore_index, losses.dtype)
    if weight is not None:
        losses = losses * weights
    positions = list(range(1, losses.dim()))
    if reduction or not positions:
        losses = losses + 0  # PyTorch adds the losses of a sample to zero, so that their sum is never -0
    if reduction == 0:
        return losses, losses.new_zeros(batch.size)
    total = weights
    if positions:
        losses, total = losses.sum(positions), weights.sum(positions)
    return (losses / total if reduction == 1 else losses), total


def _nll_backward_batch(
    batch: Any,
    op: Op,
    g: torch.Tensor,
    x: torch.Tensor,
    target: torch.Tensor,
    weight: Any,
    reduction: int,
    ignore_index: int,
    total: Any,
) -> torch.Tensor:
    labels = batch.physical(target).long()
    each = batch.aligned(g, target.dim())
    if reduction == 1:
        each = each / batch.aligned(total, target.dim())
    if weight is not None:
        each = each * _weights_of_labels(labels, batch.raw(weight), ignore_index, each.dtype)
    values, rows = _as_one_batch(batch, x, labels)
    nothing = values.new_zeros(())  # the weight of all labels, which only the mean needs
    grad = op(each.expand(labels.shape).reshape(rows.shape), values, rows, None, 0, ignore_index, nothing)
    return grad.reshape(batch.size, *x.shape)


for _forward, _backward in (
    (aten.nll_loss_forward.default, aten.nll_loss_backward.default),
    (aten.nll_loss2d_forward.default, aten.nll_loss2d_backward.default),
):
    define(
        _forward,
        vjp={
            0: first_result(
                lambda out, x, *options, backward=_backward: lambda g: run(backward, g, x, *options, out[1])
            ),
            2: no_derivative("aten::nll_loss", "weight"),
        },
        batch=_nll_batch,
    )
    define(_backward, batch=_nll_backward_batch)


# -- the chunked linear layer with cross-entropy -------------------------------------------------------------


def _linear_cross_entropy(
    x: torch.Tensor,
    layer: torch.Tensor,
    target: torch.Tensor,
    bias: Any,
    weight: Any,
    reduction: str,
    ignore_index: int,
    smoothing: float,
) -> torch.Tensor:
    """The loss of the layer's logits, which are all computed at once. The kernels compute gradients in the
    forward pass, for the batch as a whole.
    """
    logits, kind = aten.linear.default(x, layer, bias), ("none", "mean", "sum").index(reduction)
    refuse_shapes(aten.cross_entropy_loss.default, (logits, target, weight), {})
    return aten.cross_entropy_loss.default(logits, target, weight, kind, ignore_index, smoothing)


_MODULE = "torch.nn.modules.linear_cross_entropy"
# missing in older versions of PyTorch; the import registers the operators
if importlib.util.find_spec(_MODULE) is not None:
    importlib.import_module(_MODULE)  # which makes the operators known

    @replace(torch.ops.torch_nn._linear_cross_entropy_batch_chunked.default)
    def _chunked(
        x: torch.Tensor, layer: torch.Tensor, target: torch.Tensor, bias: Any, weight: Any, *args: Any
    ) -> Any:
        unused = x.new_zeros(0)  # the gradients, which its own backward would ask for
        return _linear_cross_entropy(x, layer, target, bias, weight, *args[:3]), unused, unused, unused

    @replace(torch.ops.torch_nn._linear_cross_entropy_batch_chunked_no_reduction.default)
    def _chunked_losses(
        x: torch.Tensor,
        layer: torch.Tensor,
        target: torch.Tensor,
        bias: Any,
        weight: Any,
        ignore_index: int,
        *args: Any,
    ) -> torch.Tensor:
        return _linear_cross_entropy(x, layer, target, bias, weight, "none", ignore_index, 0.0)
