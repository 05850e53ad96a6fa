"""How well influence over the checkpoints of a training run foretells retraining, on digits.

    python benchmarks/influence_trajectory.py [--cache DIR] [--only NAME ...] [--json FILE]

The truth is that of influence_quality.py: 100 random halves of the 1,437 training digits, three models
trained on each, and the loss of 300 queries. A score is the mean over queries of Spearman's correlation, over
the halves, of the summed scores with minus the mean loss. Intervals are of resampled halves; the ceiling is
what the true expected outcome would score.

Three runs (seeds 0, 1, 2) are trained by the same recipe in a plain loop, in which psgrad.RunCheckpoints
saves ten checkpoints each. Nothing here is tuned: all methods have their default options, and the weight
decay of training. What the defaults are was chosen on runs of other seeds, other halves and the 60 other
queries.

The bars: ten checkpoints of one run by the default .77, three runs .81, EK-FAC on ten .68.

Score matrices are kept in the cache. Seconds are of the processor, of fit and scores, of one thread where
OMP_NUM_THREADS=1.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from influence_contenders import margin
from influence_ours import cross_entropy, examples
from influence_truth import RECIPE, Array, Bench, perceptron
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

import psgrad
from psgrad.engine.execution.examples import Examples
from psgrad.engine.influence.averages import Average
from psgrad.engine.influence.evaluation.metrics import ceiling, lds
from psgrad.engine.influence.method import Checkpoint, Fitted, Method, Per, ScoreBlock, SelfBlock
from psgrad.engine.influence.methods.ekfac import EKFAC
from psgrad.engine.influence.methods.gradient_products import GradientDot, TracIn
from psgrad.engine.influence.methods.influence import Influence
from psgrad.engine.influence.methods.source import Source
from psgrad.engine.influence.ranking import joined_scores

RUNS, COUNT = (0, 1, 2), 10
EXACT, FACTORED = Influence(weight_decay=RECIPE.weight_decay), EKFAC(weight_decay=RECIPE.weight_decay)
# EK-FAC, and two steps of conjugate gradients from there, in the space that all queries share.
STEPPED = Influence(
    weight_decay=RECIPE.weight_decay, solver="conjugate_gradient", preconditioner="ekfac", iterations=2
)
SOURCE = Source(weight_decay=RECIPE.weight_decay, momentum=RECIPE.momentum)
TEN, THREE, TEN_FACTORED = (
    "influence, ten checkpoints",
    "influence, three runs x ten",
    "ekfac, ten checkpoints",
)
BARS = {TEN: 0.77, THREE: 0.81, TEN_FACTORED: 0.68}
MEASUREMENTS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "loss": cross_entropy,
    "margin": lambda output, target: -margin(output, target),
}


def train_run(bench: Bench, seed: int) -> Path:
    """The folder of a run's checkpoints: a plain loop of the recipe's optimiser, by one seed."""
    folder = bench.cache / f"run-{seed}-{COUNT}"
    rows, _ = bench.data
    size = len(rows)
    per_epoch = -(-size // RECIPE.batch_size)
    checkpoints = psgrad.RunCheckpoints(folder, epochs=RECIPE.epochs, count=COUNT, steps_per_epoch=per_epoch)
    if len(list(folder.glob("*.safetensors"))) == len(checkpoints.numbers):
        return folder
    torch.manual_seed(seed)
    model = perceptron()
    optimizer, random = RECIPE.optimiser(list(model.parameters())), np.random.default_rng([seed, 1])
    assert rows.target is not None
    for epoch in range(RECIPE.epochs):
        order = torch.as_tensor(random.permutation(size))
        for number, batch in enumerate(order.split(RECIPE.batch_size)):
            rate = RECIPE.rate(epoch * per_epoch + number, RECIPE.epochs * per_epoch)
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(rows.inputs[0][batch]), rows.target[batch]).backward()
            optimizer.step()
        checkpoints.save(model, epoch + 1, optimizer)
    return folder


@dataclass(frozen=True)
class Place:
    """A checkpoint of a run."""

    path: Path
    number: int
    learning_rate: float
    step: int

    @classmethod
    def all_of(cls, folder: Path) -> list[Place]:
        found = []
        for number, path in enumerate(sorted(folder.glob("*.safetensors"))):
            with safe_open(path, "pt") as file:
                told = file.metadata()
            found.append(cls(path, number, float(told["learning_rate"]), int(told["step"])))
        return found

    def model(self) -> nn.Module:
        model = perceptron()
        model.load_state_dict(load_file(self.path))
        return model

    @property
    def checkpoint(self) -> Checkpoint:
        return Checkpoint(self.number, self.learning_rate, queries=360, step=self.step, of=COUNT)


@dataclass
class Kept(Fitted):
    """A method's scores at a checkpoint, from the cache."""

    matrix: torch.Tensor

    def scores(self, queries: Examples, per: Per = "total") -> Iterator[ScoreBlock]:
        yield ScoreBlock(0, len(self.matrix), {"": self.matrix})

    def self_influence(self) -> Iterator[SelfBlock]:
        raise NotImplementedError


