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


class _LabelLoss:
    """The arguments of a likelihood of labels: classes on `axis` of the log-probabilities, the other axes are
    positions.
    """

    def __init__(
        self,
        target: torch.Tensor,
        weight: torch.Tensor | None,
        ignore_index: int,
        axis: int,
        dtype: torch.dtype,
    ) -> None:
        self.axis = axis
        self.counted = target != ignore_index
        self.labels = torch.where(self.counted, target, 0).unsqueeze(axis)
        self.weights = (
            self.counted.to(dtype)
            if weight is None
            else torch.where(self.counted, self._looked_up(weight), 0)
        )

    def _looked_up(self, weight: torch.Tensor) -> torch.Tensor:
        """The labels' class weights: [classes] shared by all samples, or [n, classes]."""
        labels = self.labels.squeeze(self.axis)
        return (
            weight[labels]
            if weight.dim() == 1
            else weight.gather(1, labels.reshape(len(labels), labels.shape[1:].numel())).reshape(labels.shape)
        )

    def losses(self, log_probabilities: torch.Tensor) -> torch.Tensor:
        """One loss for each position; zero if the label is ignored, whatever its value."""
        picked = torch.gather(log_probabilities, self.axis, self.labels).squeeze(self.axis)
        return self.counted_only(-picked * self.weights)

    def counted_only(self, each: torch.Tensor) -> torch.Tensor:
        """Zero if the label is ignored, also if all labels are, whose mean is nan."""
        return torch.where(self.counted, each, 0)


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
    axis = 0 if x.dim() == 1 else 1
    labels = _LabelLoss(target, weight, ignore_index, axis, x.dtype)
    each = labels.counted_only(-g * labels.weights / total if reduction == 1 else -g * labels.weights)
    return torch.zeros_like(x).scatter(axis, labels.labels, each.unsqueeze(axis))


def _nll_batch(
    batch: Any, op: Op, x: torch.Tensor, target: torch.Tensor, weight: Any, reduction: int, ignore_index: int
) -> Any:
    if x.dim() < 3 and weight is None:
        return _nll_by_kernel(batch, x, target, reduction, ignore_index)
    values, labels = _physical_labels(batch, x, target, weight, ignore_index)
    losses = labels.losses(values)
    positions = list(range(1, losses.dim()))
    total = labels.weights.sum(positions) if positions else labels.weights
    if reduction or not positions:
        losses = losses + 0  # as in _nll_by_kernel
    if reduction == 0:
        return losses, torch.zeros_like(total)
    summed = losses.sum(positions) if positions else losses
    return (summed / total if reduction == 1 else summed), total


def _nll_by_kernel(
    batch: Any, x: torch.Tensor, target: torch.Tensor, reduction: int, ignore_index: int
) -> Any:
    """All positions of all samples as one batch of PyTorch's own kernel, without a reduction."""
    values, labels = batch.physical(x), batch.physical(target).long()
    flat = values.reshape(labels.numel(), values.shape[-1])
    losses = aten.nll_loss_forward.default(flat, labels.reshape(-1), None, 0, ignore_index)[0]
    if reduction or labels.dim() == 1:
        losses = losses + 0  # PyTorch adds the losses of a sample to zero, so that their sum is never -0
    if reduction == 0:
        return losses.reshape(labels.shape), values.new_zeros(labels.shape[0])
    total = (labels != ignore_index).to(values.dtype)
    if labels.dim() > 1:
        losses, total = losses.reshape(labels.shape).sum(1), total.sum(1)
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
    if x.dim() < 3 and weight is None:
        return _nll_backward_by_kernel(batch, g, x, target, reduction, ignore_index, total)
    values, labels = _physical_labels(batch, x, target, weight, ignore_index)
    cotangents = batch.aligned(g, labels.weights.dim() - 1)
    each = -cotangents * labels.weights
    if reduction == 1:
        each = each / batch.aligned(total, labels.weights.dim() - 1)
    return torch.zeros_like(values).scatter(
        labels.axis, labels.labels, labels.counted_only(each).unsqueeze(labels.axis)
    )


def _nll_backward_by_kernel(
    batch: Any,
    g: torch.Tensor,
    x: torch.Tensor,
    target: torch.Tensor,
    reduction: int,
    ignore_index: int,
    total: Any,
) -> torch.Tensor:
    values, labels = batch.physical(x), batch.physical(target).long()
    each = batch.physical(g)
    if reduction == 1:
        each = each / batch.physical(total)
    if each.dim() < labels.dim():
        each = each.unsqueeze(1).expand(labels.shape)
    flat = values.reshape(labels.numel(), values.shape[-1])
    nothing = flat.new_zeros(())  # the weight of all labels, which only the mean needs
    grad = aten.nll_loss_backward.default(
        each.reshape(-1), flat, labels.reshape(-1), None, 0, ignore_index, nothing
    )
    return grad.reshape(values.shape)


def _physical_labels(
    batch: Any, x: torch.Tensor, target: torch.Tensor, weight: Any, ignore_index: int
) -> tuple[torch.Tensor, _LabelLoss]:
    values = batch.physical(x)
    return values, _LabelLoss(
        batch.physical(target), batch.raw(weight), ignore_index, 1 if x.dim() == 1 else 2, values.dtype
    )


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
