"""Replays on random halves: scores are the mean, over the runs that an example is in, of finite differences
of loops of torch.optim on the half.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from psgrad.engine.execution.objective import Objective
from psgrad.engine.influence.evaluation.jobs import LoadedRows, Recipe
from psgrad.engine.influence.evaluation.retraining import fresh_model
from psgrad.engine.influence.method import Checkpoint
from psgrad.engine.influence.methods.replay import Replay, halves
from psgrad.engine.influence.training_run import TrainingRun, training_batches
from psgrad.errors import ConfigError
from tests.engine.influence.problems import classified, cross_entropy, examples

ROWS, SEED, RATE = 9, 3, 0.1
RECIPE = Recipe("sgd", epochs=3, batch_size=2, learning_rate=RATE)


def fresh(seed: int) -> nn.Module:
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).double()


def parameters(seed: int) -> dict[str, torch.Tensor]:
    return {name: value.detach() for name, value in fresh_model(fresh, seed).named_parameters()}


def losses_after(rows: torch.Tensor, weights: torch.Tensor, seed: int) -> torch.Tensor:
    """[m]: the losses of the queries after a loop of torch.optim over these rows, with weights [k]."""
    inputs, labels = classified(ROWS, (5,))
    model = fresh_model(fresh, seed)
    optimiser = torch.optim.SGD(model.parameters(), lr=RATE)
    for batch in training_batches(len(rows), epochs=RECIPE.epochs, batch_size=2, seed=seed):
        chosen = rows[batch]
        losses = nn.functional.cross_entropy(model(inputs[chosen]), labels[chosen], reduction="none")
        optimiser.zero_grad()
        (weights[batch] * losses).mean().backward()
        optimiser.step()
    return nn.functional.cross_entropy(model(inputs[:2]), labels[:2], reduction="none").detach()


@pytest.mark.sweep
@pytest.mark.parametrize("runs", [2, 3])
def test_replay_runs_are_averaged(runs: int) -> None:
    inputs, labels = classified(ROWS, (5,))
    model = fresh_model(fresh, SEED)
    objective = Objective(model, cross_entropy)
    run = TrainingRun(
        objective, LoadedRows((inputs,), labels), RECIPE, SEED, objective.params, fresh=parameters
    )
    training, queries = (
        examples(model, cross_entropy, inputs, labels),
        examples(model, cross_entropy, inputs[:2], labels[:2]),
    )
    fitted = Replay(subsets=0, runs=runs).fit(training, Checkpoint(run=run))
    scores = torch.cat([block.scores[""] for block in fitted.scores(queries)])

    total, counts, step = torch.zeros(ROWS, 2, dtype=torch.float64), torch.zeros(ROWS, 1), 1e-5
    for number, rows in enumerate(halves(ROWS, runs, SEED)):
        for place, row in enumerate(rows.tolist()):
            change = step * torch.eye(len(rows)).double()[place]
            more, less = (losses_after(rows, 1 + sign * change, SEED + 1 + number) for sign in (1, -1))
            total[row] -= (more - less) / (2 * step)
            counts[row] += 1
    torch.testing.assert_close(scores, total / counts, rtol=1e-5, atol=1e-9)


def test_replay_halves_in_pairs_have_all_rows() -> None:
    found = [rows.tolist() for rows in halves(9, 4, 0)]
    assert [sorted(one + other) for one, other in (found[:2], found[2:])] == [list(range(9))] * 2
    assert found[0] != found[2]
    assert np.ptp([len(rows) for rows in found]) == 1


def test_replay_without_runs_refused() -> None:
    with pytest.raises(ConfigError, match="0 runs have no scores"):
        Replay(runs=0)
