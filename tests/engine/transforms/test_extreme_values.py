"""Derivatives of operators at infinite, NaN, very large and very small values, beside torch.autograd."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from psgrad.engine.transforms import grad, jvp, vjp, vmap

NAN, INF = math.nan, math.inf
VALUES = [
    NAN,
    INF,
    -INF,
    0.0,
    -0.0,
    1.0,
    -1.0,
    0.5,
    -0.7,
    2.0,
    -3.0,
    1e30,
    -1e30,
    1e-30,
    -1e-30,
    1e15,
    1e-15,
    100.0,
    -100.0,
    6.0,
    30.0,
]
COTANGENTS = [1.0, 0.0, INF, NAN, -2.0, 1e30, 1e-30]
DTYPES = [torch.float32, torch.float64]

NAMES = """
    abs exp exp2 expm1 log log2 log10 log1p sqrt rsqrt reciprocal sin cos tan asin acos atan sinh cosh tanh
    asinh acosh atanh
    sigmoid erf erfc erfinv lgamma digamma logit sinc nan_to_num relu neg square sign floor frac trunc round
    ceil i0
"""
ACTIVATIONS = (
    "relu6 gelu silu mish hardswish hardsigmoid elu leaky_relu softplus hardtanh selu celu logsigmoid"
    " softsign"
)
SPECIAL = "i0e i1 i1e erfcx ndtri log_ndtr entr ndtr"
NAMES_OF_TWO = """
    add sub mul div pow atan2 hypot fmod remainder maximum minimum xlogy copysign fmax fmin ldexp logaddexp
    logaddexp2
