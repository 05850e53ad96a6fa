"""The damping that a network's fit chooses by removals of parts of its training set."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from psgrad.engine.execution.examples import Examples
from psgrad.engine.influence import damping_choice
from psgrad.engine.influence.fit_facts import FitFacts
from psgrad.engine.influence.method import Checkpoint
from psgrad.engine.influence.methods.influence import Influence
from tests.engine.influence.problems import (
    classified,
    cross_entropy,
    digits,
    examples,
    linear,
    mlp,
    trained_digits_mlp,
)


def few_digits(model: torch.nn.Module) -> Examples:
    inputs, labels, _, _ = digits()
    return examples(model, cross_entropy, inputs[:200], labels[:200])


def fitted_facts(training: Examples, method: Influence | None = None, **options: Any) -> FitFacts:
    fitted = (Influence() if method is None else method).fit(training, Checkpoint(**options))
    return fitted.facts


@pytest.mark.long
def test_damping_choice_of_trained_weights_is_the_default() -> None:
    facts = fitted_facts(few_digits(trained_digits_mlp()))
    assert facts.relative_damping == 1.0
    assert facts.damping == facts.mean_eigenvalue
    assert list(facts.damping_agreement) == ["1"]


def untrained() -> Examples:
    """After five steps of Adam, far from a minimum."""
    return few_digits(trained_digits_mlp(5))


@pytest.mark.long
def test_damping_choice_far_from_minimum_is_larger() -> None:
    facts = fitted_facts(untrained())
    tried = facts.damping_agreement
    assert tried is not None
    *refused, chosen = tried.values()
    assert len(refused) >= 1
    assert max(refused) < damping_choice.AGREES <= chosen
    relative = float(facts.relative_damping)
    assert f"{relative:.3g}" == list(tried)[-1]
    assert facts.damping == pytest.approx(relative * facts.mean_eigenvalue)
    again = fitted_facts(untrained(), Influence(relative_damping=relative))
    assert again.damping == pytest.approx(facts.damping)
    assert again.damping_agreement is None


def test_damping_choice_agreement_equals_autograd() -> None:
    """Predicted and actual changes by torch.func, with the same rows and parts."""
    training = untrained()
    trial = damping_choice.RemovalTrial(training, 0.01)
    fitted = Influence(relative_damping=3.0, weight_decay=0.01).fit(training, Checkpoint()).solver()
    assert fitted is not None
    model, count = training.objective.model, len(training)
    params = {name: value.detach() for name, value in model.named_parameters()}
    inputs, labels, _, _ = digits()

    def losses(params: dict[str, torch.Tensor], rows: list[int]) -> torch.Tensor:
        output = torch.func.functional_call(model, params, (inputs[rows],))
        return F.cross_entropy(output, labels[rows], reduction="none")

    def slope(rows: list[int], decay: float) -> dict[str, torch.Tensor]:
        found = torch.func.grad(lambda params: losses(params, rows).sum())(params)
        return {name: value + count * decay * params[name] for name, value in found.items()}

    generator = torch.Generator().manual_seed(0)
    parts = [torch.randperm(count, generator=generator)[: count // 16].tolist() for _ in range(8)]
    others = torch.randperm(count, generator=generator)[: count // 8].sort().values.tolist()

    def step(vectors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        found = fitted.precondition({name: value[None].double() for name, value in vectors.items()})
        return {name: value[0] for name, value in found.items()}

    base = step(slope(list(range(count)), 0.01))
    with_all = {name: params[name] - base[name] for name in params}
    predicted, actual = [], []
    jacobian = torch.func.jacrev(lambda params: losses(params, others))(params)
    for part in parts:
        move = step(slope(part, 0.0))
        predicted.append(sum((jacobian[name] * move[name]).flatten(1).sum(1) for name in params))
        without = {name: with_all[name] + move[name] for name in params}
        actual.append(losses(without, others) - losses(with_all, others))
    one, other = (np.stack([each.detach().numpy() for each in side]) for side in (predicted, actual))
    one, other = one - one.mean(0), other - other.mean(0)
    truth = (one * other).sum() / np.sqrt((one**2).sum() * (other**2).sum())
    assert trial.agreement(fitted) == pytest.approx(truth, rel=1e-8)
    assert abs(truth) < 0.999


@pytest.mark.parametrize("case", ["affine", "named", "several checkpoints"])
def test_damping_choice_left_out(case: str) -> None:
    """Of a convex problem, where the options name a damping, and of several checkpoints."""
    inputs, labels = classified(40)
    if case == "affine":
        model = linear(np.random.default_rng(0).normal(size=(3, 7)))
        facts = fitted_facts(examples(model, cross_entropy, inputs, labels), Influence(weight_decay=0.1))
    elif case == "named":
        facts = fitted_facts(examples(mlp(), cross_entropy, inputs, labels), Influence(relative_damping=1.0))
    else:
        facts = fitted_facts(examples(mlp(), cross_entropy, inputs, labels), of=3)
    assert facts.damping_agreement is None
    assert facts.damping_because is None


@pytest.mark.parametrize(
    ("rows", "solver", "words"),
    [(10, "exact", "fewer than"), (40, "conjugate_gradient", "which solver: conjugate_gradient does not")],
)
def test_damping_choice_untried(rows: int, solver: str, words: str) -> None:
    inputs, labels = classified(rows)
    training = examples(mlp(), cross_entropy, inputs, labels)
    facts = fitted_facts(training, Influence(solver=solver))
    assert words in str(facts.damping_because)
    assert facts.damping == pytest.approx(facts.mean_eigenvalue)