class Scorer:
    """Score matrices [n, m] of all queries, computed once for each method, checkpoint and measurement."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.seconds: dict[str, float] = {}

    def at(self, method: Method, places: Sequence[Place], measurement: str) -> list[torch.Tensor]:
        """One matrix for each checkpoint: those that the method itself joins."""
        names = [self._name(method, places, place, measurement) for place in places]
        if not all(path.exists() for path in names):
            self._compute(method, places, measurement, names)
        found = []
        for path in names:
            with np.load(path) as stored:
                found.append(torch.as_tensor(stored["scores"]).double())
                self.seconds[path.stem] = float(stored["seconds"])
        return found

    def joined(
        self, method: Method, runs: Sequence[list[Place]], measurement: str, average: Average
    ) -> Array:
        """[n, m]: of all these checkpoints together."""
        parts = [Kept(matrix) for places in runs for matrix in self.at(method, places, measurement)]
        queries: Any = [None] * len(parts)
        blocks = joined_scores(method, parts, queries, average=average)
        scores: Array = torch.cat([block.scores[""] for block in blocks]).numpy()
        return scores

    def _name(self, method: Method, places: Sequence[Place], place: Place, measurement: str) -> Path:
        of_run = [each.path.name for each in places] if method.fits_whole_run else []
        told = repr((method, place.path.parent.name, place.path.name, of_run, measurement))
        return self.bench.cache / f"scores-{hashlib.sha256(told.encode()).hexdigest()[:20]}.npz"

    def _compute(
        self, method: Method, places: Sequence[Place], measurement: str, names: Sequence[Path]
    ) -> None:
        training, asked = self.bench.data
        assert training.target is not None
        assert asked.target is not None
        both = [examples(place.model(), training.inputs[0], training.target) for place in places]
        queries = [
            examples(place.model(), asked.inputs[0], asked.target, MEASUREMENTS[measurement])
            for place in places
        ]
        groups = [list(range(len(places)))] if method.fits_whole_run else [[at] for at in range(len(places))]
        for group in groups:
            if all(names[at].exists() for at in group):
                continue
            start = time.process_time()
            fitted = method.fit_run([(both[at], places[at].checkpoint) for at in group])
            asked_of = method.queries_of_run([queries[at] for at in group])
            found = [
                torch.cat([block.scores[""] for block in one.scores(query)])
                for one, query in zip(fitted, asked_of, strict=True)
            ]
            spent = (time.process_time() - start) / len(group)
            for at, matrix in zip(group, found, strict=True):
                np.savez(names[at], scores=matrix.numpy(), seconds=spent)
                print(f"{method.name} at {places[at].path}: {spent:.1f} s", flush=True)


@dataclass(frozen=True)
class Row:
    """A line of the table."""

    name: str
    method: Method
    runs: int
    checkpoints: str
    measurement: str = "loss"
    average: Average = "relative"


def rows() -> list[Row]:
    return [
        Row("influence, final checkpoint", EXACT, 1, "last"),
        Row("influence, final checkpoint, margin", EXACT, 1, "last", "margin"),
        Row(TEN, EXACT, 1, "all"),
        Row("influence, ten checkpoints, plain mean", EXACT, 1, "all", average="plain"),
        Row("influence, five of the ten", EXACT, 1, "half"),
        Row("ekfac, final checkpoint", FACTORED, 1, "last"),
        Row(TEN_FACTORED, FACTORED, 1, "all"),
        Row("two steps after ekfac, ten checkpoints", STEPPED, 1, "all"),
        Row("ekfac, ten checkpoints, plain mean", FACTORED, 1, "all", average="plain"),
        Row("gradient_dot, final checkpoint", GradientDot(), 1, "last"),
        Row("tracin, ten checkpoints, their learning rates", TracIn(), 1, "all"),
        Row("source, ten checkpoints", SOURCE, 1, "all"),
        Row(THREE, EXACT, 3, "all"),
        Row("ekfac, three runs x ten", FACTORED, 3, "all"),
    ]


def chosen(places: list[Place], which: str) -> list[Place]:
    return {"last": places[-1:], "all": places, "half": places[1::2]}[which]


def report(bench: Bench, scorer: Scorer, wanted: Sequence[Row]) -> dict[str, Any]:
    """Prints the table, and returns what the JSON has of it."""
    truth, best = bench.truth, ceiling(bench.truth.losses)
    runs = [Place.all_of(train_run(bench, seed)) for seed in RUNS]
    scores: dict[str, Array] = {}
    seconds: dict[str, float] = {}
    for row in wanted:
        scorer.seconds = {}
        places = [chosen(run, row.checkpoints) for run in runs[: row.runs]]
        whole = scorer.joined(row.method, places, row.measurement, row.average)
        scores[row.name], seconds[row.name] = whole[:, ~bench.tuning_queries], sum(scorer.seconds.values())
        print(f"{row.name}: done", flush=True)
    found = lds(scores, truth.subsets, truth.losses, wanted[0].name)
    content: dict[str, Any] = {"ceiling": None if best is None else asdict(best), "rows": []}
    print(f"\n{'':<50}{'LDS':>6}{'interval':>18}{'CPU seconds':>14}")
    for name, one in found.items():
        low, high = one.interval
        print(f"{name:<50}{one.mean:>6.3f}{f'{low:.3f} .. {high:.3f}':>18}{seconds[name]:>14.1f}")
        content["rows"].append(
            {"name": name, "mean": one.mean, "interval": one.interval, "cpu_seconds": seconds[name]}
        )
    if best is not None:
        print(f"ceiling {best.best:.3f}; one seed against another {best.single:.3f}")
    content["bars"] = {
        name: {"at_least": bar, "reached": found[name].mean >= bar}
        for name, bar in BARS.items()
        if name in found
    }
    for name, bar in content["bars"].items():
        print(f"{'pass' if bar['reached'] else 'FAIL'}: {name} at least {bar['at_least']}")
    return content


def main() -> None:
    names = [row.name for row in rows()]
    parser = argparse.ArgumentParser(
        description="Linear datamodeling scores over the checkpoints of training runs, on digits."
    )
    parser.add_argument(
        "--cache",
        type=Path,
        default=Path(tempfile.gettempdir()) / "psgrad-influence",
        metavar="DIR",
        help="trained models and scores",
    )
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME", help="these rows")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers to this file too")
    arguments = parser.parse_args()
    bench = Bench(arguments.cache)
    bench.cache.mkdir(parents=True, exist_ok=True)
    content = report(bench, Scorer(bench), [row for row in rows() if row.name in arguments.only])
    content |= {"torch": torch.__version__, "threads": torch.get_num_threads(), "load": os.getloadavg()[0]}
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
