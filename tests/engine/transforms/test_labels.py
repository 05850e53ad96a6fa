"""The likelihood of labels, sample by sample, against a loop of PyTorch's own: ignored labels, means of none,
no sample at all.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from psgrad.engine.transforms import grad, grad_and_value, vmap

CLASSES = 5


def drawn(samples: int, positions: int | None) -> tuple[Tensor, Tensor]:
    """Scores [n, (t,) classes] and labels [n, (t)], of which the first sample's are all ignored, and the last
    sample's first.
    """
    generator = torch.Generator().manual_seed(samples)
    shape = (samples,) if positions is None else (samples, positions)
    scores = torch.randn(*shape, CLASSES, dtype=torch.float64, generator=generator)
    labels = torch.randint(CLASSES, shape, generator=generator)
    if samples > 1:
        labels[0] = -100
        if positions is not None:
            labels[-1, :1] = -100
    return scores, labels


@pytest.mark.parametrize("kind", [torch.int64, torch.int32])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("positions", [None, 1, 4])
@pytest.mark.parametrize("samples", [1, 3])
def test_cross_entropy_per_sample(
    samples: int, positions: int | None, reduction: str, kind: torch.dtype
) -> None:
    def loss(scores: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(scores, labels, reduction=reduction)

    scores, labels = drawn(samples, positions)
    gradients, values = vmap(grad_and_value(loss))(scores, labels.to(kind))
    for x, y, gradient, value in zip(scores, labels, gradients, values, strict=True):
        x.requires_grad_()
        expected = loss(x, y)
        torch.testing.assert_close(value, expected.detach(), rtol=1e-12, atol=1e-14, equal_nan=True)
        torch.testing.assert_close(
            gradient, *torch.autograd.grad(expected, x), rtol=1e-12, atol=1e-14, equal_nan=True
        )


@pytest.mark.parametrize("positions", [None, 4])
def test_cross_entropy_unreduced_first_and_second_derivative(positions: int | None) -> None:
    """Not reduced, so that the samples' losses are weighted outside; and the derivative of the derivative."""

    def weighted(scores: Tensor, labels: Tensor) -> Tensor:
        return (F.cross_entropy(scores, labels, reduction="none") * 2).square().sum()

    def norm(tf: Any) -> Any:
        return lambda scores, labels: tf(weighted)(scores, labels).square().sum()

    scores, labels = drawn(3, positions)
    for function, expected in ((weighted, weighted), (norm(grad), norm(torch.func.grad))):
        result = vmap(grad(function))(scores, labels)
        for x, y, gradient in zip(scores, labels, result, strict=True):
            torch.testing.assert_close(gradient, torch.func.grad(expected)(x, y), rtol=1e-11, atol=1e-13)


def test_cross_entropy_no_samples() -> None:
    scores, labels = drawn(0, 4)
    assert vmap(grad(F.cross_entropy))(scores, labels).shape == scores.shape
    assert vmap(F.cross_entropy)(scores, labels).shape == (0,)
