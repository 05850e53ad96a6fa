"""What the benchmarks of influence over training runs share: runs in plain loops that save checkpoints, and
the scores of a method at each of them, with their processor time and their memory.

Checkpoints and scores are kept in a folder between calls. Scores are computed in a process of their own, of
one thread.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from influence_ours import examples
from memory import resident
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

import psgrad
from psgrad.engine.execution.examples import Examples
from psgrad.engine.execution.objective import Criterion
from psgrad.engine.influence.evaluation.jobs import LoadedRows, Recipe
from psgrad.engine.influence.method import Checkpoint, Fitted, Method, Per, ScoreBlock, SelfBlock
from psgrad.engine.influence.methods.gradient_products import GradientDot
from psgrad.engine.influence.ranking import joined_scores

Array = np.ndarray[Any, Any]

COUNT = 10  # checkpoints of a run


@dataclass(frozen=True)
class Task:
    """A model, its training, and what is asked of it.

    cache: the folder for checkpoints and scores. fresh: a model with new weights, from torch's generator.
    criterion: the loss of one sample. measurements: name -> what is asked of a query; `loss` is one of them.
    """

    cache: Path
    fresh: Callable[[], nn.Module]
    training: LoadedRows
    queries: LoadedRows
    recipe: Recipe
    criterion: Criterion
    measurements: Mapping[str, Criterion]

    def examples(self, model: nn.Module, rows: LoadedRows, measurement: str = "loss") -> Examples:
        assert rows.target is not None
        return examples(model, rows.inputs[0], rows.target, self.measurements[measurement])


def train_run(task: Task, seed: int) -> Path:
    """The folder of a run's checkpoints: a plain loop of the recipe's optimiser, by one seed."""
    folder, recipe, rows = task.cache / f"run-{seed}-{COUNT}", task.recipe, task.training
    per_epoch = recipe.steps_per_epoch(len(rows))
    checkpoints = psgrad.RunCheckpoints(folder, epochs=recipe.epochs, count=COUNT, steps_per_epoch=per_epoch)
    if len(list(folder.glob("*.safetensors"))) == len(checkpoints.numbers):
        return folder
    torch.manual_seed(seed)
    model = task.fresh()
    optimizer, random = recipe.optimiser(list(model.parameters())), np.random.default_rng([seed, 1])
    losses = torch.func.vmap(task.criterion)
    assert rows.target is not None
    for epoch in range(recipe.epochs):
        order = torch.as_tensor(random.permutation(len(rows)))
        for number, batch in enumerate(order.split(recipe.batch_size)):
            rate = recipe.rate(epoch * per_epoch + number, recipe.epochs * per_epoch)
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.zero_grad()
            losses(model(rows.inputs[0][batch]), rows.target[batch]).mean().backward()
            optimizer.step()
        checkpoints.save(model, epoch + 1, optimizer)
    return folder


@dataclass(frozen=True)
class Place:
    """A checkpoint of a run of the task."""

    task: Task
    path: Path
    number: int
    learning_rate: float
    step: int

    @classmethod
    def all_of(cls, task: Task, seed: int) -> list[Place]:
        """The checkpoints of the run of this seed, in order."""
        found = []
        for number, path in enumerate(sorted(train_run(task, seed).glob("*.safetensors"))):
            with safe_open(path, "pt") as file:
                told = file.metadata()
            found.append(cls(task, path, number, float(told["learning_rate"]), int(told["step"])))
        return found

    @property
    def seed(self) -> int:
        """The run's."""
        return int(self.path.parent.name.split("-")[1])

    def model(self) -> nn.Module:
        model = self.task.fresh()
        model.load_state_dict(load_file(self.path))
        return model.eval()

    def checkpoint(self) -> Checkpoint:
        """What the method gets of this checkpoint.

        Its number is another one for each run: by it methods draw their projections.
        """
        number = self.number + COUNT * self.seed
        queries = len(self.task.queries)
        return Checkpoint(number, self.learning_rate, queries=queries, of=COUNT)


@dataclass
class Kept(Fitted):
    """A method's scores at a checkpoint, from the cache."""

    matrix: torch.Tensor
    weights: torch.Tensor | None = None

    def scores(self, queries: Examples, per: Per = "total") -> Iterator[ScoreBlock]:
        yield ScoreBlock(0, len(self.matrix), {"": self.matrix}, self.weights)

    def self_influence(self) -> Iterator[SelfBlock]:
        raise NotImplementedError


