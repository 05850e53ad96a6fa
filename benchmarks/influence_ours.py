"""psgrad's influence scores of a Problem of influence_contenders.py, as its engine computes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from influence_contenders import Problem
from torch import Tensor

from psgrad.engine.execution.examples import Examples
from psgrad.engine.execution.objective import Objective
from psgrad.engine.influence.method import Checkpoint, Fitted, Method
from psgrad.engine.influence.ranking import joined_scores
from psgrad.ragged import Block

Criterion = Callable[[Tensor, Tensor], Tensor]


def cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    """Of one sample: logits [classes], label []."""
    return F.cross_entropy(output[None], target[None])


def examples(
    model: torch.nn.Module,
    inputs: Tensor,
    target: Tensor,
    criterion: Criterion = cross_entropy,
    **options: Any,
) -> Examples:
    """These rows as `model` sees them, its parameters as they now are. Options are the Stream's."""
    objective = Objective(model, criterion)
    objective.params = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    return Examples(objective, Block((inputs,), target), options)


def fitted(
    problem: Problem, method: Method, criterion: Criterion = cross_entropy, **options: Any
) -> tuple[list[Fitted], list[Examples]]:
    """The method at each checkpoint, and the queries there with `criterion` as their measurement."""
    fits, queries = [], []
    for number in range(len(problem.checkpoints)):
        model = problem.load(number)
        training = examples(model, problem.inputs, problem.target, **options)
        fits.append(
            method.fit(
                training,
                Checkpoint(
                    number,
                    problem.learning_rates[number] if problem.states else 1.0,
                    of=len(problem.checkpoints),
                ),
            )
        )
        queries.append(examples(model, problem.query_inputs, problem.query_target, criterion, **options))
    return fits, queries


def scores(problem: Problem, method: Method, criterion: Criterion = cross_entropy, **options: Any) -> Tensor:
    """[n, m] float64."""
    blocks = joined_scores(method, *fitted(problem, method, criterion, **options))
    return torch.cat([block.scores for block in blocks])