"""

OF_ONE: dict[str, Callable[[Tensor], Tensor]] = {
    **{name: getattr(torch, name) for name in NAMES.split()},
    **{name: getattr(F, name) for name in ACTIVATIONS.split()},
    **{f"special.{name}": getattr(torch.special, name) for name in SPECIAL.split()},
}
OF_ONE |= {f"x ** {p}": lambda x, p=p: x**p for p in (0, 1, 2, 3, 0.5, -0.5, -1, 1.3)}
OF_ONE |= {f"{b} ** x": lambda x, b=b: torch.pow(b, x) for b in (2.0, 0.0, 1.0, -1.0, 0.5)}
OF_ONE |= {
    "logit(eps)": lambda x: x.logit(1e-2),
    "mvlgamma": lambda x: torch.mvlgamma(x, 2),
    "xlogy(x, 2)": lambda x: torch.xlogy(x, 2.0),
    "xlogy(x, 0)": lambda x: torch.xlogy(x, 0.0),
    "xlogy(2, x)": lambda x: torch.xlogy(2.0, x),
    "xlogy(0, x)": lambda x: torch.xlogy(0.0, x),
    "xlog1py(x, 2)": lambda x: torch.special.xlog1py(x, 2.0),
    "xlog1py(x, -1)": lambda x: torch.special.xlog1py(x, -1.0),
    "xlog1py(0, x)": lambda x: torch.special.xlog1py(0.0, x),
    "hardshrink": lambda x: F.hardshrink(x, 0.5),
    "softshrink": lambda x: F.softshrink(x, 0.5),
    "threshold": lambda x: F.threshold(x, 0.1, 20.0),
    "clamp": lambda x: x.clamp(-1, 1),
}
OF_TWO: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    name: getattr(torch, name) for name in NAMES_OF_TWO.split()
}
OF_TWO |= {
    "xlog1py": torch.special.xlog1py,
    "prelu": torch._prelu_kernel,
    "addcmul": lambda x, y: torch.addcmul(y, x, y, value=0.5),
    "addcdiv": lambda x, y: torch.addcdiv(x, x, y, value=0.5),
    "lerp": lambda x, y: torch.lerp(x, y, 0.3),
    "lerp by a tensor": lambda x, y: torch.lerp(x, x * 0 + 1, y),
    "glu": lambda x, y: F.glu(torch.stack([x, y]), 0)[0],
    "angle": lambda x, y: torch.complex(x, y).angle(),
    "mse_loss": lambda x, y: F.mse_loss(x, y, reduction="none"),
    "huber_loss": lambda x, y: F.huber_loss(x, y, reduction="none", delta=0.3),
    "smooth_l1_loss": lambda x, y: F.smooth_l1_loss(x, y, reduction="none", beta=0.3),
    "kl_div": lambda x, y: F.kl_div(x, y, reduction="none"),
    "poisson_nll_loss": lambda x, y: F.poisson_nll_loss(x, y, reduction="none", full=True),
    "binary_cross_entropy": lambda x, y: F.binary_cross_entropy(
        x.nan_to_num(0.3).sigmoid(), y.nan_to_num(0.2).sigmoid(), reduction="none"
    ),
    "with_logits": lambda x, y: F.binary_cross_entropy_with_logits(x, y, reduction="none"),
    "with_logits(pos_weight)": lambda x, y: F.binary_cross_entropy_with_logits(
        x, y, reduction="none", pos_weight=y.new_tensor(2.0)
    ),
    "with_logits(weight)": lambda x, y: F.binary_cross_entropy_with_logits(
        x, y, reduction="none", weight=y.new_tensor(2.0)
    ),
}


def every(count: int, dtype: torch.dtype) -> list[Tensor]:
    """All combinations of values of `count` arguments and of a cotangent."""
    axes = [torch.tensor(VALUES, dtype=torch.float64)] * count + [
        torch.tensor(COTANGENTS, dtype=torch.float64)
    ]
    return [axis.reshape(-1).to(dtype) for axis in torch.meshgrid(*axes, indexing="ij")]


def unlike(found: Tensor, expected: Tensor, units: float, size: Any = 0.0, g: Any = 0.0) -> Tensor:
    """Where two results differ by more than rounding, of numbers up to `size`, or of a derivative that a
    cotangent `g` magnifies.

    What is below 1e-36 may be zero, which float32 hardly tells apart.
    """
    a, b, info = found.double(), expected.double(), torch.finfo(found.dtype)
    near = (a - b).abs() <= units * info.eps * (b.abs() + size) + 4 * info.tiny * info.eps * abs(g) + 1e-36
    return ~((a.isnan() & b.isnan()) | (a == b) | (a.isfinite() & b.isfinite() & near))


def value_and_cotangents(f: Any, *args: Tensor) -> tuple[Tensor, ...]:
    """f at all arguments but the last, which is its cotangent; and theirs."""
    out, pull = vjp(f, *args[:-1])
    return (out, *pull(args[-1]))


def by_autograd(f: Any, *args: Tensor) -> tuple[Tensor, ...]:
    leaves = [x.clone().requires_grad_() for x in args[:-1]]
    out = f(*leaves)
    result = torch.autograd.grad(out, leaves, args[-1], create_graph=True, materialize_grads=True)
    return (out.detach(), *[g.detach() for g in result])


@pytest.mark.every(2)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", [*OF_ONE, *OF_TWO])
def test_elementwise_derivative_of_extreme_values(name: str, dtype: torch.dtype) -> None:
    f = OF_ONE.get(name) or OF_TWO[name]
    args = every(1 if name in OF_ONE else 2, dtype)
    expected = by_autograd(f, *args)
    if name == "sinc":  # PyTorch's slope is 0 where x is tiny
        (x, g), (value, slope) = args, expected
        expected = value, torch.where((x != 0) & (x.abs() < 1e-10), g * (x * (-(math.pi**2) / 3)), slope)
    if name in ("special.i1", "special.i1e"):  # PyTorch's slope at NaN is one half up to 2.14
        (x, _), (value, slope) = args, expected
        expected = value, torch.where(x.isnan(), NAN, slope)
    ways = {
        "vjp": value_and_cotangents(f, *args),
        "vmap(vjp)": vmap(lambda *one: value_and_cotangents(f, *one))(*args),
    }
    for way, result in ways.items():
        for place, (ours, theirs) in enumerate(zip(result, expected, strict=True)):
            wrong = unlike(ours, theirs, 64, g=args[-1].double()).nonzero().flatten().tolist()
            told = [([x[i].item() for x in args], ours[i].item(), theirs[i].item()) for i in wrong[:3]]
            assert not wrong, (
                f"{way}, result {place}, {len(wrong)} of {len(ours)}: (arguments and cotangent, ours,"
                f" PyTorch's) {told}"
            )


X = [0.0, -0.0, NAN, INF, -INF, 0.3, -0.3, 5.0, -5.0, 100.0, 1e4, 1e30, -1e30]
SECOND: dict[str, Callable[[Tensor], Tensor]] = {
    **{name: getattr(F, name) for name in ("elu", "selu", "celu", "softplus")},
    "huber_loss": lambda x: F.huber_loss(x, torch.zeros_like(x), reduction="none", delta=0.3),
    "smooth_l1_loss": lambda x: F.smooth_l1_loss(x, torch.zeros_like(x), reduction="none", beta=0.3),
    "huber_loss of the target": lambda x: F.huber_loss(torch.zeros_like(x), x, reduction="none"),
    "hardtanh": F.hardtanh,
    "relu6": F.relu6,
    "hardswish": F.hardswish,
    "prelu": lambda x: F.prelu(x, torch.tensor([0.3], dtype=x.dtype)),
    "prelu of an infinite weight": lambda x: F.prelu(x, torch.tensor([-INF], dtype=x.dtype)),
    "prelu of its weight": lambda x: F.prelu(x, x.square().reshape(-1)[:1] + 0.5),
    "i1": torch.special.i1,
    "logaddexp": lambda x: torch.logaddexp(x, 2 * x),
    "xlogy": lambda x: torch.xlogy(x, 2.0 + x),
    "with_logits": lambda x: F.binary_cross_entropy_with_logits(x, x.sigmoid(), reduction="none"),
}


@pytest.mark.parametrize("name", SECOND)
def test_second_derivative_of_extreme_values(name: str) -> None:
    """In the value and in the first derivative's cotangent, where PyTorch's is a number: its formulas have
    more NaN than need be.
    """
    f = SECOND[name]
    total = lambda x, weight: (f(x) * weight).sum()
    for number in X:
        if name == "i1" and math.isnan(number):
            continue  # PyTorch's slope there is one half up to 2.14
        x, weight = (
            torch.tensor([value], dtype=torch.float64, requires_grad=True) for value in (number, 0.7)
        )
        (first,) = torch.autograd.grad(total(x, weight), x, create_graph=True)
        second = torch.autograd.grad(first.sum() * 1.3, (x, weight), materialize_grads=True)
        args = x.detach()[None], weight.detach()[None]
        torch.testing.assert_close(vmap(grad(total))(*args)[0], first.detach(), equal_nan=True)
        result = vmap(grad(lambda *one: grad(total)(*one).sum() * 1.3, (0, 1)))(*args)
        for ours, theirs in zip(result, second, strict=True):
            if theirs.isfinite():
                torch.testing.assert_close(
                    ours[0], theirs, msg=lambda said, number=number: f"at {number}: {said}"
                )


def test_logit_slope_of_nan() -> None:
    """One number for each: PyTorch's kernel for many has zero for NaN, and that for a few has NaN. With a
    graph it has zero for all.
    """
    x, g = torch.tensor([[NAN], [0.5], [0.001]]), torch.ones(3, 1)
    f = lambda x: x.logit(1e-2)
    expected = torch.stack([by_autograd(f, *one)[1] for one in zip(x, g, strict=True)])
    assert expected.tolist() == [[0.0], [4.0], [0.0]]
    torch.testing.assert_close(vmap(lambda x, g: value_and_cotangents(f, x, g)[1])(x, g), expected)


def test_prelu_slope_at_zero() -> None:
    """PyTorch's forward mode takes the slope from above, its reverse mode that from below."""
    x, weight = torch.zeros(2), torch.tensor([0.25])
    assert jvp(lambda x: F.prelu(x, weight), (x,), (torch.ones(2),))[1].tolist() == [1.0, 1.0]
    assert grad(lambda x: F.prelu(x, weight).sum())(x).tolist() == [0.25, 0.25]


