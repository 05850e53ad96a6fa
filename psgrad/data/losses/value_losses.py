"""Losses of values and of probabilities: means over the elements of the output."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from psgrad.data.loss import Loss, LossKind, require_shapes, rounded

Threshold = Annotated[
    float,
    Field(
        gt=0,
        allow_inf_nan=False,
        description="The error at which squares change to absolute values, in the target's unit",
    ),
]


@dataclass(frozen=True)
class BCEWithLogits(Loss):
    """Logits against probabilities of the output's shape."""

    name: ClassVar[str] = "bce_with_logits"
    kind: ClassVar[LossKind] = "binary"

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        return rounded(mean_of(F.binary_cross_entropy_with_logits, output.double(), target), output)


@dataclass(frozen=True)
class MSE(Loss):
    """The mean squared error."""

    name: ClassVar[str] = "mse"
    kind: ClassVar[LossKind] = "value"

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        return mean_of(F.mse_loss, output, target)


@dataclass(frozen=True)
class L1(Loss):
    """The mean absolute error."""

    name: ClassVar[str] = "l1"
    kind: ClassVar[LossKind] = "value"

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        return mean_of(F.l1_loss, output, target)


@dataclass(frozen=True)
class Huber(Loss):
    """Half the squares of small errors, and absolute values of large ones, times delta."""

    delta: Threshold = 1.0

    name: ClassVar[str] = "huber"
    kind: ClassVar[LossKind] = "value"

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        return mean_of(lambda o, t: F.huber_loss(o, t, delta=self.delta), output, target)


def mean_of(loss: Callable[[Tensor, Tensor], Tensor], output: Tensor, target: Tensor) -> Tensor:
    """The mean [] over the elements; shapes may differ in axes of size 1 only: nothing is broadcast."""
    same = [size for size in output.shape if size != 1] == [size for size in target.shape if size != 1]
    require_shapes(same, "this loss", "the same shape, but for axes of size 1", output, target)
    return loss(output, target.reshape(output.shape).to(output.dtype))
