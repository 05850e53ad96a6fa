"""A training run that is computed again: its end is that of the built-in trainer, which steps with
torch.optim, and its derivatives by the examples' weights are finite differences of runs with other weights.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from psgrad.engine.execution.objective import Objective
from psgrad.engine.influence.evaluation.jobs import Job, LoadedRows, Recipe
from psgrad.engine.influence.evaluation.retraining import EnsembleTrainer, fresh_model
from psgrad.engine.influence.training_run import TrainingRun, training_batches
from psgrad.engine.transforms import vmap
from psgrad.errors import InfluenceError

pytestmark = pytest.mark.usefixtures("on_device")

ROWS, QUERIES, SEED = 41, 4, 3
RECIPES = {
    "sgd": Recipe("sgd", epochs=4, batch_size=16, learning_rate=0.1, weight_decay=0.01),
    "momentum": Recipe("sgd", epochs=4, batch_size=16, learning_rate=0.05, momentum=0.9, schedule="linear"),
    "adam": Recipe("adam", epochs=4, batch_size=16, learning_rate=0.02, weight_decay=0.01),
    "adamw": Recipe(
        "adamw", epochs=4, batch_size=16, learning_rate=0.02, weight_decay=0.1, schedule="cosine"
    ),
}


def fresh(seed: int) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def rows_of(count: int, seed: int) -> LoadedRows:
    """Labelled rows whose first input is always zero, so that the first column's gradients are."""
    random = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, 6, dtype=torch.float64, generator=random)
    inputs[:, 0] = 0
    return LoadedRows((inputs,), torch.randint(0, 3, (count,), generator=random))


ASKED = rows_of(QUERIES, 1)


def run_of(recipe: Recipe, kept: int | None = None) -> TrainingRun:
    objective = Objective(fresh_model(fresh, SEED), nn.functional.cross_entropy)
    return TrainingRun(objective, rows_of(ROWS, 0), recipe, SEED, objective.params, kept)


def losses_of(run: TrainingRun, params: Any) -> torch.Tensor:
    """[m]: the losses of the queries."""
    each = vmap(lambda *sample: run.objective.loss(*sample)[0], in_dims=(None, 0, 0))
    return each(params, ASKED.inputs, ASKED.target)


def derivatives(run: TrainingRun) -> torch.Tensor:
    """[m, n] of the queries' losses, their own derivatives taken by PyTorch's autograd."""
    leaves = {name: value.clone().requires_grad_() for name, value in run.final.items()}
    model = fresh_model(fresh, SEED)
    losses = nn.functional.cross_entropy(
        torch.func.functional_call(model, leaves, ASKED.inputs), ASKED.target, reduction="none"
    )
    each = [torch.autograd.grad(loss, list(leaves.values()), retain_graph=True) for loss in losses]
    cotangents = {name: torch.stack([one[place] for one in each]) for place, name in enumerate(leaves)}
    return run.weight_derivatives(cotangents)


@pytest.mark.long
@pytest.mark.parametrize("name", RECIPES)
def test_training_run_ends_where_torch_optim_does(name: str) -> None:
    run = run_of(RECIPES[name])
    trainer = EnsembleTrainer(fresh, run.rows, nn.functional.cross_entropy, RECIPES[name])
    members = trainer([Job("whole", np.arange(ROWS), SEED)])
    for parameter, value in run.final.items():
        torch.testing.assert_close(value, members.state[parameter][0], rtol=1e-10, atol=1e-12)


@pytest.mark.long
@pytest.mark.every(2)
@pytest.mark.parametrize("name", RECIPES)
def test_weight_derivatives_are_finite_differences_of_retraining(name: str) -> None:
    run, step = run_of(RECIPES[name]), 1e-5
    found = derivatives(run)
    assert found.shape == (QUERIES, ROWS)
    changes = step * torch.cat([torch.eye(ROWS), -torch.eye(ROWS)]).double()
    losses = vmap(partial(losses_of, run))(run.retrained(1 + changes))
    expected = (losses[:ROWS] - losses[ROWS:]).T / (2 * step)
    assert expected.abs().max() > 1e-3
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-8)


@pytest.mark.sweep
@pytest.mark.parametrize("kept", [2, 3, 5])
def test_weight_derivatives_with_few_states_kept(kept: int) -> None:
    torch.testing.assert_close(
        derivatives(run_of(RECIPES["adam"], kept)), derivatives(run_of(RECIPES["adam"])), rtol=0, atol=0
    )


def test_steps_come_in_reverse_order_with_few_states() -> None:
    """Two levels of three states for nine steps."""
    run = run_of(RECIPES["sgd"], 3)
    found = list(run._backward(run.start, 0, 9))
    assert [step for step, _ in found] == list(range(8, -1, -1))
    point = run.start
    for step, before in reversed(found):
        assert all(torch.equal(value, point.params[name]) for name, value in before.params.items())
        point = run._after(point, step)


@pytest.mark.long
def test_a_row_without_weight_is_left_out() -> None:
    """Its numbers do not matter then, and those of the others do."""
    run, weights = run_of(RECIPES["momentum"]), torch.ones(1, ROWS)
    weights[0, 5] = 0
    (inputs,) = run.rows.inputs
    changed = inputs.clone()
    changed[5] = 100
    other = TrainingRun(
        run.objective, LoadedRows((changed,), run.rows.target), run.recipe, run.seed, run.initial
    )
    for name, value in run.retrained(weights).items():
        torch.testing.assert_close(other.retrained(weights)[name], value, rtol=0, atol=0)
        assert not torch.equal(value[0], run.final[name])


def test_training_batches_have_each_row_once_an_epoch() -> None:
    batches = training_batches(10, epochs=3, batch_size=4, seed=1)
    assert [len(batch) for batch in batches] == [4, 4, 2] * 3
    for epoch in range(3):
        assert sorted(torch.cat(batches[3 * epoch : 3 * epoch + 3]).tolist()) == list(range(10))
    assert batches[0].tolist() != batches[3].tolist()


def test_training_run_that_diverges_is_an_error() -> None:
    run = run_of(Recipe("sgd", epochs=60, batch_size=16, learning_rate=1e200, weight_decay=1e200))
    with pytest.raises(InfluenceError, match=r"diverged.*not finite"):
        _ = run.final
