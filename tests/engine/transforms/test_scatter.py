"""Writes of several values to one place, to places of a mask of each sample's own, and through other
strides.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from psgrad.engine.transforms import grad, vmap
from psgrad.errors import TransformError
from tests.engine.transforms.loops import gradients_by_loop

torch.manual_seed(0)
X = torch.randn(4, 3, 5, dtype=torch.float64)
MASKS = torch.rand(4, 3, 5) > 0.5


def assert_like_the_loop(
    function: Callable[..., Tensor], *samples: Tensor, argnums: tuple[int, ...] = (0,)
) -> None:
    torch.testing.assert_close(
        vmap(grad(function, argnums))(*samples), gradients_by_loop(function, *samples, argnums=argnums)
    )


@pytest.mark.parametrize("include_self", [True, False])
@pytest.mark.parametrize("zeros", [0, 1, 2, 3])
def test_scatter_product_with_zeros(zeros: int, include_self: bool) -> None:
    """Against the product of all factors; PyTorch has no second derivative where two factors are zero."""
    torch.manual_seed(zeros)
    factors = torch.randn(4, 5, dtype=torch.float64)
    factors[:, :zeros] = 0
    start = torch.randn(4, 1, dtype=torch.float64)

    def scattered(start: Tensor, factors: Tensor) -> Tensor:
        index = torch.zeros(5, dtype=torch.long)
        return (
            start.scatter_reduce(0, index, factors, "prod", include_self=include_self).sum().exp()
            + (factors**3 + factors).sum()
        )

    def written_out(start: Tensor, factors: Tensor) -> Tensor:
        product = start.sum() if include_self else torch.ones((), dtype=torch.float64)
        for factor in factors:
            product = product * factor
        return product.exp() + (factors**3 + factors).sum()

    assert_like_the_loop(scattered, start, factors, argnums=(0, 1))

    def square(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda start, factors: (grad(function, argnums=1)(start, factors) ** 2).sum()

    result = vmap(grad(square(scattered), argnums=(0, 1)))(start, factors)
    torch.testing.assert_close(result, vmap(grad(square(written_out), argnums=(0, 1)))(start, factors))


@pytest.mark.parametrize("kind", ["amax", "amin"])
def test_scatter_maximum_ties(kind: str) -> None:
    x, source = (
        torch.ones(2, 2, dtype=torch.float64),
        torch.tensor([[1.0, 1.0, 0.5], [2.0, 2.0, 0.5]], dtype=torch.float64),
    )
    index = torch.tensor([0, 0, 1])
    assert_like_the_loop(
        lambda x, source: (x.scatter_reduce(0, index, source, kind) ** 2).sum(), x, source, argnums=(0, 1)
    )


def _write(x: Tensor, mask: Tensor, value: Tensor) -> Tensor:
    y = x * 2
    y[mask] = value
    return (y**3).sum()


def _add(x: Tensor, mask: Tensor, value: Tensor) -> Tensor:
    return ((x * 2).index_put((mask,), value, accumulate=True) ** 3).sum()


@pytest.mark.parametrize("write", [_write, _add])
def test_masked_fill_mask_of_each_sample(write: Callable[..., Tensor]) -> None:
    value = torch.arange(1.0, 5.0, dtype=torch.float64)
    assert_like_the_loop(write, X, MASKS, value, argnums=(0, 2))
    rows = torch.randn(4, 5, dtype=torch.float64)  # one row, written to all rows that the mask names
    assert_like_the_loop(write, X, MASKS[:, :, 0], rows, argnums=(0, 2))


STRIDED: dict[str, Callable[[Tensor], Tensor]] = {
    "windows": lambda x: (x * 2).as_strided((5, 3), (2, 1)),
    "of a transpose": lambda x: (x * 2).t().as_strided((2, 3), (5, 1)),
    "of a part": lambda x: (x * 2)[1:].as_strided((2, 4), (5, 1)),
    "at an offset": lambda x: (x * 2).as_strided((2, 4), (5, 1), 1),
    "copied": lambda x: torch.as_strided_copy(x * 2, (5, 3), (2, 1)),
    "scattered": lambda x: torch.as_strided_scatter(x * 2, x[0] * 3, (5,), (2,), 3),
}


@pytest.mark.parametrize("name", STRIDED)
def test_as_strided(name: str) -> None:
    """PyTorch's gradient of as_strided_scatter in its first argument is wrong: there the oracle is a write
    through the view.
    """
    function = STRIDED[name]

    def through_the_view(x: Tensor) -> Tensor:
        y = x * 2
        y.as_strided((5,), (2,), 3).copy_(x[0] * 3)
        return (y**3).sum()

    oracle = through_the_view if name == "scattered" else lambda x: (function(x) ** 3).sum()
    torch.testing.assert_close(
        vmap(grad(lambda x: (function(x) ** 3).sum()))(X), *gradients_by_loop(oracle, X)
    )
    assert_like_the_loop(through_the_view, X)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.as_strided((3,), (8,)),  # beyond its end
        lambda x: (x * 1)[1:].as_strided((2,), (1,), 0),  # before the part
        lambda x: x[:, :1].expand(3, 4).as_strided((3,), (5,)),  # several elements at one place
        lambda x: (x * 1).as_strided((5, 3), (2, 1)).mul_(2),  # written to twice
    ],
)
def test_as_strided_out_of_bounds_refused(function: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(TransformError, match="as_strided"):
        grad(lambda x: function(x).sum())(X[0])
