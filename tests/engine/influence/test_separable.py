"""Inner products through weights that are nearly a sum of few outer products, beside the plain sum of all."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import nn

from psgrad.engine.influence.curvature.separable import APART, Separable
from tests.engine.influence.problems import both, parts
from tests.engine.influence.runs import matrix_of
from tests.engine.influence.test_ekfac import fitted

pytestmark = pytest.mark.usefixtures("on_device")

MANY = 1 << 20


def weights(a: int, b: int, decay: float, damping: float, seed: int) -> torch.Tensor:
    """[a, b]: 1 / (values + damping), where values decay along both axes, but for noise."""
    generator = torch.Generator(device="cpu").manual_seed(seed)
    rows, columns = (torch.rand(size, generator=generator, dtype=torch.float64) for size in (a, b))
    noise = torch.rand(a, b, generator=generator, dtype=torch.float64)
    values = ((-decay * rows).exp().unsqueeze(1) * (-decay * columns).exp()) * (1 + noise) / 2
    return (1 / (values + damping)).to(torch.get_default_device())


def outer(count: int, a: int, b: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(seed)
    return torch.randn(count, a), torch.randn(count, b)


@given(
    st.integers(40, 130),
    st.integers(40, 130),
    st.floats(20, 400),
    st.sampled_from([1e-3, 1e-2, 1e-1, 1.0]),
    st.integers(0, 1000),
)
def test_separable_sums_equal_plain_ones(a: int, b: int, decay: float, damping: float, seed: int) -> None:
    """Within the promised share of each term, and what float32 rounds."""
    matrix = weights(a, b, decay, damping, seed)
    found = Separable.of(matrix, MANY)
    assume(found is not None)
    assert found is not None
    one, other = outer(5, a, b, seed), outer(3, a, b, seed + 1)

    def plain(how: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        (x, y), (x_other, y_other) = ([how(each.cpu().double()) for each in pair] for pair in (one, other))
        return torch.einsum("na,nb,ma,mb,ab->nm", x, y, x_other, y_other, matrix.cpu())

    apart = (found.inner(one, other).cpu() - plain(lambda x: x)).abs()
    assert bool((apart <= (APART + 2e-6) * plain(torch.abs)).all())


def test_sums_that_cancel_in_float32_are_not_used() -> None:
    """Entries are up to a million times smaller than the outer products whose sum they are."""
    torch.manual_seed(0)
    left, right = torch.rand(2, 4, 100, dtype=torch.float64).pow(6)
    assert Separable.of(left.t() @ right + 1e-6, MANY) is None


def scores(damping: float) -> torch.Tensor:
    """[80, 60] of layers with up to 160 x 161 weights, in float32."""
    torch.manual_seed(0)
    layers = nn.Linear(6, 160), nn.Tanh(), nn.Linear(160, 160), nn.Tanh(), nn.Linear(160, 3)
    x, y, xq, yq = parts(80, 60)
    training, queries = both(nn.Sequential(*layers).float(), (x.float(), y, xq.float(), yq))
    return matrix_of(fitted(training, fisher="empirical", damping=damping), queries)


@pytest.mark.parametrize("damping", [0.1, 1.0])
def test_ekfac_scores_through_separable_inverses(damping: float, monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[int] = []
    inner = Separable.inner
    monkeypatch.setattr(Separable, "inner", lambda *each: used.append(len(each[0].left)) or inner(*each))
    found = scores(damping)
    assert used
    monkeypatch.setattr(Separable, "of", lambda *_: None)
    expected = scores(damping)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6 * float(expected.abs().max()))
