"""Losses of classes: weight[label] * loss, averaged over the positions that are not ignored; 0 if all are.

torch's means divide by the sum of the class weights, which for a single label would cancel its weight. A
batch of one keeps torch from taking the classes or positions of a sample for a batch.

Logits are taken in float64 where the loss subtracts a probability from a label: p - 1 in float32 is zero or
has few digits where a sample is predicted with confidence. The loss itself is cast back, and keeps its
relative precision.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from psgrad.data.loss import IGNORED, Loss, LossKind, require_shapes, rounded

Smoothing = Annotated[float, Field(ge=0, le=1, description="Share of the label spread over all classes")]
ClassWeights = Annotated[
    list[Annotated[float, Field(ge=0, allow_inf_nan=False)]] | None,
    Field(description="A factor for each class"),
]
Reduction = Annotated[
    Literal["mean", "sum"],
    Field(description="Whether a sample's loss is the mean or the sum of its positions'"),
]
IgnoreIndex = Annotated[int | None, Field(description="Targets with this value don't count")]


@dataclass(frozen=True)
class _OfClasses(Loss):
    """A loss [*positions] of each position, and its mean."""

    weight: ClassWeights = None
    ignore_index: IgnoreIndex = None

    def _weights_for(self, output: Tensor) -> Tensor | None:
        """[c] on the device and in the type of the output."""
        if self.weight is None:
            return None
        return torch.tensor(self.weight, dtype=output.dtype, device=output.device)

    @property
    def _ignored(self) -> int:
        return IGNORED if self.ignore_index is None else self.ignore_index

    def _mean(self, losses: Tensor, target: Tensor) -> Tensor:
        """The mean [] over the positions that count."""
        return losses.sum() / (target != self._ignored).sum().clamp(min=1)


@dataclass(frozen=True)
class CrossEntropy(_OfClasses):
    """Logits [c] or [c, *positions] against labels [] or [*positions], or probabilities [c, *positions]."""

    label_smoothing: Smoothing = 0.0

    name: ClassVar[str] = "cross_entropy"
    kind: ClassVar[LossKind] = "class"

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        labels = not target.is_floating_point()
        require_shapes(
            output.ndim > 0 and (output.shape[1:] if labels else output.shape) == target.shape,
            self.name,
            "logits [classes] with a label [], [classes, *positions] with [*positions], or probabilities of"
            " the same shape",
            output,
            target,
        )
        logits = output.double()
        losses = F.cross_entropy(
            logits[None],
            (target if labels else target.to(logits.dtype))[None],
            self._weights_for(logits),
            ignore_index=self._ignored if labels else IGNORED,
            reduction="none",
            label_smoothing=self.label_smoothing,
        )
        return rounded(self._mean(losses, target) if labels else losses.mean(), output)


@dataclass(frozen=True)
class TokenCrossEntropy(_OfClasses):
    """Logits [t, c] against labels [t]: the mean, or the sum, over the positions that are not ignored."""

    label_smoothing: Smoothing = 0.0
    reduction: Reduction = "mean"

    name: ClassVar[str] = "token_cross_entropy"
    kind: ClassVar[LossKind] = "token"

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        require_shapes(
            output.ndim == 2 and output.shape[:1] == target.shape,
            self.name,
            "logits [positions, classes] with labels [positions]",
            output,
            target,
        )
        logits = output.double()
        losses = F.cross_entropy(
            logits,
            target,
            self._weights_for(logits),
            ignore_index=self._ignored,
            reduction="none",
            label_smoothing=self.label_smoothing,
        )
        return rounded(losses.sum() if self.reduction == "sum" else self._mean(losses, target), output)


@dataclass(frozen=True)
class NLL(_OfClasses):
    """Log-probabilities [c] or [c, *positions] against labels [] or [*positions]."""

    name: ClassVar[str] = "nll"
    kind: ClassVar[LossKind] = "class"

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        require_shapes(
            output.shape[1:] == target.shape and output.ndim > 0,
            self.name,
            "log-probabilities [classes] with a label [], or [classes, *positions] with [*positions]",
            output,
            target,
        )
        losses = F.nll_loss(
            output[None],
            target[None],
            self._weights_for(output),
            ignore_index=self._ignored,
            reduction="none",
        )
        return self._mean(losses, target)
