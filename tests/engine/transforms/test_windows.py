"""A convolution's per-sample weight gradients: every order of computing them beside the kernel's own gradient
of one sample at a time.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from psgrad.engine.gradients.terms import Convolution
from psgrad.engine.transforms.rules import convolution, convolution_weights
from psgrad.engine.transforms.rules.convolution_weights import Geometry, grams, shifted, weight_gradients
from tests.engine.gradients.agreement import LargestTensor

aten = torch.ops.aten
few = st.integers(1, 3)


@st.composite
def convolutions(draw: st.DrawFn) -> tuple[Tensor, Tensor, torch.Size, Geometry]:
    """(cotangents, inputs, weight's shape, geometry), with strides beyond the kernel, dilation, groups, inner
    batches, transposed.
    """
    axes, groups, transposed = draw(few), draw(few), draw(st.booleans())
    channels, outputs = groups * draw(few), groups * draw(few)
    if draw(st.integers(0, 9)) == 0:
        channels *= 35  # wide enough for a product at each place of the kernel
    kernel, stride, dilation, padding, sides = (
        tuple(draw(st.integers(low, high)) for _ in range(axes))
        for low, high in ((1, 3), (1, 4), (1, 3), (0, 2), (1, 7))
    )
    output_padding = tuple(
        draw(st.integers(0, max(s, d) - 1)) if transposed else 0
        for s, d in zip(stride, dilation, strict=True)
    )
    geometry = Geometry(stride, padding, dilation, transposed, output_padding, groups)
    shape = (channels, outputs // groups, *kernel) if transposed else (outputs, channels // groups, *kernel)
    n, inner = draw(few), draw(st.integers(1, 2))
    x = torch.randn(n, inner, channels, *sides, dtype=torch.float64)
    try:
        out = aten.convolution.default(
            x.flatten(0, 1), torch.zeros(shape, dtype=torch.float64), None, *geometry
        )
    except RuntimeError:  # a kernel larger than the padded input
        assume(False)
    assume(out.numel() > 0)
    return torch.randn_like(out).unflatten(0, (n, inner)), x, torch.Size(shape), geometry


def one_by_one(g: Tensor, x: Tensor, shape: torch.Size, geometry: Geometry) -> Tensor:
    weight = torch.zeros(shape, dtype=g.dtype)
    mask = [False, True, False]
    return torch.stack(
        [
            aten.convolution_backward.default(*pair, weight, [0], *geometry, mask)[1]
            for pair in zip(g, x, strict=True)
        ]
    )


@given(convolutions())
def test_convolution_weight_gradients_every_order(
    case: tuple[Tensor, Tensor, torch.Size, Geometry],
) -> None:
    expected = one_by_one(*case)
    close = {"rtol": 1e-10, "atol": 1e-10}
    torch.testing.assert_close(weight_gradients(*case), expected, **close)
    torch.testing.assert_close(convolution_weights.as_groups(*case), expected, **close)
    moved = torch.zeros_like(expected)
    for place, part in shifted(*case):
        moved[(..., *place)] = part
    torch.testing.assert_close(moved, expected, **close)
    patches, rows = convolution_weights.as_matrices(*case)
    torch.testing.assert_close((rows.transpose(-2, -1) @ patches).reshape(expected.shape), expected, **close)


@given(convolutions())
def test_convolution_norms_by_gram_matrix(
    case: tuple[Tensor, Tensor, torch.Size, Geometry],
) -> None:
    squares = one_by_one(*case).flatten(1).square().sum(1)
    left, right = grams(*case)
    torch.testing.assert_close(
        (left * right).reshape(len(squares), -1).sum(1), squares, rtol=1e-9, atol=1e-10
    )
    torch.testing.assert_close(Convolution(*case).square_norms(), squares, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("channels", [512, 64])
def test_convolution_norms_memory_below_gradient(channels: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """7 x 7 positions of many channels: no weight gradient is made, whose entries outnumber the Gram
    matrix's.
    """
    x = torch.randn(2, 1, channels, 7, 7)
    g = torch.randn(2, 1, channels, 7, 7)
    geometry, shape = (
        Geometry((1, 1), (1, 1), (1, 1), False, (0, 0), 1),
        torch.Size((channels, channels, 3, 3)),
    )
    term = Convolution(g, x, shape, geometry)
    assert term.order() == "gram"
    expected = one_by_one(g.double(), x.double(), shape, geometry).flatten(1).square().sum(1)

    def never(*args: object) -> None:
        raise AssertionError("a weight gradient was materialised")

    monkeypatch.setattr(convolution, "weight_gradients", never)
    torch.testing.assert_close(term.square_norms().double(), expected, rtol=1e-5, atol=0)


def test_convolution_patches_never_materialised() -> None:
    """The largest tensor that a shifted product makes is one padded copy of the input, not nine of it."""
    n, channels, side = 2, 160, 12
    x, g = torch.randn(n, 1, channels, side, side), torch.randn(n, 1, channels, side, side)
    geometry, shape = (
        Geometry((1, 1), (1, 1), (1, 1), False, (0, 0), 1),
        torch.Size((channels, channels, 3, 3)),
    )
    with LargestTensor() as largest:
        parts = list(shifted(g, x, shape, geometry))
    assert len(parts) == 9
    assert largest.elements <= n * channels * math.prod((side + 3, side + 2))