def test_prelu_weight_of_a_sample_second_derivative_from_outside() -> None:
    """PyTorch's derivative of its own derivative takes the weight to be as large as the values."""
    x, weight = torch.linspace(-1, 1, 6).reshape(2, 3), torch.tensor([0.3, 0.4], requires_grad=True)
    f = lambda weight: (F.prelu(x, weight.reshape(1)) ** 2).sum()
    (result,) = torch.autograd.grad(vmap(grad(f))(weight).sum(), weight)
    torch.testing.assert_close(result, torch.full((2,), 2 * float(x.clamp(max=0).square().sum())))


def in_range(x: Tensor) -> Tensor:
    """Products of these don't overflow in one order and vanish in another, unless one is infinite."""
    return torch.where(x.isinf(), x, x.clamp(-1e3, 1e3))


TARGETS = torch.tensor([[0, 2, -1, 1], [3, -1, 0, 0], [1, 2, 3, -1]])
WHOLE: dict[str, Callable[[Tensor], Tensor]] = {
    "prod": lambda x: in_range(x).prod(),
    "prod(-1)": lambda x: in_range(x).prod(-1),
    "prod of one number": lambda x: x[0, 0].prod(),
    "cumprod": lambda x: in_range(x).cumprod(-1),
    "cumprod(0)": lambda x: in_range(x).cumprod(0),
    "logsumexp": lambda x: x.logsumexp(-1),
    "logcumsumexp": lambda x: x.clamp(-9, 9).logcumsumexp(-1),  # beyond, PyTorch's own is not exact
    "var": lambda x: x.var(-1),
    "var of no freedom": lambda x: x.var(-1, correction=4),
    "var of all": lambda x: x.var(),
    "var of one number": lambda x: x[:1, :1].var(),
    "std": lambda x: x.std(-1),
    "std_mean": lambda x: torch.stack(torch.std_mean(x, -1)),
    "var_mean": lambda x: torch.stack(torch.var_mean(x, 0)),
    **{
        f"norm {p}": lambda x, p=p: torch.linalg.vector_norm(x, p, -1)
        for p in (0, 0.5, 1, 1.5, 2, 2.5, 3, -1, INF, -INF)
    },
    "norm of all": lambda x: x.norm(),
    "normalize": lambda x: F.normalize(x, dim=-1),
    **{f"renorm {p}": lambda x, p=p: x.renorm(p, 1, 1.0) for p in (1, 2, 3, INF)},
    "pairwise_distance": lambda x: F.pairwise_distance(x[:2], x[1:]),
    "dist 3": lambda x: torch.dist(x[0], x[1], 3),
    "triplet_margin_loss": lambda x: F.triplet_margin_loss(x[:1], x[1:2], x[2:]),
    "multilabel_margin_loss": lambda x: F.multilabel_margin_loss(x, TARGETS),
    "det of one number": lambda x: torch.linalg.det(x[:1, :1]),
    **{
        name: lambda x, name=name: getattr(x, name)()
        for name in ("max", "min", "amax", "amin", "median", "nanmedian", "nansum", "nanmean")
    },
    **{
        f"{name}(-1)": lambda x, name=name: getattr(x, name)(-1)[0]
        for name in ("max", "min", "median", "nanmedian", "mode", "sort", "cummax", "cummin")
    },
    "aminmax": lambda x: torch.stack(x.aminmax()),
    "aminmax of rows": lambda x: torch.stack(x.aminmax(dim=-1)),
    "amax of rows": lambda x: x.amax(-1),
    "kthvalue": lambda x: x.kthvalue(2, -1).values,
    "topk": lambda x: x.topk(2, -1).values,
    "quantile": lambda x: x.quantile(0.3, -1),
    "nanquantile": lambda x: x.nanquantile(0.3, -1),
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x),
    "attention of heads": lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None]),
    "attention, causal": lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True),
    "attention, masked": lambda x: F.scaled_dot_product_attention(x, x, x, TARGETS[:, :3] > 0),
    "attention, grouped": lambda x: F.scaled_dot_product_attention(
        x.expand(2, 3, 4), x[None], x[None], enable_gqa=True
    ),
}
# Where PyTorch has no number for a sample alone, by a branch that looks at the whole tensor (a division by an
# infinite factor, unless there is a zero; all axes in place of given ones), a derivative outside of vmap may
# have the finite one, or another that is no number.
FINITE_ALONE_OUTSIDE = ("prod", "prod(-1)", "cumprod", "cumprod(0)", "var of one number")
PLANTED = [NAN, INF, -INF, 0.0, 1e30, -1e30, 1e-30, 0.0]


