"""Losses of margins between classes: each row's class or classes against its others."""

from __future__ import annotations

from typing import Any

import torch

from psgrad.engine.transforms.rules.families import aten
from psgrad.engine.transforms.rules.losses import reduced
from psgrad.engine.transforms.rules.registry import Op, define
from psgrad.engine.transforms.shape_checks import refuse_shapes

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


def _multi_margin_batch(
    batch: Any, op: Op, x: torch.Tensor, target: torch.Tensor, *rest: Any
) -> torch.Tensor:
    loss = _multi_margin_of_rows(x, target, *rest)
    if loss is not None:
        return batch.physical(loss)  # type: ignore[no-any-return]
    return batch.unfold(op(batch.fold(x), batch.fold(target), *rest))  # type: ignore[no-any-return]


define(
    aten.multi_margin_loss.default,
    vjp={0: _multi_margin_back},
    instead=lambda level, args, kwargs: _multi_margin_of_rows(*args, **kwargs),
    batch=_multi_margin_batch,
)


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
    return lambda gs: gs[0].unsqueeze(1) * slopes if gs[0] is not None else None


def _multilabel_margin_batch(
    batch: Any, op: Op, x: torch.Tensor, target: torch.Tensor, reduction: int
) -> Any:
    loss = _multilabel_margin_of_rows(x, target, reduction)
    if loss is not None:
        return tuple(map(batch.physical, loss))
    return batch.unfold(op(batch.fold(x), batch.fold(target), reduction))


define(
    aten.multilabel_margin_loss_forward.default,
    vjp={0: _multilabel_margin_back},
    instead=lambda level, args, kwargs: _multilabel_margin_of_rows(*args, **kwargs),
    batch=_multilabel_margin_batch,
)
