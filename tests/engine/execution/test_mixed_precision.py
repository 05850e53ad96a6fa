"""Mixed precision: products in bfloat16 under autocast; parameters, norms, sums and losses in float32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from psgrad.data.rows import Block
from psgrad.engine.execution.objective import Objective
from psgrad.engine.execution.self_check import self_check
from psgrad.engine.execution.streaming import Stream
from psgrad.engine.gradients import per_sample_gradients
from psgrad.engine.gradients.per_sample import per_sample_square_norms
from psgrad.engine.measures.builtin.norms import GradientNorms
from psgrad.errors import SelfCheckError
from tests.engine.execution.test_self_check import plant, scaled
from tests.oracles import one_sample_gradients
from tests.small_models import Tied

HALF = torch.bfloat16
EPS = torch.finfo(HALF).eps
ROWS = 7


pytestmark = pytest.mark.usefixtures("device_with_autocast")


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        state = x.new_zeros(len(x), 5)
        for step in x.unbind(1):
            state = self.cell(step, state)
        return state


class Layered(nn.Module):
    """A product in bfloat16 in front of an operator that autocast does not know as a whole."""

    def __init__(self, layer: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.first, self.layer = nn.Linear(6, 5), layer()

    def forward(self, x: Tensor) -> Tensor:
        found = self.layer(self.first(x))
        return found[0][:, -1] if isinstance(found, tuple) else found


class Einsum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("bti,io->bo", x, self.weight)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "perceptron": (
        lambda: nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)),
        lambda: torch.randn(ROWS, 6),
    ),
    "images": (
        lambda: nn.Sequential(
            nn.Conv2d(1, 8, 3),
            nn.GroupNorm(2, 8),
            nn.ReLU(),
            nn.Conv2d(8, 4, 3),
            nn.Flatten(),
            nn.Linear(64, 3),
        ),
        lambda: torch.randn(ROWS, 1, 8, 8),
    ),
    "tied": (Tied, lambda: torch.randint(20, (ROWS, 9))),
    "recurrent": (lambda: Layered(Recurrent), lambda: torch.randn(ROWS, 4, 6)),
    "lstm": (lambda: Layered(lambda: nn.LSTM(5, 3, batch_first=True)), lambda: torch.randn(ROWS, 4, 6)),
    "gru": (lambda: Layered(lambda: nn.GRU(5, 3, batch_first=True)), lambda: torch.randn(ROWS, 4, 6)),
    "rnn": (lambda: Layered(lambda: nn.RNN(5, 3, batch_first=True)), lambda: torch.randn(ROWS, 4, 6)),
    "einsum": (lambda: Layered(Einsum), lambda: torch.randn(ROWS, 4, 6)),
}


def square_norms(gradients: dict[str, Tensor]) -> Tensor:
    """[n], of materialised gradients."""
    return torch.stack([g.double().flatten(1).square().sum(1) for g in gradients.values()]).sum(0)


@pytest.fixture(params=MODELS)
def case(request: pytest.FixtureRequest, device: torch.device) -> tuple[nn.Module, Tensor, Tensor]:
    build, draw = MODELS[request.param]
    return build().eval().to(device), draw().to(device), torch.randint(3, (ROWS,)).to(device)


def test_norms_are_those_of_autocast_one_sample_at_a_time(case: tuple[nn.Module, Tensor, Tensor]) -> None:
    model, inputs, target = case
    objective = Objective(model, F.cross_entropy, autocast=HALF)
    gradients = per_sample_gradients(objective.loss, objective.params, (inputs,), target, has_aux=True)
    with torch.autocast(inputs.device.type, HALF):
        plain = one_sample_gradients(model, F.cross_entropy, (inputs,), target)
    wide = one_sample_gradients(model, F.cross_entropy, (inputs,), target)
    exact = square_norms(wide).sqrt()
    rounding = float((square_norms(plain).sqrt() / exact - 1).abs().max())
    assert 1e-5 < rounding < 0.1  # it is bfloat16 that runs
    found = gradients.square_norms().sqrt()
    assert float((found / exact - 1).abs().max()) > 1e-5
    torch.testing.assert_close(found, square_norms(plain).sqrt(), rtol=2 * rounding + EPS, atol=0)
    torch.testing.assert_close(found, exact, rtol=2 * rounding + EPS, atol=0)
    apart = {name: g - plain[name] for name, g in gradients.materialise().items()}
    exactly = {name: g - plain[name] for name, g in wide.items()}
    assert (square_norms(apart).sqrt() <= 2 * square_norms(exactly).sqrt() + EPS * exact).all()


def test_the_result_is_float32_and_the_factors_are_not(case: tuple[nn.Module, Tensor, Tensor]) -> None:
    model, inputs, target = case
    objective = Objective(model, F.cross_entropy, autocast=HALF)
    for way in (per_sample_gradients, per_sample_square_norms):
        found: Any = way(objective.loss, objective.params, (inputs,), target, has_aux=True)
        assert found.losses.dtype == torch.float32
        assert found.square_norms().dtype == torch.float64
    gradients = per_sample_gradients(objective.loss, objective.params, (inputs,), target, has_aux=True)
    assert {g.dtype for g in gradients.parts[0].gradients.values()} == {torch.float32}
    assert {g.dtype for g in gradients.materialise().values()} == {torch.float32}
    assert {g.dtype for g in gradients.weighted_sum(torch.ones(ROWS)).values()} == {torch.float32}
    ways = found.describe()
    assert {name for name, x in objective.params.items() if x.dim() > 1 and "direct" in ways[name]} == set()


# -- Sums ----------------------------------------------------------------------------------------------------

POSITIONS = 4000


def summed(output: Tensor, target: Tensor) -> Tensor:
    return output.float().sum()


def exact_in_halves(*shape: int) -> Tensor:
    """Numbers from 1 to 2 that bfloat16 holds exactly."""
    return 1 + torch.randint(128, shape) / 128


@pytest.mark.parametrize(
    ("positions", "width", "features"), [(POSITIONS, 2, 3), (40, 200, 100)], ids=["written out", "Gram"]
)
def test_products_and_sums_over_positions_are_taken_in_float32(
    positions: int, width: int, features: int, device: torch.device
) -> None:
    model = nn.Linear(features, width).to(device)
    inputs = exact_in_halves(ROWS, positions, features).to(device)
    target = torch.zeros(ROWS, device=device)
    objective = Objective(model, summed, autocast=HALF)
    gradients = per_sample_gradients(objective.loss, objective.params, (inputs,), target, has_aux=True)
    if width > 2:
        assert {f.dtype for p in gradients.parts[0].gradients["weight"].terms for f in p.term.factors} == {
            HALF
        }
    # [n, 3]: the gradient of every row of the weight; nothing was rounded on the way
    sums = inputs.double().sum(1)
    exact = {"weight": sums.unsqueeze(1).expand(-1, width, -1)}
    norms = per_sample_square_norms(objective.loss, objective.params, (inputs,), target, has_aux=True)
    if device.type != "cuda":  # where other ways are cheap
        assert norms.describe()["weight"] == ("materialise" if width == 2 else "gram")
    torch.testing.assert_close(norms.by_parameter["weight"], square_norms(exact), rtol=1e-5, atol=0)
    weight = gradients.select(["weight"])
    torch.testing.assert_close(weight.square_norms(), square_norms(exact), rtol=1e-5, atol=0)
    torch.testing.assert_close(weight.materialise()["weight"].double(), exact["weight"], rtol=1e-6, atol=0)
    torch.testing.assert_close(
        weight.weighted_sum(torch.arange(ROWS) / ROWS)["weight"].double(),
        torch.einsum("n,noi->oi", torch.arange(ROWS).double().to(device) / ROWS, exact["weight"]),
        rtol=1e-6,
        atol=0,
    )
    vector = {"weight": torch.rand(width, features, device=device)}
    torch.testing.assert_close(
        weight.dot(vector).double(),
        torch.einsum("noi,oi->n", exact["weight"], vector["weight"].double()),
        rtol=1e-5,
        atol=0,
    )


# -- The state around it -------------------------------------------------------------------------------------


def test_a_weight_that_changes_is_cast_anew(device: torch.device) -> None:
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).to(device)
    inputs = torch.randn(ROWS, 6, device=device)
    target = torch.zeros(ROWS, dtype=torch.int64, device=device)

    def norms() -> Tensor:
        objective = Objective(model, F.cross_entropy, autocast=HALF)
        found: Tensor = per_sample_gradients(
            objective.loss, objective.params, (inputs,), target, has_aux=True
        ).square_norms()
        return found

    with torch.autocast(device.type, HALF):  # whose cache outlives what runs inside
        model(inputs)
        first = norms()
        with torch.no_grad():
            model[0].weight.mul_(2)
        second = norms()
    assert not torch.allclose(first, second, rtol=0.1)
    torch.testing.assert_close(second, norms(), rtol=0, atol=0)
    assert not torch.is_autocast_enabled(device.type)


def test_a_loss_sees_float32(device: torch.device) -> None:
    seen = []

    def loss(output: Tensor, target: Tensor) -> Tensor:
        seen.append(output.dtype)
        return F.cross_entropy(output, target)

    objective = Objective(nn.Linear(6, 3).to(device), loss, autocast=HALF)
    target = torch.zeros(2, dtype=torch.int64, device=device)
    per_sample_gradients(
        objective.loss, objective.params, (torch.randn(2, 6, device=device),), target, has_aux=True
    )
    assert seen == [torch.float32]


def drawn_rows(count: int) -> Block:
    return Block((torch.randn(count, 6),), torch.randint(3, (count,)))


@pytest.fixture
def objective(device: torch.device) -> Objective:
    return Objective(
        nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)).to(device),
        F.cross_entropy,
        autocast=HALF,
    )


@pytest.mark.long
def test_chunks_are_replayed_with_the_same_numbers(objective: Objective) -> None:
    rows = drawn_rows(50)
    found = []
    for capture in ("auto", "off"):
        stream = Stream(objective.loss, objective.params, rows, chunk_size=5, capture=capture)  # type: ignore[arg-type]
        found.append(torch.cat([chunk.values["grad_norm"] for chunk in stream.run(50, [GradientNorms()])]))
        assert stream.counts.facts()["chunks_replayed"] == (7 if capture == "auto" else 0)
    torch.testing.assert_close(found[0], found[1], rtol=1e-6, atol=0)


# -- The self-check ------------------------------------------------------------------------------------------


def check(objective: Objective) -> Any:
    rows = drawn_rows(10)
    return self_check(objective, Stream(objective.loss, objective.params, rows), 10, 3)


def test_the_check_says_how_far_halves_are_from_float32(objective: Objective) -> None:
    found = check(objective)
    assert len(found.rounding) == 3
    assert 1e-5 < found.worst_rounding < 0.05
    assert found.worst <= 3 * found.worst_rounding + EPS
    assert check(Objective(objective.model, F.cross_entropy)).rounding == []


@pytest.mark.parametrize("factor", [-1.0, 0.0, 0.9, 1.1])
def test_a_wrong_gradient_is_caught_in_halves_too(
    objective: Objective, factor: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch, lambda name, found: scaled(found, factor) if name == "0.weight" else found)
    with pytest.raises(SelfCheckError, match=r"differs from a plain one-sample gradient") as failure:
        check(objective)
    assert "in bfloat16" in str(failure.value)
