"""Losses whose cotangent is not finite, as where the loss is a part of a value that overflows: each entry of
the gradient is the number, infinity or NaN that PyTorch's kernel has.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from psgrad.engine.transforms import grad, grad_and_value, jacrev, vjp, vmap

Loss = Callable[[Tensor, Tensor, str], Tensor]

WEIGHTS = torch.tensor([0.5, 2.0, 1.5, 0.2], dtype=torch.float64)
LABELS, SEVERAL = torch.tensor([1, 3]), torch.tensor([[3, 1, -1, 0], [2, 2, 0, 1]])
LOSSES: dict[str, Loss] = {
    "mse_loss": lambda x, y, r: F.mse_loss(x, y, reduction=r),
    "l1_loss": lambda x, y, r: F.l1_loss(x, y, reduction=r),
    "smooth_l1_loss": lambda x, y, r: F.smooth_l1_loss(x, y, reduction=r, beta=0.7),
    "huber_loss": lambda x, y, r: F.huber_loss(x, y, reduction=r, delta=0.6),
    "bce": lambda x, y, r: F.binary_cross_entropy(x.sigmoid(), y.sigmoid(), reduction=r),
    "bce with logits": lambda x, y, r: F.binary_cross_entropy_with_logits(x, y.sigmoid(), reduction=r),
    "soft_margin_loss": lambda x, y, r: F.soft_margin_loss(x, y.detach().sign(), reduction=r),
    "kl_div of logarithms": lambda x, y, r: F.kl_div(x, y, log_target=True, reduction=r),
    "poisson_nll_loss": lambda x, y, r: F.poisson_nll_loss(x, y.abs(), reduction=r),
    "gaussian_nll_loss": lambda x, y, r: F.gaussian_nll_loss(x, y, x.square() + 0.1, reduction=r),
    "hinge_embedding_loss": lambda x, y, r: F.hinge_embedding_loss(x, y.sign(), reduction=r),
    "margin_ranking_loss": lambda x, y, r: F.margin_ranking_loss(x, y, y.sign(), 0.3, reduction=r),
    "multilabel_soft": lambda x, y, r: F.multilabel_soft_margin_loss(x, (y > 0).to(x.dtype), reduction=r),
    "cosine_embedding_loss": lambda x, y, r: F.cosine_embedding_loss(x, y, y[:, 0].sign(), reduction=r),
    "triplet_margin_loss": lambda x, y, r: F.triplet_margin_loss(x, y, y.flip(0), swap=True, reduction=r),
    "cross_entropy": lambda x, y, r: F.cross_entropy(x, LABELS, WEIGHTS, reduction=r),
    "cross_entropy, smooth": lambda x, y, r: F.cross_entropy(x, LABELS, label_smoothing=0.1, reduction=r),
    "nll_loss": lambda x, y, r: F.nll_loss(x, LABELS, reduction=r, ignore_index=1),
    "multi_margin_loss": lambda x, y, r: F.multi_margin_loss(x, LABELS, reduction=r),
    "multi_margin_loss, squares": lambda x, y, r: F.multi_margin_loss(
        x, LABELS, 2, 0.7, WEIGHTS, reduction=r
    ),
    "multi_margin_loss of one": lambda x, y, r: F.multi_margin_loss(x[0], LABELS[0], reduction=r),
    "multilabel_margin_loss": lambda x, y, r: F.multilabel_margin_loss(x, SEVERAL, reduction=r),
    "multilabel_margin_loss of one": lambda x, y, r: F.multilabel_margin_loss(x[0], SEVERAL[0], reduction=r),
}
X = torch.linspace(-2, 3, 24, dtype=torch.float64).mul(5).sin().reshape(3, 2, 4)
Y = torch.linspace(-1, 2, 24, dtype=torch.float64).mul(7).cos().reshape(3, 2, 4)


def pulled_back(loss: Loss, x: Tensor, y: Tensor, reduction: str, cotangent: float) -> tuple[Tensor, Tensor]:
    """The loop's cotangents of one sample's x and y."""
    leaves = x.clone().requires_grad_(), y.clone().requires_grad_()
    out = loss(*leaves, reduction)
    found = torch.autograd.grad(out, leaves, torch.full_like(out, cotangent), materialize_grads=True)
    return found[0], found[1]


@pytest.mark.every(2)
@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides")
@pytest.mark.parametrize("cotangent", [math.inf, -math.inf, math.nan, 1.5])
@pytest.mark.parametrize("name", LOSSES)
def test_loss_cotangent_not_finite(name: str, cotangent: float) -> None:
    loss = LOSSES[name]
    for reduction in ("none", "mean", "sum"):
        loop = [pulled_back(loss, x, y, reduction, cotangent) for x, y in zip(X, Y, strict=True)]
        expected = [torch.stack(some) for some in zip(*loop, strict=True)]

        def pull(x: Tensor, y: Tensor, reduction: str = reduction) -> tuple[Tensor, ...]:
            out, back = vjp(lambda x, y: loss(x, y, reduction), x, y)
            return back(torch.full_like(out, cotangent))  # type: ignore[no-any-return]

        torch.testing.assert_close(list(vmap(pull)(X, Y)), expected, equal_nan=True)
        leaves = X.clone().requires_grad_(), Y.clone().requires_grad_()
        out = vmap(lambda x, y, r=reduction: loss(x, y, r))(*leaves)
        outside = torch.autograd.grad(out, leaves, torch.full_like(out, cotangent), materialize_grads=True)
        torch.testing.assert_close(list(outside), expected, equal_nan=True)


MARGINS = {
    "multi_margin_loss": lambda x, w, y: F.multi_margin_loss(x, y[0], 2, 0.7, w, reduction="none"),
    "multilabel_margin_loss": lambda x, w, y: F.multilabel_margin_loss(x, y, reduction="none") * w[0],
}


@pytest.mark.parametrize(
    "mapped", [dims for dims in itertools.product([0, None], repeat=3) if any(d == 0 for d in dims)]
)
@pytest.mark.parametrize("name", MARGINS)
def test_margin_losses_any_arguments_mapped(name: str, mapped: tuple[int | None, ...]) -> None:
    """Values, gradients in values and class weights, and second derivatives, which PyTorch has not: of
    squares, by differences.
    """
    targets = torch.tensor([[[0, 2, -1, 3], [1, 3, 2, -1]], [[3, 3, 1, -1], [0, 1, 2, 3]]])[..., :2, :]
    whole = X[:2], torch.stack([WEIGHTS, WEIGHTS.flip(0)]), targets
    if name == "multi_margin_loss":
        whole = (*whole[:2], targets[..., :2])
    args = [a if d == 0 else a[0] for a, d in zip(whole, mapped, strict=True)]
    f = MARGINS[name]
    rows = [[a[i] if d == 0 else a for a, d in zip(args, mapped, strict=True)] for i in range(2)]
    torch.testing.assert_close(vmap(f, mapped)(*args), torch.stack([f(*row) for row in rows]))
    weighted = lambda x, w, y: (f(x, w, y) * torch.tensor([0.5, 1.5])).sum()
    found = vmap(grad(weighted), mapped)(*args)
    loop = [
        torch.autograd.grad(weighted(leaf := x.clone().requires_grad_(), w, y), leaf)[0] for x, w, y in rows
    ]
    torch.testing.assert_close(found, torch.stack(loop))
    step = 1e-6 * torch.eye(4, dtype=torch.float64)[1].expand(2, 4)
    second = vmap(grad(lambda x, w, y: grad(weighted)(x, w, y)[:, 1].sum()), mapped)(*args)
    for one, (x, w, y) in zip(second, rows, strict=True):
        above, below = (grad(weighted)(x + side, w, y)[:, 1] for side in (step, -step))
        torch.testing.assert_close(one[:, 1], (above - below) / 2e-6, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("weight", [None, torch.ones(3)])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_loss_of_zero_has_the_sign_that_pytorch_gives_it(reduction: str, weight: Tensor | None) -> None:
    """Which a program may copy."""
    x = torch.tensor([[0.0, -5.0, -6.0], [-1.0, 0.0, -3.0]])

    for shape, label in (((3,), 0), ((1, 3), [0]), ((1, 3, 1, 1), [[[0]]])):

        def loss(row: Tensor, shape: tuple[int, ...] = shape, label: Any = label) -> Tensor:
            return F.nll_loss(row.reshape(shape), torch.tensor(label), weight, reduction=reduction)

        one_by_one = torch.stack([loss(row) for row in x])
        assert torch.equal(vmap(loss)(x).signbit(), one_by_one.signbit())


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("weights", [None, WEIGHTS])
def test_label_smoothing_of_untraced_logits(weights: Tensor | None, reduction: str) -> None:
    """The target alone is made in the function, and the loss writes into a tensor of its own by it."""
    logits, w, x = torch.randn(6, 4, dtype=torch.float64), torch.randn(3).double(), torch.randn(2, 3).double()

    def loss(w: Tensor, x: Tensor) -> Tensor:
        target = torch.tensor([0, 3, -100, 2, 1, 1])
        constant = F.cross_entropy(logits, target, weights, reduction=reduction, label_smoothing=0.2)
        return constant.sum() + (w * x).sum().sin()

    expected = torch.func.vmap(torch.func.grad_and_value(loss), (None, 0))(w, x)
    torch.testing.assert_close(vmap(grad_and_value(loss), (None, 0))(w, x), expected)
    slopes = jacrev(lambda w: vmap(loss, (None, 0))(w, x))(w)
    torch.testing.assert_close(slopes, expected[0])


@pytest.mark.every(1)
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("weights", [None, WEIGHTS])
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("cotangent", [1.0, math.inf, math.nan])
def test_ignored_labels_count_for_nothing(
    cotangent: float, reduction: str, weights: Tensor | None, smoothing: float
) -> None:
    """Also where their cotangents or logits are not finite."""
    x = torch.randn(2, 3, 4, dtype=torch.float64)
    x[0, 1, 2], x[1, 0, 0] = math.inf, math.nan
    target = torch.tensor([[1, -100, 2], [-100, -100, 0]])
    loss = lambda x, target: F.cross_entropy(
        x, target, weights, reduction=reduction, label_smoothing=smoothing
    )
    g = torch.full((2, 3) if reduction == "none" else (2,), cotangent, dtype=torch.float64)
    expected = []
    for row in range(2):
        leaf = x[row].clone().requires_grad_()
        expected += torch.autograd.grad(loss(leaf, target[row]), leaf, g[row])
    found = vmap(lambda x, target, g: vjp(lambda x: loss(x, target), x)[1](g)[0])(x, target, g)
    torch.testing.assert_close(found, torch.stack(expected), equal_nan=True)
    values = torch.stack([loss(*row) for row in zip(x, target, strict=True)])
    torch.testing.assert_close(vmap(loss)(x, target), values, equal_nan=True)
