"""Random operators where samples draw by labels: each has a rule, or is refused by name; and what
is drawn is distributed as PyTorch's own operator draws it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy import stats
from torch import Tensor

from psgrad.engine.privacy.generators import make_generator
from psgrad.engine.privacy.record_draws import RecordDraws
from psgrad.engine.transforms import checkpoint, grad, vmap
from psgrad.engine.transforms.operators import RANDOM_COMPOSITES, facts
from psgrad.engine.transforms.random_draws import draw_by_label, programs
from psgrad.engine.transforms.rules import registry
from psgrad.errors import TransformError

BITS = RecordDraws(make_generator("aes", seed=0)).at(0).bits
SAMPLES = 400


def drawn(function: Callable[[Tensor], Any], x: Tensor, labels: Tensor) -> Any:
    """The function of each sample, which draws by its label."""

    def labelled(x: Tensor, label: Tensor) -> Any:
        draw_by_label(BITS, label)
        return function(x)

    return vmap(labelled, randomness="different")(x, labels)


aten = torch.ops.aten
# Each random operator once, on positive numbers [8].
CALLS: dict[str, Callable[[Tensor], Tensor]] = {
    "rand": lambda x: torch.rand(8),
    "rand.generator": lambda x: aten.rand.generator([8], generator=None),
    "rand_like": torch.rand_like,
    "rand_like.generator": lambda x: aten.rand_like.generator(x, generator=None),
    "randn": lambda x: torch.randn(8),
    "randn.generator": lambda x: aten.randn.generator([8], generator=None),
    "randn_like": torch.randn_like,
    "randn_like.generator": lambda x: aten.randn_like.generator(x, generator=None),
    "randn, complex": lambda x: torch.view_as_real(torch.randn(4, dtype=torch.complex64)).flatten(),
    "rand, complex": lambda x: torch.view_as_real(torch.rand(4, dtype=torch.complex64)).flatten(),
    "randint": lambda x: torch.randint(5, (8,)),
    "randint.low": lambda x: torch.randint(-3, 4, (8,)),
    "randint.generator": lambda x: aten.randint.generator(5, [8], generator=None),
    "randint.low_generator": lambda x: aten.randint.low_generator(-3, 4, [8], generator=None),
    "randint_like": lambda x: torch.randint_like(x, 9),
    "randint_like.generator": lambda x: aten.randint_like.generator(x, 9, generator=None),
    "randint_like.low_generator_dtype": lambda x: aten.randint_like.low_generator_dtype(
        x, -5, 9, generator=None
    ),
    "randint_like.low_dtype": lambda x: torch.randint_like(x, -5, 9),
    "randperm": lambda x: torch.randperm(8)[:1],
    "randperm.generator": lambda x: aten.randperm.generator(8, generator=None)[:1],
    "bernoulli": lambda x: torch.bernoulli(x / 10),
    "bernoulli.p": lambda x: torch.bernoulli(x, 0.3),
    "bernoulli_.float": lambda x: x.clone().bernoulli_(0.3),
    "bernoulli_.Tensor": lambda x: x.clone().bernoulli_(x / 10),
    "uniform": lambda x: aten.uniform.default(x, -2.0, 3.0),
    "uniform_": lambda x: x.clone().uniform_(-2, 3),
    "normal_": lambda x: torch.empty(8).normal_(3, 2),
    "normal_functional": lambda x: aten.normal_functional.default(x, 3.0, 2.0),
    "normal.float_float": lambda x: torch.normal(1.0, 2.0, (8,)),
    "normal.Tensor_Tensor": lambda x: torch.normal(x, x),
    "normal.Tensor_float": lambda x: torch.normal(x, 2.0),
    "normal.float_Tensor": lambda x: torch.normal(1.0, x),
    "exponential": lambda x: aten.exponential.default(x, 2.0),
    "exponential_": lambda x: x.clone().exponential_(2.0),
    "cauchy": lambda x: aten.cauchy.default(x, 1.0, 2.0),
    "cauchy_": lambda x: x.clone().cauchy_(1.0, 2.0),
    "log_normal": lambda x: aten.log_normal.default(x, 0.2, 0.5),
    "log_normal_": lambda x: x.clone().log_normal_(0.2, 0.5),
    "geometric": lambda x: aten.geometric.default(x, 0.3),
    "geometric_": lambda x: x.clone().geometric_(0.3),
    "random": lambda x: aten.random.default(x),
    "random_": lambda x: x.clone().random_(),
    "random.to": lambda x: aten.random.to(x, 7),
    "random_.to": lambda x: x.clone().random_(7),
    "random.from": lambda x: getattr(aten.random, "from")(x, -4, 7),
    "random_.from": lambda x: x.long().random_(-4, 7),
    "multinomial": lambda x: torch.multinomial(x, 3),
    "multinomial, with replacement": lambda x: torch.multinomial(x.view(2, 4), 3, replacement=True).flatten(),
    "native_dropout": lambda x: F.dropout(x, 0.3),
    "rrelu": lambda x: aten.rrelu.default(-x, 0.1, 0.4, True),
    "rrelu_": lambda x: aten.rrelu_.default(-x, 0.1, 0.4, True),
    "rrelu_with_noise_functional": lambda x: aten.rrelu_with_noise_functional.default(
        -x, torch.ones_like(x), 0.1, 0.4, True
    )[0],
    "scaled_dot_product_attention": lambda x: (
        F.scaled_dot_product_attention(x.view(1, 4, 2), x.view(1, 4, 2), x.view(1, 4, 2), dropout_p=0.3)
        .sin()
        .flatten()
    ),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.3, training=True),
    "feature_dropout": lambda x: F.dropout1d(x.view(1, 4, 2), 0.3).flatten(),
    "feature_alpha_dropout": lambda x: F.feature_alpha_dropout(x.view(1, 4, 2), 0.3, training=True).flatten(),
    "fractional_max_pool2d": (
        lambda x: F.fractional_max_pool2d(
            x.view(1, 2, 4).tile(4, 1).view(1, 1, 4, 8), 2, output_size=3
        ).flatten()
    ),
    "gumbel_softmax": lambda x: F.gumbel_softmax(x.log()),
}
REFUSED: dict[str, Callable[[Tensor], Tensor]] = {
    "poisson": torch.poisson,
    "binomial": lambda x: torch.binomial(x, x / 10),
    "_standard_gamma": torch._standard_gamma,
    "_sample_dirichlet": torch._sample_dirichlet,
}
X = torch.linspace(0.5, 4, 8)


def by_place(x: Tensor) -> Tensor:
    """[samples, numbers], without the last digits, by which kernels differ."""
    return x.reshape(len(x), -1).double().round(decimals=4)


def test_labelled_draws_every_random_operator_has_a_rule_or_is_refused() -> None:
    """All that PyTorch says of that they draw, and that have a rule under vmap or are taken apart there."""
    seeded = set()
    for name in torch._C._dispatch_get_all_op_names():
        if name.startswith("aten::"):
            packet, _, overload = name.removeprefix("aten::").partition(".")
            op = getattr(getattr(aten, packet), overload or "default")
            if torch.Tag.nondeterministic_seeded in op.tags and not facts(op).mutated_kwargs:
                seeded.add((op, name.removeprefix("aten::")))
    assert len(seeded) > 80
    called = {name.partition(",")[0] for name in {**CALLS, **REFUSED}}
    for op, name in seeded:
        if op in programs:
            assert name in called, f"{name} draws by label, and no call of it is tested"
        elif registry.batching_rule(op) is not None and facts(op).draws_position is None:
            assert name in REFUSED, f"{name} draws under vmap and has no rule for draws by label"
    assert {name for op, name in seeded if op in RANDOM_COMPOSITES and not name.endswith("_")} - {
        "dropout"
    } <= called


@pytest.mark.parametrize("name", CALLS)
def test_labelled_draws_independent_and_distributed_as_pytorch(name: str) -> None:
    function, labels = CALLS[name], torch.arange(SAMPLES)
    result = by_place(drawn(function, X.expand(SAMPLES, 8), labels))
    chosen = torch.tensor([7, 300, 2])
    state = torch.get_rng_state()
    assert torch.equal(by_place(drawn(function, X.expand(3, 8), labels[chosen])), result[chosen])
    assert torch.equal(torch.get_rng_state(), state)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        expected = by_place(torch.stack([function(X) for _ in range(SAMPLES)]))
    assert result.shape == expected.shape
    for place in range(
        result.shape[1]
    ):  # at random some p-value of several hundred is below 1e-3, and none below 1e-6
        assert (
            stats.ks_2samp(result[:, place].numpy(), expected[:, place].numpy(), method="asymp").pvalue > 1e-6
        ), place
    if result.shape[1] > 1 and result.std(0).min() > 0 and name not in ("multinomial", "gumbel_softmax"):
        neighbours = np.corrcoef(stats.rankdata(result[:, 0]), stats.rankdata(result[:, -1]))[0, 1]
        assert abs(neighbours) < (0.5 if "pool" in name or "dropout" in name or "attention" in name else 0.25)


@pytest.mark.parametrize("name", REFUSED)
def test_labelled_draws_without_a_rule_refused(name: str) -> None:
    with pytest.raises(
        TransformError, match=f"the random operator aten::{name} can't draw for each record separately"
    ):
        drawn(REFUSED[name], X.expand(3, 8), torch.arange(3))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_labelled_draws_range(dtype: torch.dtype) -> None:
    x = torch.empty(64, 4096, dtype=dtype)
    uniform = drawn(torch.rand_like, x, torch.arange(64))
    assert uniform.dtype == dtype
    assert 0 <= uniform.min() < uniform.max() < 1
    waiting = drawn(lambda x: torch.empty_like(x).exponential_(), x, torch.arange(64))
    assert waiting.min() > 0
    assert waiting.isfinite().all()
    assert drawn(torch.randn_like, x, torch.arange(64)).isfinite().all()


def test_labelled_draws_of_edge_probabilities() -> None:
    x = torch.ones(3, 50)
    labels = torch.arange(3)
    assert torch.equal(drawn(lambda x: torch.bernoulli(x, 1.0), x, labels), x)
    assert not drawn(lambda x: torch.bernoulli(x, 0.0), x, labels).any()
    assert not drawn(lambda x: F.dropout(x, 1.0), x, labels).any()
    assert torch.equal(drawn(lambda x: aten.native_dropout.default(x, 0.5, False)[0], x, labels), x)


def test_labelled_draws_nested_vmap_and_backward_pass() -> None:
    """Labels of rows inside those of records, a gradient between the two."""
    weight, x, labels = torch.ones(8), torch.rand(3, 5, 8), torch.arange(15).view(3, 5)

    def loss(weight: Tensor, x: Tensor, labels: Tensor) -> Tensor:
        def of_row(x: Tensor, label: Tensor) -> Tensor:
            draw_by_label(BITS, label)
            return (F.dropout(x * weight, 0.5) * torch.rand(8)).square().sum()

        return vmap(of_row, randomness="different")(x, labels).sum()

    result = vmap(grad(loss), in_dims=(None, 0, 0), randomness="different")(weight, x, labels)
    for record in range(3):
        for order in (torch.arange(5), torch.tensor([4, 2, 0, 1, 3])):
            alone = vmap(grad(loss), in_dims=(None, 0, 0), randomness="different")(
                weight, x[record : record + 1, order], labels[record : record + 1, order]
            )
            torch.testing.assert_close(alone[0], result[record])


@pytest.mark.parametrize("rows", [False, True])
def test_labelled_draws_checkpoint(rows: bool) -> None:
    """A function that runs again in the backward pass has the same masks, and so do later draws."""
    x, labels = torch.rand(3, 5, 8), torch.arange(15).view(3, 5)

    def gradients(around: Callable[..., Tensor]) -> Tensor:
        def loss(weight: Tensor, x: Tensor, label: Tensor) -> Tensor:
            def of_row(x: Tensor, label: Tensor) -> Tensor:
                draw_by_label(BITS, label)
                first = F.dropout(x * weight, 0.5)
                second = around(lambda first: F.dropout(first.sin(), 0.5) + torch.rand(8) * weight, first)
                return (
                    (around(lambda second: F.dropout(second.exp(), 0.5), second) * torch.rand(8))
                    .square()
                    .sum()
                )

            return vmap(of_row, randomness="different")(x, label).sum() if rows else of_row(x, label)

        if rows:
            return vmap(grad(loss), in_dims=(None, 0, 0), randomness="different")(torch.ones(8), x, labels)  # type: ignore[no-any-return]
        return vmap(grad(loss), in_dims=(None, 0, 0), randomness="different")(  # type: ignore[no-any-return]
            torch.ones(8), x[:, 0], labels[:, 0]
        )

    torch.testing.assert_close(gradients(checkpoint), gradients(lambda function, *args: function(*args)))