def kept_apart(paths: Sequence[Path], compute: Callable[[], Sequence[Mapping[str, Any]]]) -> None:
    """Writes arrays to each of some files, computed by one thread of a process of their own, and with each of
    them `seconds` of the processor, where they do not have them themselves, and `memory`, the peak of bytes
    beyond what the process began with.
    """

    def work() -> None:
        torch.set_num_threads(1)
        found: list[Mapping[str, Any]] = []
        start = time.process_time()
        memory = resident(lambda: found.extend(compute()))
        seconds = (time.process_time() - start) / len(paths)
        for path, arrays in zip(paths, found, strict=True):
            beside = path.with_suffix(".part.npz")
            np.savez(beside, **{"seconds": seconds, "memory": memory, **arrays})
            beside.replace(path)

    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    process.join()
    if process.exitcode:
        raise RuntimeError(f"the process of {paths[0]} ended with {process.exitcode}")


@dataclass
class Scorer:
    """Score matrices [n, m] of all queries, computed once for each method, checkpoint and measurement.

    Attributes:
        together: method -> the measurements that are computed with one fit.
        seconds, memory: name of a file -> what it took, of all that was asked for since they were emptied.
    """

    task: Task
    together: Mapping[Method, Sequence[str]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    memory: dict[str, int] = field(default_factory=dict)

    def at(self, method: Method, places: Sequence[Place], measurement: str) -> list[Kept]:
        """The scores at each checkpoint: those that the method itself joins."""
        names = [self._name(method, place, measurement) for place in places]
        if not all(path.exists() for path in names):
            # What a first pass imports is not measured.
            self._scored(GradientDot(), places[0], ["loss"])
            self._compute(method, places, measurement, names)
        return [self._stored(path) for path in names]

    def joined(self, method: Method, runs: Sequence[list[Place]], measurement: str, average: str) -> Array:
        """[n, m]: of all these checkpoints together."""
        parts = [each for places in runs for each in self.at(method, places, measurement)]
        if average == "plain":
            return torch.stack([each.matrix for each in parts]).mean(0).numpy()
        queries: Any = [None] * len(parts)
        return torch.cat([block.scores[""] for block in joined_scores(method, parts, queries)]).numpy()

    def _stored(self, path: Path) -> Kept:
        with np.load(path) as stored:
            self.seconds[path.stem] = float(stored["seconds"])
            self.memory[path.stem] = int(stored["memory"])
            weights = torch.as_tensor(stored["weights"]) if "weights" in stored.files else None
            return Kept(torch.as_tensor(stored["scores"]).double(), weights)

    def _name(self, method: Method, place: Place, measurement: str) -> Path:
        told = repr((method, place.path.parent.name, place.path.name, [], measurement))
        return self.task.cache / f"scores-{hashlib.sha256(told.encode()).hexdigest()[:20]}.npz"

    def _compute(
        self, method: Method, places: Sequence[Place], measurement: str, names: Sequence[Path]
    ) -> None:
        measurements = self.together.get(method, (measurement,))
        for place, name in zip(places, names, strict=True):
            if not name.exists():
                paths = [self._name(method, place, each) for each in measurements]
                kept_apart(paths, lambda place=place: self._scored(method, place, measurements))
                print(f"{method.name} at {place.path}", flush=True)

    def _scored(self, method: Method, place: Place, measurements: Sequence[str]) -> list[dict[str, Any]]:
        """What is kept of each measurement; seconds are of the fit and this measurement."""
        model, task = place.model(), self.task
        start = time.process_time()
        fitted = method.fit(task.examples(model, task.training), place.checkpoint())
        fit, found = time.process_time() - start, list[dict[str, Any]]()
        for measurement in measurements:
            start = time.process_time()
            blocks = list(fitted.scores(task.examples(model, task.queries, measurement)))
            found.append({"seconds": fit + time.process_time() - start, **_arrays(blocks)})
        return found


def _arrays(blocks: Sequence[ScoreBlock]) -> dict[str, Array]:
    """All rows of the blocks of scores."""
    arrays = {"scores": torch.cat([block.scores[""] for block in blocks]).numpy()}
    weights = [block.weights for block in blocks if block.weights is not None]
    return arrays | ({"weights": torch.cat(weights).numpy()} if weights else {})


@dataclass(frozen=True)
class Row:
    """A line of a table: a method at some checkpoints of so many runs."""

    name: str
    method: Method
    runs: int
    checkpoints: str
    measurement: str = "loss"
    average: str = "relative"

    def places(self, runs: Sequence[list[Place]]) -> list[list[Place]]:
        """Of each run the checkpoints that count: the last one, all, or every other one."""
        chosen = {"last": slice(-1, None), "all": slice(None), "half": slice(1, None, 2)}[self.checkpoints]
        return [run[chosen] for run in runs[: self.runs]]
