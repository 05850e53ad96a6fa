"""How well the damping that a network's fit chooses ranks retraining, on digits.

    python benchmarks/influence_damping.py [--only NAME ...] [--json FILE]

Perceptrons 64-16-10 on 300 training digits, by several recipes: trained to the end, and stopped early. The
truth is that of `psgrad influence --evaluate lds`: 60 random halves, two models trained on each, the loss of
100 queries. For each damping, in mean eigenvalues: the linear datamodeling score (LDS), and the agreement by
which it is chosen. The bar: the chosen damping is never more than .005 below the default.
"""

from __future__ import annotations

import os
import time
from typing import Any

import numpy as np
import torch
from influence_ours import cross_entropy, examples
from script import command_line, write_json
from torch import nn

from psgrad.engine.influence.damping import Damping
from psgrad.engine.influence.damping_choice import AGREES, RemovalTrial
from psgrad.engine.influence.evaluation.jobs import Job, LoadedRows, Recipe
from psgrad.engine.influence.evaluation.metrics import lds_mean, random_subsets, rows_of
from psgrad.engine.influence.evaluation.retraining import EnsembleTrainer
from psgrad.engine.influence.method import Checkpoint
from psgrad.engine.influence.methods.influence import Influence

ROWS, QUERIES, SUBSETS, SEEDS = 300, 100, 60, 2
GRID = (0.03, 0.1, 0.3, 1.0, 10**0.5, 10.0, 10**1.5, 100.0)
SGD: dict[str, Any] = {
    "batch_size": 32,
    "learning_rate": 0.05,
    "schedule": "cosine",
    "momentum": 0.9,
    "weight_decay": 1e-4,
}
ADAM: dict[str, Any] = {"batch_size": 32, "learning_rate": 0.01, "schedule": "cosine"}
CASES: dict[str, tuple[Recipe, float]] = {  # the recipe, and the share of the labels that are drawn at random
    "sgd, 60 epochs": (Recipe("sgd", epochs=60, **SGD), 0.0),
    "sgd, 15 epochs": (Recipe("sgd", epochs=15, **SGD), 0.0),
    "sgd, 8 epochs": (Recipe("sgd", epochs=8, **SGD), 0.0),
    "sgd, 4 epochs": (Recipe("sgd", epochs=4, **SGD), 0.0),
    "sgd, 2 epochs": (Recipe("sgd", epochs=2, **SGD), 0.0),
    "sgd, weight decay .01": (Recipe("sgd", epochs=60, **SGD | {"weight_decay": 0.01}), 0.0),
    "sgd, a fifth of the labels": (Recipe("sgd", epochs=60, **SGD), 0.2),
    "sgd, half of the labels": (Recipe("sgd", epochs=60, **SGD), 0.5),
    "sgd, 10 epochs, a third": (Recipe("sgd", epochs=10, **SGD), 0.3),
    "adam, 60 epochs": (Recipe("adam", epochs=60, **ADAM), 0.0),
    "adam, 5 epochs": (Recipe("adam", epochs=5, **ADAM), 0.0),
}


def perceptron(seed: int = 0) -> nn.Module:
    """Its weights are drawn from torch's generator, which the trainer seeds."""
    return nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))


def data(noise: float) -> tuple[LoadedRows, LoadedRows]:
    """Training rows, of which a share has a random label, and queries."""
    from sklearn.datasets import load_digits

    digits, random = load_digits(), np.random.default_rng(0)
    order = random.permutation(len(digits.data))[: ROWS + QUERIES]
    inputs = torch.as_tensor(digits.data[order] / 16).float()
    labels = torch.as_tensor(digits.target[order])
    drawn = torch.as_tensor(random.random(ROWS) < noise)
    target = torch.where(drawn, torch.as_tensor(random.integers(0, 10, ROWS)), labels[:ROWS])
    return LoadedRows((inputs[:ROWS],), target), LoadedRows((inputs[ROWS:],), labels[ROWS:])


def measured(recipe: Recipe, noise: float) -> dict[str, Any]:
    """LDS and agreement for each damping, and what is chosen."""
    training, queries = data(noise)
    assert training.target is not None
    assert queries.target is not None
    subsets = random_subsets(ROWS, SUBSETS, 0.5, np.random.default_rng(1))
    jobs = [
        Job(f"{place}, {seed}", rows, 1000 + place * SEEDS + seed)
        for place, rows in enumerate(rows_of(subsets))
        for seed in range(SEEDS)
    ]
    train = EnsembleTrainer(perceptron, training, cross_entropy, recipe)
    outcomes = train(jobs).measured(queries, cross_entropy).reshape(SUBSETS, SEEDS, -1)
    whole = train([Job("whole", np.arange(ROWS), 0)])
    model = perceptron().double()
    model.load_state_dict({name: value[0].double() for name, value in whole.state.items()})
    rows = examples(model, training.inputs[0].double(), training.target)
    asked = examples(model, queries.inputs[0].double(), queries.target)
    decay = recipe.weight_decay
    begun = time.process_time()
    default: Any = Influence(weight_decay=decay, relative_damping=1.0).fit(rows, Checkpoint())
    fitted = time.process_time()
    chosen = Influence(weight_decay=decay).fit(rows, Checkpoint())
    with_choice = time.process_time()
    fits = {f"{each:.3g}": default.damped(Damping(None, each)) for each in GRID}
    scores = {
        name: lds_mean(torch.cat([block.scores for block in fit.scores(asked)]).numpy(), subsets, outcomes)
        for name, fit in fits.items()
    }
    trial = RemovalTrial(rows, decay)
    name = f"{chosen.facts.relative_damping:.3g}"
    return {
        "lds": scores,
        "agreement": {name: trial.agreement(fit) for name, fit in fits.items()},
        "chosen": name,
        "gain": scores[name] - scores["1"],
        "fit_seconds": fitted - begun,
        "fit_with_choice_seconds": with_choice - fitted,
    }


def main() -> None:
    arguments = command_line(__doc__.splitlines()[0], only=CASES).parse_args()
    content: dict[str, Any] = {"agrees": AGREES, "cases": {}}
    print(f"{'':<28}" + "".join(f"{each:>7.3g}" for each in GRID) + "   chosen   gain")
    for name in arguments.only:
        found = measured(*CASES[name])
        content["cases"][name] = found
        for what in ("lds", "agreement"):
            numbers = "".join(f"{each:>7.3f}" for each in found[what].values())
            end = f"{found['chosen']:>9}{found['gain']:>+7.3f}" if what == "lds" else ""
            print(f"{name if what == 'lds' else '    agreement':<28}{numbers}{end}", flush=True)
    worst = min(found["gain"] for found in content["cases"].values())
    content |= {"worst": worst, "torch": torch.__version__, "load": os.getloadavg()[0]}
    print(f"{'pass' if worst >= -0.005 else 'FAIL'}: at most .005 below the default ({worst:+.3f})")
    write_json(arguments, content)


if __name__ == "__main__":
    main()
