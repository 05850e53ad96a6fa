"""Random operators under vmap, where what is drawn depends on the sample: one draw for all is the draw that
each sample alone would have seen after the same seed; draws of each sample's own are those of the batch,
drawn natively.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.functional import dropout, fractional_max_pool2d, fractional_max_pool3d, rrelu

from psgrad.engine.transforms import grad, vjp, vmap
from tests.engine.transforms.loops import gradients_by_loop

PROBABILITIES = torch.linspace(0.05, 0.95, 4 * 20).reshape(4, 20)

WITH_PARAMETERS: dict[str, Callable[[Tensor], Tensor]] = {
    "bernoulli": torch.bernoulli,
    "normal, both": lambda p: torch.normal(p, p + 1),
    "normal, mean": lambda p: torch.normal(p, 1.5),
    "normal, deviation": lambda p: torch.normal(2.0, p),
    "multinomial, one": lambda p: torch.multinomial(p, 1),
    "multinomial": lambda p: torch.multinomial(p, 5),
    "multinomial with replacement": lambda p: torch.multinomial(p, 5, replacement=True),
    "multinomial of rows": lambda p: torch.multinomial(p.reshape(4, 5), 3, replacement=True),
}


@pytest.mark.parametrize("name", WITH_PARAMETERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_vmap_randomness_same_with_parameters_equals_each_sample(name: str, dtype: torch.dtype) -> None:
    function, p = WITH_PARAMETERS[name], PROBABILITIES.to(dtype)

    def seeded(p: Tensor) -> Tensor:
        torch.manual_seed(5)
        return function(p)

    torch.manual_seed(5)
    assert torch.equal(vmap(function, randomness="same")(p), torch.stack([seeded(one) for one in p]))


@pytest.mark.parametrize("name", [name for name in WITH_PARAMETERS if name != "multinomial of rows"])
def test_vmap_randomness_different_with_parameters_equals_native_batch(name: str) -> None:
    torch.manual_seed(5)
    result = vmap(WITH_PARAMETERS[name], randomness="different")(PROBABILITIES)
    torch.manual_seed(5)
    assert torch.equal(result, WITH_PARAMETERS[name](PROBABILITIES))


NESTED: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda x: dropout(x, 0.5),
    "randn_like": torch.randn_like,
    "bernoulli": lambda x: torch.bernoulli(x / 2),
    "normal": lambda x: torch.normal(x, 1.0),
    "multinomial": lambda x: torch.multinomial(x, 8),
    "rand": lambda x: x * torch.rand(16),
    "rrelu": lambda x: rrelu(-x, training=True),
}


@pytest.mark.parametrize("outer", ["same", "different"])
@pytest.mark.parametrize("inner", ["same", "different"])
@pytest.mark.parametrize("name", NESTED)
def test_vmap_randomness_nested(name: str, inner: str, outer: str) -> None:
    torch.manual_seed(5)
    drawn = vmap(vmap(NESTED[name], randomness=inner), randomness=outer)(torch.ones(2, 3, 16))
    assert torch.equal(drawn[:, 0], drawn[:, 1]) == (inner == "same")
    assert torch.equal(drawn[0], drawn[1]) == (outer == "same")


@pytest.mark.parametrize("randomness", ["same", "different"])
def test_rrelu_slopes_randomness_different(randomness: str) -> None:
    torch.manual_seed(5)
    x = torch.randn(4, 50, dtype=torch.float64)
    value, pull = vjp(
        lambda x: vmap(lambda x: rrelu(x, 0.1, 0.4, training=True), randomness=randomness)(x), x
    )
    (slope,) = pull(torch.ones_like(x))
    torch.testing.assert_close(value, x * slope)
    assert slope[x > 0].unique().tolist() == [1.0]
    negative = slope[x < 0]
    assert 0.1 <= negative.min() < 0.15 < 0.35 < negative.max() <= 0.4


def test_rrelu_randomness_same() -> None:
    x = torch.randn(4, 50, dtype=torch.float64)

    def seeded(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        torch.manual_seed(5)
        return function(x)

    for function in (lambda x: rrelu(x, training=True), lambda x: rrelu(x * 1, training=True, inplace=True)):
        result = seeded(vmap(function, randomness="same"), x)
        assert torch.equal(result, torch.stack([seeded(function, one) for one in x]))


def test_normal_draw_has_no_derivative_in_its_parameters() -> None:
    x = torch.ones(2, 3)
    value, pull = vjp(lambda x: vmap(lambda x: torch.normal(x, x), randomness="same")(x), x)
    assert pull(torch.ones_like(value))[0].abs().max() == 0


def test_rrelu_in_eval_mode() -> None:
    x = torch.linspace(-1, 1, 8, dtype=torch.float64).reshape(2, 4)
    torch.testing.assert_close(
        vmap(grad(lambda x: (rrelu(x, 0.1, 0.3) ** 2).sum()))(x), 2 * x * torch.where(x < 0, 0.04, 1.0)
    )


@pytest.mark.parametrize("axes", [2, 3])
@pytest.mark.parametrize("batched", [True, False])
def test_fractional_pooling_given_samples(axes: int, batched: bool) -> None:
    pool = {2: fractional_max_pool2d, 3: fractional_max_pool3d}[axes]
    torch.manual_seed(5)
    x, places = (
        torch.randn(3, 2, 4, *(6,) * axes, dtype=torch.float64),
        torch.rand(3, 2, 4, axes, dtype=torch.float64),
    )
    if not batched:
        x, places = x[:, 0], places[:, :1]

    def loss(x: Tensor, places: Tensor) -> Tensor:
        return (pool(x, 2, output_size=3, _random_samples=places) ** 3).sum()

    (expected,) = gradients_by_loop(loss, x, places)
    torch.testing.assert_close(vmap(grad(loss))(x, places), expected)
    (expected,) = gradients_by_loop(loss, x, places[:1].expand_as(places))
    torch.testing.assert_close(vmap(grad(loss), in_dims=(0, None))(x, places[0]), expected)