def samples_with_extremes(dtype: torch.dtype, whole: bool) -> Tensor:
    """60 samples of shape [3, 4] with one to three extreme numbers each. whole: the others are small whole
    numbers, some of them zero.
    """
    chance = torch.Generator().manual_seed(5)
    x = torch.randn(60, 12, generator=chance, dtype=torch.float64)
    x = x.round() if whole else x
    for row in range(60):
        for _ in range(1 + row % 3):
            place, which = torch.randint(0, 12, (2,), generator=chance).tolist()
            x[row, place] = PLANTED[which % len(PLANTED)]
    return x.reshape(60, 3, 4).to(dtype)


@pytest.mark.every(3)
@pytest.mark.parametrize("whole", [False, True], ids=["any", "whole"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", WHOLE)
def test_derivative_of_extreme_values_of_a_tensor(name: str, dtype: torch.dtype, whole: bool) -> None:
    f, x = WHOLE[name], samples_with_extremes(dtype, whole)
    out = f(x[0])
    g = torch.linspace(0.5, -1.5, 60 * out.numel(), dtype=dtype).reshape(60, *out.shape)
    expected = [
        torch.stack(some)
        for some in zip(*[by_autograd(f, *one) for one in zip(x, g, strict=True)], strict=True)
    ]
    inside = vmap(lambda *one: value_and_cotangents(f, *one))(x, g)
    outside = value_and_cotangents(vmap(f), x, g)
    if name in FINITE_ALONE_OUTSIDE:
        outside = [
            torch.where(theirs.isfinite(), ours, theirs)
            for ours, theirs in zip(outside, expected, strict=True)
        ]
    for ours, theirs in zip((*inside, *outside), (*expected, *expected), strict=True):
        for row in range(60):
            wrong = unlike(
                ours[row], theirs[row], 1000, float(theirs[row].double().abs().nan_to_num(0, 0, 0).max())
            )
            assert not wrong.any(), (
                f"of {x[row].tolist()} and {g[row].tolist()}: {ours[row].tolist()}, PyTorch's"
                f" {theirs[row].tolist()}"
            )


def test_logcumsumexp_gradient_with_nan_cotangent() -> None:
    x = torch.tensor([[0.3, -1.0, 2.0], [0.5, 0.1, -0.2]], dtype=torch.float64)
    g = torch.tensor([[1.0, NAN, -0.5], [NAN, 0.0, 2.0]], dtype=torch.float64)
    expected = torch.stack(
        [by_autograd(lambda x: x.logcumsumexp(0), *one)[1] for one in zip(x, g, strict=True)]
    )
    assert expected.isfinite().all()
    result = vmap(lambda x, g: value_and_cotangents(lambda x: x.logcumsumexp(0), x, g)[1])(x, g)
    torch.testing.assert_close(result, expected)


@pytest.mark.parametrize("name", ["prod", "cumprod", "norm 3", "std", "renorm 2"])
def test_second_derivative_beside_zero_is_finite(name: str) -> None:
    """The branch that is not taken must not bring NaN into it."""
    x = torch.tensor(
        [[[0.0, 2.0, -1.0, 0.5], [1.0, 0.0, 3.0, 1.0], [0.2, 1.0, 1.0, 2.0]]], dtype=torch.float64
    )
    total = lambda x: (WHOLE[name](x) * 0.7).sum()
    twice = lambda x: grad(lambda x: (grad(total)(x) * torch.linspace(0.5, 1.5, 12).reshape(3, 4)).sum())(x)
    step, at = 1e-5, x[0]
    result = vmap(twice)(x)[0]
    assert result.isfinite().all()
    for place in range(12):
        if at.flatten()[place] == 0 and name == "norm 3":
            continue  # where it bends
        move = torch.zeros(12, dtype=torch.float64).index_fill(0, torch.tensor(place), step).reshape(3, 4)
        weighted = lambda x: (grad(total)(x) * torch.linspace(0.5, 1.5, 12).reshape(3, 4)).sum()
        torch.testing.assert_close(
            result.flatten()[place],
            (weighted(at + move) - weighted(at - move)) / (2 * step),
            rtol=1e-4,
            atol=1e-6,
        )
