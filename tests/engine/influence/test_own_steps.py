"""A training run by a step of the user's: its end and its derivatives are those of the built-in recipe, and
finite differences of training again; a step that can't be computed again, or differentiated, is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.func import grad as torch_grad

from psgrad.engine.influence.own_steps import OwnSteps
from psgrad.engine.influence.training_run import TrainingRun
from psgrad.engine.transforms import grad, vmap
from psgrad.errors import InfluenceError, ModelError
from tests.engine.influence.test_training_run import (
    RECIPES,
    ROWS,
    derivatives,
    fresh,
    losses_of,
    run_of,
)

pytestmark = pytest.mark.usefixtures("on_device")

MODEL = fresh(0)
RATE, DECAY, MOMENTUM = 0.05, 0.01, 0.9
Step = Callable[..., Any]


def mean_loss(params: Any, batch: Any, weights: torch.Tensor) -> torch.Tensor:
    inputs, labels = batch
    output = functional_call(MODEL, params, (inputs,))
    return (weights * nn.functional.cross_entropy(output, labels, reduction="none")).mean()


def sgd(params: Any, state: Any, batch: Any, weights: torch.Tensor, by: Any = torch_grad) -> Any:
    """RECIPES["sgd"] by hand."""
    gradients = by(mean_loss)(params, batch, weights)
    return {name: p - 0.1 * (gradients[name] + DECAY * p) for name, p in params.items()}, state


def adam_state(params: Any) -> Any:
    zeros = {name: torch.zeros_like(p) for name, p in params.items()}
    return {"count": torch.zeros((), dtype=torch.int64), "moments": [zeros, dict(zeros)]}


def adam(params: Any, state: Any, batch: Any, weights: torch.Tensor) -> Any:
    """RECIPES["adam"] by hand, with a count and a list in its state."""
    gradients = torch_grad(mean_loss)(params, batch, weights)
    count, moved, means, squares = state["count"] + 1, {}, {}, {}
    steps = count.to(weights.dtype)
    for name, p in params.items():
        gradient = gradients[name] + DECAY * p
        means[name] = 0.9 * state["moments"][0][name] + 0.1 * gradient
        squares[name] = 0.999 * state["moments"][1][name] + 0.001 * gradient.square()
        corrected = squares[name] / (1 - 0.999**steps)
        root = torch.where(corrected > 0, torch.where(corrected > 0, corrected, 1.0).sqrt(), 0.0)
        moved[name] = p - 0.02 * (means[name] / (1 - 0.9**steps)) / (root + 1e-8)
    return moved, {"count": count, "moments": [means, squares]}


def of_step(step: Step, state: Any = None, recipe: str = "sgd", **changes: Any) -> TrainingRun:
    own = OwnSteps("train.py:step", step, state)
    return replace(run_of(RECIPES[recipe]), own=own, **changes)


CASES: dict[str, tuple[Step, Any, str]] = {
    "sgd, torch.func": (sgd, None, "sgd"),
    "sgd, psgrad": (partial(sgd, by=grad), None, "sgd"),
    "adam": (adam, adam_state, "adam"),
}


@pytest.mark.sweep
@pytest.mark.parametrize("name", CASES)
def test_own_step_is_the_recipe_of_the_same_optimiser(name: str) -> None:
    step, state, recipe = CASES[name]
    own, recipes = of_step(step, state, recipe), run_of(RECIPES[recipe])
    for parameter, value in recipes.final.items():
        torch.testing.assert_close(own.final[parameter], value, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(derivatives(own), derivatives(recipes), rtol=1e-10, atol=1e-12)


@pytest.mark.long
@pytest.mark.every(2)
@pytest.mark.parametrize("name", ["sgd, torch.func", "adam"])
def test_own_step_derivatives_are_finite_differences_of_retraining(name: str) -> None:
    run, change = of_step(*CASES[name]), 1e-5
    found = derivatives(run)
    changes = change * torch.cat([torch.eye(ROWS), -torch.eye(ROWS)]).double()
    losses = vmap(partial(losses_of, run))(run.retrained(1 + changes))
    expected = (losses[:ROWS] - losses[ROWS:]).T / (2 * change)
    assert expected.abs().max() > 1e-3
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-8)


@pytest.mark.long
def test_own_step_retrained_is_a_plain_loop() -> None:
    """Without transforms: the step called with other weights, one by one."""
    run, weights = of_step(sgd), torch.ones(1, ROWS).double()
    weights[0, 5] = 0.3
    params: Any = run.initial
    inputs, labels = run.rows.inputs[0], run.rows.target
    assert labels is not None
    for batch in run.batches:
        params, _ = sgd(params, {}, (inputs[batch], labels[batch]), weights[0, batch])
    for name, value in run.retrained(weights).items():
        torch.testing.assert_close(value[0], params[name], rtol=1e-12, atol=1e-14)


@pytest.mark.long
def test_own_step_with_weights_that_are_normalised() -> None:
    """A step that is not linear in the weights."""

    def normalised(params: Any, state: Any, batch: Any, weights: torch.Tensor) -> Any:
        return sgd(params, state, batch, weights / weights.sum() * len(weights))

    run, change = of_step(normalised), 1e-5
    found = derivatives(run)
    changes = change * torch.cat([torch.eye(ROWS), -torch.eye(ROWS)]).double()
    losses = vmap(partial(losses_of, run))(run.retrained(1 + changes))
    torch.testing.assert_close(found, (losses[:ROWS] - losses[ROWS:]).T / (2 * change), rtol=1e-5, atol=1e-8)
    assert not torch.allclose(found, derivatives(of_step(sgd)), rtol=0.1)


@pytest.mark.long
def test_own_step_that_draws_by_a_seed_and_a_count() -> None:
    """The same noise each time: the derivative does not notice it in a linear update."""

    def noisy(params: Any, state: Any, batch: Any, weights: torch.Tensor) -> Any:
        generator = torch.Generator().manual_seed(int(state["count"]))
        moved, _ = sgd(params, {}, batch, weights)
        noise = {name: torch.randn(p.shape, generator=generator, dtype=p.dtype) for name, p in params.items()}
        return {name: p + 1e-3 * noise[name] for name, p in moved.items()}, {"count": state["count"] + 1}

    def counted(params: Any) -> Any:
        return {"count": torch.zeros((), dtype=torch.int64)}

    run, change = of_step(noisy, counted), 1e-5
    assert not torch.equal(run.final["0.bias"], of_step(sgd).final["0.bias"])
    weights = torch.ones(2, ROWS).double()
    weights[0, 3] += change
    weights[1, 3] -= change
    losses = vmap(partial(losses_of, run))(run.retrained(weights))
    expected = (losses[0] - losses[1]) / (2 * change)
    torch.testing.assert_close(derivatives(run)[:, 3], expected, rtol=1e-5, atol=1e-8)


@pytest.mark.long
def test_loader_with_rows_that_come_twice() -> None:
    """Batches with replacement: the derivative is by the one weight of a row."""

    def loader(rows: int, seed: int) -> list[torch.Tensor]:
        random = torch.Generator().manual_seed(seed)
        return list(torch.randint(0, 5, (8, 6), generator=random))

    run, change = replace(run_of(RECIPES["momentum"]), loader=loader), 1e-5
    assert len(run.batches[0]) > len(run.batches[0].unique())
    found = derivatives(run)
    changes = change * torch.cat([torch.eye(ROWS), -torch.eye(ROWS)]).double()
    losses = vmap(partial(losses_of, run))(run.retrained(1 + changes))
    torch.testing.assert_close(found, (losses[:ROWS] - losses[ROWS:]).T / (2 * change), rtol=1e-5, atol=1e-8)
    assert (found[:, :5] != 0).all()
    assert (found[:, 5:] == 0).all()


# -- refusals ------------------------------------------------------------------------------------------------


def alone(params: Any, state: Any, batch: Any, weights: torch.Tensor) -> Any:
    return sgd(params, state, batch, weights)[0]


def fewer(params: Any, state: Any, batch: Any, weights: torch.Tensor) -> Any:
    moved, _ = sgd(params, state, batch, weights)
    return {name: p for name, p in moved.items() if name != "0.bias"}, state


def grown(params: Any, state: Any, batch: Any, weights: torch.Tensor) -> Any:
    return sgd(params, state, batch, weights)[0], {**state, "new": weights.sum()}


def reshaped(params: Any, state: Any, batch: Any, weights: torch.Tensor) -> Any:
    moved, _ = sgd(params, state, batch, weights)
    return {**moved, "0.bias": moved["0.bias"][None]}, state


def narrowed(params: Any, state: Any, batch: Any, weights: torch.Tensor) -> Any:
    return sgd(params, {}, batch, weights)[0], {"mean": state["mean"].float()}


def unweighted(params: Any, state: Any, batch: Any, weights: torch.Tensor) -> Any:
    return sgd(params, state, batch, torch.ones_like(weights))


def cut_off(params: Any, state: Any, batch: Any, weights: torch.Tensor) -> Any:
    with torch.no_grad():
        return sgd(params, state, batch, weights)


def in_place(params: Any, state: Any, batch: Any, weights: torch.Tensor) -> Any:
    gradients = torch_grad(mean_loss)(params, batch, weights)
    for name, p in params.items():
        p -= RATE * gradients[name]
    return params, state


def dropping(params: Any, state: Any, batch: Any, weights: torch.Tensor) -> Any:
    return sgd(params, state, (nn.functional.dropout(batch[0], 0.5), batch[1]), weights)


def with_autograd(params: Any, state: Any, batch: Any, weights: torch.Tensor) -> Any:
    leaves = {name: p.detach().requires_grad_() for name, p in params.items()}
    gradients = torch.autograd.grad(mean_loss(leaves, batch, weights), list(leaves.values()))
    return {name: p - RATE * g for (name, p), g in zip(params.items(), gradients, strict=True)}, state


def mean_state(params: Any) -> Any:
    return {"mean": torch.zeros(3, dtype=torch.float64)}


REFUSED: dict[str, tuple[Step, Any, list[str]]] = {
    "alone": (alone, None, ["returned an object of type dict", "end it with `return params, state`"]),
    "fewer": (fewer, None, ["returned parameters without 0.bias", "return a dict with all names"]),
    "grown": (grown, None, ["returned a state of another structure", "influence.training.state"]),
    "reshaped": (
        reshaped,
        None,
        ["was given the parameter 0.bias as float64 [8] and returned it as float64 [1, 8]", "stay the same"],
    ),
    "narrowed": (
        narrowed,
        mean_state,
        ["was given number 0 of its state as float64 [3] and returned it as float32 [3]", "stay the same"],
    ),
    "unweighted": (unweighted, None, ["does not use the weights of its examples", "multiply the losses"]),
    "no_grad": (cut_off, None, ["does not use the weights of its examples", "torch.no_grad()"]),
    "in place": (in_place, None, ["writes into the tensors that it is given", "p - rate * g"]),
    "random": (dropping, None, ["can't be computed again: the first step, run twice", "draw by a generator"]),
    "autograd": (
        with_autograd,
        None,
        ["can't be differentiated: torch.autograd or .backward()", "by torch.func.grad"],
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_own_step_refused(name: str) -> None:
    step, state, words = REFUSED[name]
    with pytest.raises(ModelError) as caught:
        _ = of_step(step, state).final
    assert "the training step train.py:step" in caught.value.message
    for word in words:
        assert word in str(caught.value)
    assert caught.value.hint


def test_own_step_that_is_another_one_later_refused() -> None:
    """The first step runs twice alike, and the whole run does not."""
    factor = [1.0]

    def wandering(params: Any, state: Any, batch: Any, weights: torch.Tensor) -> Any:
        assert len(weights.detach().nonzero())  # a shape that depends on data: the step is not captured
        return sgd(params, state, batch, weights * factor[0])

    run = of_step(wandering)
    _ = run.final
    factor[0] = 0.9
    with pytest.raises(InfluenceError, match=r"computed again, ends .* times as far") as caught:
        derivatives(run)
    assert caught.value.hint


def test_first_state_of_a_python_number_refused() -> None:
    with pytest.raises(ModelError, match=r"first state .* has a value of type int") as caught:
        _ = of_step(sgd, lambda params: {"count": 0}).final
    assert caught.value.hint


@pytest.mark.long
def test_own_step_with_a_first_rate_of_zero() -> None:
    """A warm-up: the weights act from the second step on."""

    def warm(params: Any, state: Any, batch: Any, weights: torch.Tensor) -> Any:
        gradients = torch_grad(mean_loss)(params, batch, weights)
        rate = 0.01 * state["count"]
        return {name: p - rate * gradients[name] for name, p in params.items()}, {"count": state["count"] + 1}

    run = of_step(warm, lambda params: {"count": torch.zeros(())})
    assert (derivatives(run)[:, run.batches[1]] != 0).all()
