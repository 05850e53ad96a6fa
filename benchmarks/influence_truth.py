"""What the quality benchmarks of influence share: the digits, the perceptron and its training, and what
retraining says of the queries.

The perceptron 64-64-10 is trained for 80 epochs of SGD with momentum, which brings all of the training rows
to their labels, by the trainer of `psgrad influence --evaluate`. Trained models are kept in a folder between
runs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from influence_contenders import Problem, State
from influence_ours import cross_entropy
from torch import nn

from psgrad.engine.influence.evaluation.jobs import Job, LoadedRows, Members, Recipe
from psgrad.engine.influence.evaluation.metrics import random_subsets, rows_of
from psgrad.engine.influence.evaluation.retraining import EnsembleTrainer

Array = np.ndarray[Any, Any]

RECIPE = Recipe(
    "sgd", epochs=80, batch_size=64, learning_rate=0.1, schedule="cosine", momentum=0.9, weight_decay=1e-4
)
QUERIES, TUNING_QUERIES = 360, 60
SUBSETS, SEEDS, TUNING_SUBSETS = 100, 3, 30
# The models that scores are of have the seeds 0 to 9, and retrained ones others.
MODELS, FIRST_SEED = 10, 1000


def perceptron(seed: int = 0) -> nn.Module:
    """In float32; its weights are drawn from torch's generator, which the trainer seeds."""
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


@dataclass(frozen=True)
class Outcomes:
    """Subsets [S, n] bool, and the loss of each query [S, R, m] by R models trained on each of them."""

    subsets: Array
    losses: Array


@dataclass(frozen=True)
class Bench:
    """Data and trained models.

    cache: where trained models are kept. scale: divides how many subsets and seeds there are, for a run that
    takes no time.
    """

    cache: Path
    recipe: Recipe = RECIPE
    subsets: int = SUBSETS
    seeds: int = SEEDS
    tuning_subsets: int = TUNING_SUBSETS
    models: int = MODELS

    @cached_property
    def data(self) -> tuple[LoadedRows, LoadedRows]:
        """Training rows and queries, of one stratified split."""
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split

        digits = load_digits()
        parts = train_test_split(
            digits.data / 16, digits.target, test_size=QUERIES, random_state=0, stratify=digits.target
        )
        train, test, train_labels, test_labels = (torch.as_tensor(part) for part in parts)
        return LoadedRows((train.float(),), train_labels), LoadedRows((test.float(),), test_labels)

    @cached_property
    def tuning_queries(self) -> Array:
        """[360] bool: the queries that dampings are tuned on, and no score is reported on."""
        chosen = np.zeros(QUERIES, dtype=bool)
        chosen[np.random.default_rng(5).permutation(QUERIES)[:TUNING_QUERIES]] = True
        return chosen

    def train(self, jobs: Sequence[Job]) -> Members:
        """The models of these jobs, trained or from the cache."""
        training, _ = self.data
        told = [(job.name, job.seed, job.rows.tolist()) for job in jobs]
        name = hashlib.sha256(repr((self.recipe, told)).encode()).hexdigest()[:16]
        path = self.cache / f"{name}.npz"
        if not path.exists():
            found = EnsembleTrainer(perceptron, training, cross_entropy, self.recipe)(jobs)
            self.cache.mkdir(parents=True, exist_ok=True)
            np.savez(path, loss=found.loss, **{key: value.numpy() for key, value in found.state.items()})
        with np.load(path) as stored:
            state = {key: torch.as_tensor(stored[key]) for key in stored.files if key != "loss"}
            return Members(perceptron(), state, stored["loss"])

    @cached_property
    def everything(self) -> Array:
        return np.arange(len(self.data[0]))

    def outcomes(self, number: int, subsets: int, seeds: int) -> Outcomes:
        """Of random halves; number: which draw of them, and of seeds."""
        chosen = random_subsets(len(self.everything), subsets, 0.5, np.random.default_rng(number))
        first = FIRST_SEED * number
        jobs = [
            Job(f"subset {place}, seed {seed}", rows, first + place * seeds + seed)
            for place, rows in enumerate(rows_of(chosen))
            for seed in range(seeds)
        ]
        losses = self.train(jobs).measured(self.data[1], cross_entropy)
        return Outcomes(chosen, losses.reshape(subsets, seeds, -1))

    @cached_property
    def truth(self) -> Outcomes:
        """What scores are reported on: but for the tuning queries."""
        found = self.outcomes(1, self.subsets, self.seeds)
        return replace(found, losses=found.losses[:, :, ~self.tuning_queries])

    @cached_property
    def tuning(self) -> Outcomes:
        """Other halves, and other queries."""
        found = self.outcomes(2, self.tuning_subsets, self.seeds)
        return replace(found, losses=found.losses[:, :, self.tuning_queries])

    @cached_property
    def whole(self) -> Members:
        """Models of the whole training set."""
        return self.train([Job(f"model {seed}", self.everything, seed) for seed in range(self.models)])

    @cached_property
    def halves(self) -> Members:
        """Models of a random half each, as TRAK's authors have them."""
        halves = random_subsets(len(self.everything), self.models, 0.5, np.random.default_rng(3))
        return self.train(
            [Job(f"half {seed}", rows, 3 * FIRST_SEED + seed) for seed, rows in enumerate(rows_of(halves))]
        )

    def problem(self, members: Members, count: int, dtype: torch.dtype = torch.float64) -> Problem:
        """The first so many models, their rows and the queries."""
        training, queries = self.data
        states: list[State] = [
            {name: value[number].to(dtype) for name, value in members.state.items()}
            for number in range(count)
        ]
        assert training.target is not None
        assert queries.target is not None
        inputs, asked = training.inputs[0].to(dtype), queries.inputs[0].to(dtype)
        return Problem(
            perceptron().to(dtype), inputs, training.target, asked, queries.target, states, (1.0,) * count
        )
