"""Models that are trained together come out as those that PyTorch trains one by one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from psgrad.engine.influence.evaluation.jobs import Job, LoadedRows, Members, Recipe
from psgrad.engine.influence.evaluation.retraining import (
    EnsembleTrainer,
    FunctionTrainer,
    fresh_model,
)
from psgrad.errors import InfluenceError, ModelError
from tests.engine.influence.problems import SoftmaxRegression, classified, cross_entropy, flattened

INPUTS, LABELS = classified(40)
ROWS = LoadedRows((INPUTS,), LABELS)
RECIPE = Recipe(epochs=3, batch_size=7, learning_rate=0.05)


def fresh(seed: int) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def jobs(count: int, size: int = 25, seed: int = 0) -> list[Job]:
    random = np.random.default_rng(seed)
    return [
        Job(f"subset {number}", np.sort(random.choice(40, size, replace=False)), 100 + number)
        for number in range(count)
    ]


def member(members: Members, number: int) -> torch.Tensor:
    return torch.cat([members.state[name][number].flatten() for name, _ in members.model.named_parameters()])


def trained_alone(job: Job, recipe: Recipe) -> torch.Tensor:
    """By torch.optim and PyTorch's own backward pass, on the same batches."""
    model = fresh_model(fresh, job.seed)
    options: dict[str, Any] = {"lr": recipe.learning_rate, "weight_decay": recipe.weight_decay}
    kinds = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
    optimizer: torch.optim.Optimizer = (
        torch.optim.SGD(model.parameters(), momentum=recipe.momentum, **options)
        if recipe.optimizer == "sgd"
        else kinds[recipe.optimizer](model.parameters(), **options)
    )
    random = np.random.default_rng([job.seed, 1])
    step = 0
    steps = recipe.epochs * -(-len(job.rows) // recipe.batch_size)
    for _ in range(recipe.epochs):
        for batch in torch.as_tensor(random.permutation(job.rows)).split(recipe.batch_size):
            left = 1 - step / steps
            factor = {"constant": 1.0, "linear": left, "cosine": 0.5 + 0.5 * np.cos(np.pi * step / steps)}[
                recipe.schedule
            ]
            optimizer.param_groups[0]["lr"] = recipe.learning_rate * factor
            optimizer.zero_grad()
            F.cross_entropy(model(INPUTS[batch]), LABELS[batch]).backward()
            optimizer.step()
            step += 1
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


@pytest.mark.parametrize(
    "recipe",
    [
        RECIPE,
        replace(RECIPE, optimizer="adamw", weight_decay=0.1, schedule="cosine"),
        replace(RECIPE, optimizer="sgd", momentum=0.9, weight_decay=0.01, schedule="linear"),
        replace(RECIPE, optimizer="sgd"),
    ],
    ids=["adam", "adamw", "momentum", "sgd"],
)
def test_trainer_ensemble_equals_single_trainings(recipe: Recipe) -> None:
    wanted = jobs(4)
    together = EnsembleTrainer(fresh, ROWS, cross_entropy, recipe)(wanted)
    for number, job in enumerate(wanted):
        torch.testing.assert_close(
            member(together, number), trained_alone(job, recipe), rtol=1e-9, atol=1e-10
        )


@pytest.mark.long
def test_trainer_unequal_sizes_with_as_many_steps_are_trained_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[int] = []
    trained = EnsembleTrainer._trained

    def counted(self: EnsembleTrainer, jobs: Sequence[Job]) -> Members:
        calls.append(len(jobs))
        return trained(self, jobs)

    monkeypatch.setattr(EnsembleTrainer, "_trained", counted)
    wanted = [jobs(1, size, size)[0] for size in (22, 28, 25, 29)]
    result = EnsembleTrainer(fresh, ROWS, cross_entropy, replace(RECIPE, epochs=26))(wanted)
    assert calls == [3, 1]
    for number, job in enumerate(wanted):
        alone = trained_alone(job, replace(RECIPE, epochs=26))
        torch.testing.assert_close(member(result, number), alone, rtol=1e-8, atol=1e-9)


def test_trainer_frozen_parameters_stay() -> None:
    def half_frozen(seed: int) -> nn.Module:
        model = fresh(seed)
        for parameter in model[0].parameters():  # type: ignore[index]
            parameter.requires_grad_(False)
        return model

    result = EnsembleTrainer(half_frozen, ROWS, cross_entropy, RECIPE)(jobs(2))
    start = fresh_model(half_frozen, 100)
    torch.testing.assert_close(result.state["0.weight"][0], start[0].weight, rtol=0, atol=0)  # type: ignore[index]
    assert not torch.allclose(result.state["2.weight"][0], start[2].weight)  # type: ignore[index]


def test_trainer_diverged_model_refused() -> None:
    wanted = jobs(3)
    inputs = INPUTS.clone()
    inputs[39] = torch.inf
    wanted = [replace(job, rows=np.arange(25)) for job in wanted]
    wanted[1] = replace(wanted[1], rows=np.arange(15, 40))
    with pytest.raises(InfluenceError, match=r"subset 1 diverged in epoch 0.*\(1 of the 3 models") as caught:
        EnsembleTrainer(fresh, LoadedRows((inputs,), LABELS), cross_entropy, RECIPE)(wanted)
    assert "learning_rate" in str(caught.value)


def test_trainer_batch_norm_refused() -> None:
    with pytest.raises(ModelError, match="layer 1: batch normalisation") as caught:
        EnsembleTrainer(
            lambda seed: nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3)).double(),
            ROWS,
            cross_entropy,
            RECIPE,
        )(jobs(1))
    assert "influence.evaluate.train.function" in str(caught.value)


