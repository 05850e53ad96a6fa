"""The self-check: wrong gradients are caught, rounding and rows without a finite gradient are not."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from psgrad.data.rows import Block
from psgrad.engine.execution.objective import Objective
from psgrad.engine.execution.ranks import spread_rows
from psgrad.engine.execution.self_check import self_check
from psgrad.engine.execution.streaming import Stream
from psgrad.engine.gradients.deferral import DeferredGradient, Placed
from psgrad.engine.gradients.queries import PerSampleGradients
from psgrad.errors import ModelError, SelfCheckError
from tests.engine.execution.test_objective import Everything

ROWS = 10


class Setup:
    """A model over random rows, ready to be checked."""

    def __init__(self, model: nn.Module | None = None, criterion: Any = F.cross_entropy) -> None:
        self.model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)) if model is None else model
        self.inputs, self.target = torch.randn(ROWS, 4), torch.randint(3, (ROWS,))
        self.objective = Objective(self.model, criterion)

    def check(self, wanted: int = 3) -> Any:
        rows = Block((self.inputs,), self.target)
        return self_check(
            self.objective, Stream(self.objective.loss, self.objective.params, rows), ROWS, wanted
        )


@pytest.mark.parametrize(
    ("dtype", "worst"), [(torch.float32, 1e-5), (torch.float64, 1e-13), (torch.bfloat16, 1e-1)]
)
def test_right_gradients_pass(dtype: torch.dtype, worst: float) -> None:
    setup = Setup()
    setup.model.to(dtype)
    setup.objective = Objective(setup.model, F.cross_entropy)
    check = setup.check()
    assert check.rows == [0, 3, 6]
    assert len(check.errors) == 3
    assert 0 <= check.worst <= worst


@pytest.mark.parametrize(
    ("count", "wanted", "rows"),
    [(10, 3, [0, 3, 6]), (2, 3, [0, 1]), (10, 0, []), (1, 1, [0]), (7, 7, list(range(7)))],
)
def test_rows_are_spread_over_the_dataset(count: int, wanted: int, rows: list[int]) -> None:
    assert spread_rows(count, wanted) == rows


def plant(monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    """Every gradient that the engine finds goes through change(name, gradient)."""
    honest = Stream.gradients

    def wrong(stream: Stream, rows: Any) -> PerSampleGradients:
        grads = honest(stream, rows)
        return PerSampleGradients.of(
            {name: change(name, g) for name, g in grads.parts[0].gradients.items()}, grads.losses, grads.aux
        )

    monkeypatch.setattr(Stream, "gradients", wrong)


def scaled(gradient: DeferredGradient, factor: float) -> DeferredGradient:
    return gradient.with_terms(
        [Placed(placed.term.scaled(factor), placed.layout) for placed in gradient.terms]
    )


@pytest.mark.parametrize("factor", [-1.0, 0.0, 0.99, 1.01, 1e6, math.nan, math.inf, None])
def test_a_wrong_gradient_is_caught(monkeypatch: pytest.MonkeyPatch, factor: float | None) -> None:
    """factor: None for a gradient that is missing."""

    def change(name: str, gradient: DeferredGradient) -> DeferredGradient:
        if factor is None:
            return gradient.with_terms([]) if name == "2.bias" else gradient
        return scaled(gradient, factor) if name == "0.weight" else gradient

    plant(monkeypatch, change)
    with pytest.raises(SelfCheckError, match="the self-check failed on row 0") as failure:
        Setup().check()
    assert "1e-03 in float32" in str(failure.value)


def test_a_wrong_norm_of_a_right_gradient_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = PerSampleGradients.square_norms
    monkeypatch.setattr(
        PerSampleGradients, "square_norms", lambda grads, per="total": 1.01 * honest(grads, per)
    )
    with pytest.raises(SelfCheckError):
        Setup().check()


def test_gradients_of_the_wrong_sample_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = Stream.gradients
    monkeypatch.setattr(Stream, "gradients", lambda stream, rows: honest(stream, rows[::-1]))
    with pytest.raises(SelfCheckError):
        Setup().check()


def test_rows_without_a_finite_gradient_on_either_side_are_no_failure() -> None:
    setup = Setup()
    setup.inputs[3] = math.nan
    check = setup.check()
    assert math.isnan(check.errors[1])
    assert check.worst < 1e-5


def test_rows_that_are_finite_for_the_witness_alone_are_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    setup = Setup()
    honest = setup.objective.loss
    setup.objective.loss = lambda params, inputs, target: (honest(params, inputs, target)[0] / 0, {})  # type: ignore[method-assign]
    with pytest.raises(SelfCheckError, match=r"differs .* by inf"):
        setup.check()


def test_rounding_in_a_vanishing_gradient_is_no_failure() -> None:
    setup = Setup()
    # The first row's logits are so sure of its label that its gradient is rounding alone.
    with torch.no_grad():
        setup.model[2].weight.mul_(20)
    setup.target = setup.model(setup.inputs).argmax(1)
    setup.target[3] = (setup.target[3] + 1) % 3
    assert setup.check().worst < 1e-3


def test_parameters_that_the_loss_does_not_reach_agree() -> None:
    model = nn.Linear(4, 3)
    model.unused = nn.Parameter(torch.randn(2))
    assert Setup(model).check().worst < 1e-5


def test_a_model_that_changes_from_call_to_call_is_caught() -> None:
    class Drifts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)
            self.calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return self.calls * self.layer(x)

    with pytest.raises(SelfCheckError, match="one call to the next"):
        Setup(Drifts()).check()


def test_a_row_on_which_the_model_raises_is_named() -> None:
    setup = Setup(nn.Embedding(5, 3), lambda output, target: output.sum())
    tokens = torch.zeros(ROWS, dtype=torch.int64)
    tokens[6] = 9
    setup.inputs = tokens
    with pytest.raises(ModelError, match="raised IndexError on row 6"):
        setup.check()


class PackedInt8(nn.Linear):
    """A weight of whole numbers, in a kernel of which PyTorch has no derivative."""

    def forward(self, x: Tensor) -> Tensor:
        codes = torch.ones(self.out_features, self.in_features, dtype=torch.int8)
        return torch._weight_int8pack_mm(super().forward(x), codes, torch.ones(self.out_features))


def test_a_model_that_autograd_can_not_differentiate_is_named() -> None:
    with pytest.raises(SelfCheckError, match="the self-check can't run, as PyTorch's autograd fails: deriv"):
        Setup(model=nn.Sequential(PackedInt8(4, 4), nn.Linear(4, 3))).check()


def test_the_model_keeps_no_gradient() -> None:
    setup = Setup()
    setup.check()
    assert all(parameter.grad is None for parameter in setup.model.parameters())


def test_tied_and_frozen_parameters_are_checked_under_their_first_name() -> None:
    assert Setup(Everything().eval()).check().worst < 1e-5