def test_trainer_dropout_in_training_only() -> None:
    def dropping(seed: int) -> nn.Module:
        return nn.Sequential(nn.Linear(6, 30), nn.Dropout(0.5), nn.Linear(30, 3)).double()

    result = EnsembleTrainer(dropping, ROWS, cross_entropy, RECIPE)(jobs(2))
    np.testing.assert_array_equal(result.measured(ROWS, cross_entropy), result.measured(ROWS, cross_entropy))
    plain = EnsembleTrainer(
        lambda seed: nn.Sequential(*[dropping(seed)[0], nn.Linear(30, 3).double()]),
        ROWS,
        cross_entropy,
        RECIPE,
    )(jobs(2))  # type: ignore[index]
    assert not torch.allclose(result.state["0.weight"], plain.state["0.weight"])


def test_trainer_measurements_of_members() -> None:
    result = EnsembleTrainer(fresh, ROWS, cross_entropy, RECIPE)(jobs(3))
    measured = result.measured(ROWS, cross_entropy)
    assert measured.shape == (3, 40)
    assert measured.dtype == np.float64
    for number in range(3):
        with torch.no_grad():
            state = {name: value[number] for name, value in result.state.items()}
            said = torch.func.functional_call(result.model, state, (INPUTS,))
        np.testing.assert_allclose(
            measured[number], F.cross_entropy(said, LABELS, reduction="none").numpy(), rtol=1e-12
        )


# -- a function of the user's --------------------------------------------------------------------------------


def test_trainer_training_function_arguments() -> None:
    seen: list[tuple[Any, ...]] = []

    def train(
        model: nn.Module, inputs: Sequence[torch.Tensor], target: torch.Tensor | None, seed: int
    ) -> nn.Module:
        assert model.training
        assert torch.is_grad_enabled()
        seen.append((inputs[0], target, seed))
        return model

    wanted = [Job("a", np.array([3, 5]), 7), Job("b", np.array([0]), 8)]
    result = FunctionTrainer(fresh, ROWS, train)(wanted)
    assert [seed for _, _, seed in seen] == [7, 8]
    assert torch.equal(seen[0][0], INPUTS[[3, 5]])
    assert torch.equal(seen[0][1], LABELS[[3, 5]])
    assert torch.equal(seen[1][1], LABELS[[0]])
    torch.testing.assert_close(
        result.state["0.weight"][1], fresh_model(fresh, 8)[0].weight.detach(), rtol=0, atol=0
    )  # type: ignore[index]
    assert not result.model.training


def test_trainer_other_model_shape_refused() -> None:
    with pytest.raises(ModelError, match="number 1 has other weights"):
        Members.of([nn.Linear(3, 2), nn.Linear(3, 4)])


# -- newton --------------------------------------------------------------------------------------------------

DECAY = 0.01
NEWTON = Recipe(optimizer="newton", weight_decay=DECAY)


def linear(seed: int) -> nn.Module:
    return nn.Linear(6, 3).double()


def test_trainer_newton_minimum_with_weight_decay() -> None:
    """The same as by numpy, whichever rows are left out."""
    whole = SoftmaxRegression.of(INPUTS, LABELS, DECAY)
    everything = np.arange(40)
    wanted = [
        Job("all", everything, 0),
        *(Job(f"without {row}", np.delete(everything, row), 0) for row in (0, 17, 39)),
    ]
    result = EnsembleTrainer(linear, ROWS, cross_entropy, NEWTON)(wanted)
    for number, problem in enumerate([whole, *(whole.without(row) for row in (0, 17, 39))]):
        np.testing.assert_allclose(
            member(result, number).numpy(), flattened(problem.solve()), rtol=0, atol=1e-8
        )


@pytest.mark.parametrize(
    ("model", "recipe", "words"),
    [
        (linear, replace(NEWTON, weight_decay=0.0), "not positive definite"),
        (fresh, replace(NEWTON, weight_decay=1e-6), "not positive definite"),
        (lambda seed: nn.Linear(6, 3), NEWTON, "did not find the minimum of subset 0"),
        (lambda seed: nn.Linear(6, 1000).double(), NEWTON, "asked to train 7,000 parameters"),
    ],
    ids=["no decay", "not convex", "float32", "large"],
)
def test_trainer_newton_refused(model: Any, recipe: Recipe, words: str) -> None:
    rows = LoadedRows((INPUTS.to(next(model(0).parameters()).dtype),), LABELS)
    with pytest.raises(InfluenceError, match=words) as caught:
        EnsembleTrainer(model, rows, cross_entropy, recipe)(jobs(1))
    assert "hint: set" in str(caught.value)
