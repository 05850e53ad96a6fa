"""How well each influence method predicts retraining, in one of several settings, with time and memory.

    OMP_NUM_THREADS=1 python benchmarks/influence_settings.py --setting digits [--cache DIR] [--json FILE]

    digits    a perceptron 64-64-10 on scikit-learn's digits, SGD with momentum, random halves
    cnn       a convolutional network of 5,530 parameters on the same digits
    adam      the perceptron, trained by Adam
    remove10  the perceptron of `digits`, trained without a random tenth of the data in place of a half
    text      a transformer of 34,688 parameters on the bytes of passages of Python's standard library

The truth: models that are trained again on random subsets, several on each, and the loss of the queries.
A score is the mean over queries of Spearman's correlation, over the subsets, of the summed scores with
minus the mean loss (LDS). Intervals are by the jackknife over subsets, which all queries share. Runs of
seeds 0 to 9 are trained on everything in a plain loop; the scores are of their checkpoints. psgrad's methods
have their default options, and the weight decay of training. Other libraries have the dampings that were best
on the other halves and queries of influence_quality.py, whose model is that of `digits`: they are not tuned
for other settings. A library that is not installed has no row; README.md says how to install them.

Trained models, outcomes and scores are kept in the cache, so that a call that was interrupted goes on.
Seconds are of the processor, of one thread, of fit and scores; memory is the peak of the process beyond the
data.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from influence_contenders import (
    Problem,
    State,
    captum_naive,
    captum_tracin,
    dattri_cg,
    dattri_trak,
    kronfluence_factored,
    margin,
    traker,
)
from influence_ours import cross_entropy
from influence_runs import Place, Row, Scorer, Task, kept_apart
from influence_truth import FIRST_SEED, RECIPE, Array, Bench, perceptron
from norms import machine
from torch import Tensor, nn

from psgrad.engine.execution.objective import Criterion
from psgrad.engine.influence.evaluation.controls import controls, own_controls
from psgrad.engine.influence.evaluation.jobs import Job, LoadedRows, Recipe
from psgrad.engine.influence.evaluation.metrics import ceiling, lds, random_subsets, rows_of
from psgrad.engine.influence.evaluation.retraining import EnsembleTrainer, measured
from psgrad.engine.influence.methods.ekfac import EKFAC
from psgrad.engine.influence.methods.gradient_products import GradientCosine, GradientDot, TracIn
from psgrad.engine.influence.methods.influence import Influence
from psgrad.engine.influence.methods.projected import TRAK, ProjectedInfluence

RUNS, LONG_RUNS = 10, 3  # models of the whole training set, and those whose checkpoints are scored, too
RANDOM = "control: random"


@dataclass(frozen=True)
class Rival:
    """Another library's scores of the first run's last model, or of all runs'. package: what has to be
    installed.
    """

    name: str
    package: str
    ask: Callable[[Problem], Tensor]
    models: int = 1


KRONFLUENCE = Rival("kronfluence EK-FAC", "kronfluence", lambda problem: kronfluence_factored(problem, 1e-4))
QUICK = (
    Rival("captum TracInCP", "captum", captum_tracin),
    Rival("dattri IF-CG", "dattri", lambda problem: dattri_cg(problem, 0.003)),
    Rival("dattri TRAK", "dattri", lambda problem: dattri_trak(problem, 0.1)),
    Rival("dattri TRAK, ten models", "dattri", lambda problem: dattri_trak(problem, 0.1), RUNS),
    KRONFLUENCE,
    Rival("traker", "trak", lambda problem: traker(problem, 100.0)),
    Rival("traker, ten models", "trak", lambda problem: traker(problem, 10.0), RUNS),
)
HESSIAN = Rival("captum NaiveInfluenceFunction", "captum", lambda problem: captum_naive(problem, 0.003))
OF_TEXT = (
    Rival("captum TracInCP", "captum", lambda problem: captum_tracin(problem, 64, sample_wise=False)),
    KRONFLUENCE,
)


@dataclass(frozen=True)
class Setting:
    """What is measured.

    Attributes:
        words: what the model, its data and its training are, for the page.
        share: of the training rows that each subset has.
        subsets, seeds: how many, and how many models on each.
        rows: psgrad's methods.
        order: of three rows, which claims to be ahead of which.
        counted: [m] bool, the queries whose scores are reported.
        labels: [n] and [m], where inputs have no labels: what `same label` compares.
        rival_model: from a model to the one that other libraries take: outputs [n, classes, ...].
        not_run: method -> why it has no row here.
    """

    name: str
    words: str
    task: Task
    share: float
    subsets: int
    seeds: int
    rows: Sequence[Row]
    order: tuple[str, str, str]
    counted: Array
    rivals: Sequence[Rival]
    not_run: dict[str, str]
    labels: tuple[Array, Array] | None = None
    rival_model: Callable[[nn.Module], nn.Module] = field(default=lambda model: model)

    @cached_property
    def chosen(self) -> Array:
        """[S, n] bool: the rows of each subset."""
        return random_subsets(len(self.task.training), self.subsets, self.share, np.random.default_rng(1))

    def jobs(self) -> list[Job]:
        return [
            Job(f"subset {place}, seed {seed}", rows, FIRST_SEED + place * self.seeds + seed)
            for place, rows in enumerate(rows_of(self.chosen))
            for seed in range(self.seeds)
        ]


class Outcomes:
    """Outcomes of finished batches of models in a folder, and the processor seconds that they took."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.seconds, self._since = folder, 0.0, time.process_time()

    def load(self, name: str) -> Array | None:
        path = self.folder / f"outcomes-{name}.npz"
        if not path.exists():
            return None
        with np.load(path) as stored:
            self.seconds += float(stored["seconds"])
            self._since = time.process_time()
            return np.asarray(stored["outcomes"])

    def save(self, name: str, values: Array) -> None:
        spent, self._since = time.process_time() - self._since, time.process_time()
        self.seconds += spent
        path = self.folder / f"outcomes-{name}.npz"
        beside = path.with_suffix(".part.npz")
        np.savez(beside, outcomes=values, seconds=spent)
        beside.replace(path)


def truth(setting: Setting) -> tuple[Array, float]:
    """([S, R, m] the loss of each query by R models of each subset, the processor seconds)."""
    task = setting.task

    def fresh(seed: int) -> nn.Module:
        return task.fresh()

    store = Outcomes(task.cache)
    found = measured(
        setting.jobs(),
        EnsembleTrainer(fresh, task.training, task.criterion, task.recipe),
        lambda members: members.measured(task.queries, task.criterion),
        store,
        f"{setting.name} {task.recipe} {task.training.digest()} {task.queries.digest()}",
        task.recipe.together,
        lambda done: print(f"{done} models are trained again", flush=True),
    )
    return found.reshape(setting.subsets, setting.seeds, -1), store.seconds


def shortened(setting: Setting) -> Setting:
    """The setting without what takes most of the time."""
    slow = [row.name for row in setting.rows if row.runs == LONG_RUNS and row.checkpoints == "all"]
    rows = [row for row in setting.rows if row.name not in slow]
    why = dict.fromkeys([*slow, "other libraries"], "left out by --short")
    return replace(setting, rows=rows, rivals=(), not_run={**setting.not_run, **why})


# -- The settings --------------------------------------------------------------------------------------------


def of_classes(recipe: Recipe) -> list[Row]:
    """Methods for a classifier with few outputs."""
    decay = recipe.weight_decay
    exact, factored = Influence(weight_decay=decay), EKFAC(weight_decay=decay)
    return [
        Row("influence, final model", exact, 1, "last"),
        Row("influence, final model, margin", exact, 1, "last", "margin"),
        Row("influence, three final models", exact, 3, "last"),
        Row("influence, ten final models", exact, RUNS, "last"),
        Row("influence, ten final models, margin", exact, RUNS, "last", "margin"),
        Row("influence, one run's ten checkpoints", exact, 1, "all"),
        Row("influence, one run's ten checkpoints, margin", exact, 1, "all", "margin"),
        Row("influence, one run's ten checkpoints, plain mean", exact, 1, "all", average="plain"),
        Row("influence, one run's five checkpoints", exact, 1, "half"),
        Row("influence, three runs x ten checkpoints", exact, LONG_RUNS, "all"),
        *of_sampled_rows(decay),
        *of_factors(factored),
        Row("trak, final model", TRAK(), 1, "last"),
        Row("trak, ten final models", TRAK(), RUNS, "last"),
        *of_gradients(decay),
    ]


def of_sampled_rows(decay: float) -> list[Row]:
    sampled = Influence(curvature="sampled", weight_decay=decay)
    return [
        Row("influence, sampled, final model", sampled, 1, "last"),
        Row("influence, sampled, ten final models", sampled, RUNS, "last"),
        Row("influence, sampled, one run's ten checkpoints", sampled, 1, "all"),
        Row("influence, sampled, three runs x ten checkpoints", sampled, LONG_RUNS, "all"),
    ]


def of_factors(factored: EKFAC) -> list[Row]:
    return [
        Row("ekfac, final model", factored, 1, "last"),
        Row("ekfac, ten final models", factored, RUNS, "last"),
        Row("ekfac, one run's ten checkpoints", factored, 1, "all"),
        Row("ekfac, one run's ten checkpoints, plain mean", factored, 1, "all", average="plain"),
        Row("ekfac, three runs x ten checkpoints", factored, LONG_RUNS, "all"),
    ]


def of_gradients(decay: float) -> list[Row]:
    """Methods without a curvature, or with that of gradients."""
    return [
        Row("projected_influence, final model", ProjectedInfluence(), 1, "last"),
        Row("tracin, ten checkpoints", TracIn(), 1, "all"),
        Row("gradient_dot, final model", GradientDot(), 1, "last"),
        Row("gradient_cosine, final model", GradientCosine(), 1, "last"),
    ]


def convolutional() -> nn.Module:
    """64 grey values to ten logits: the network of configs/digits with fewer channels."""
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        nn.Conv2d(1, 8, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.Conv2d(8, 16, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(256, 16),
        nn.ReLU(),
        nn.Linear(16, 10),
    )


def of_digits(
    cache: Path,
    name: str,
    words: str,
    recipe: Recipe,
    fresh: Callable[[], nn.Module] = perceptron,
    share: float = 0.5,
    subsets: int = 100,
    seeds: int = 3,
) -> Setting:
    """Of the split of influence_truth.py, with half of its queries, and none that dampings were tuned on."""
    bench = Bench(cache)
    training, queries = bench.data
    asked: dict[str, Criterion] = {
        "loss": cross_entropy,
        "margin": lambda output, target: -margin(output, target),
    }
    # The models of `remove10` are those of `digits`; only the truth is another.
    task = Task(
        cache / ("digits" if share != 0.5 else name), fresh, training, queries, recipe, cross_entropy, asked
    )
    rows, not_run = of_classes(recipe), dict[str, str]()
    if name in ("digits", "remove10"):
        rivals: Sequence[Rival] = (HESSIAN, *QUICK)
    else:
        not_run[HESSIAN.name] = "the Hessian of all parameters takes minutes"
        rivals = QUICK
    order = (
        "influence, one run's ten checkpoints, margin",
        "influence, ten final models, margin",
        "influence, final model, margin",
    )
    counted = ~bench.tuning_queries
    counted[np.flatnonzero(counted)[::2]] = False
    return Setting(name, words, task, share, subsets, seeds, rows, order, counted, rivals, not_run)


# Bytes of a passage, and how many there are; every seventh is a query.
LENGTH, PASSAGES, QUERY_EVERY = 32, 700, 7


def token_cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    """Of one passage: logits [t, 256], bytes [t]."""
    return nn.functional.cross_entropy(output, target)


class ClassesFirst(nn.Module):
    """The model with its outputs [n, t, classes] as [n, classes, t]."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.model(x).transpose(1, 2)
        return output


def of_text(cache: Path) -> Setting:
    """The example of configs/text, smaller."""
    sys.path.append(str(Path(__file__).parents[1] / "configs" / "text"))
    from data import passages
    from model import build

    found = passages(PASSAGES, LENGTH)
    columns = [[found[place][name] for place in range(PASSAGES)] for name in ("bytes", "next_bytes")]
    tokens, targets = (torch.stack(column) for column in columns)
    files = np.unique([name for name, _ in found.places], return_inverse=True)[1]
    query = torch.arange(PASSAGES) % QUERY_EVERY == QUERY_EVERY // 2
    training, queries = (LoadedRows((tokens[part],), targets[part]) for part in (~query, query))
    recipe = Recipe("adamw", 20, 16, learning_rate=5e-3, schedule="cosine", weight_decay=0.1, together=10)
    decay = 0.0  # AdamW's is no part of the loss
    fisher = Influence(curvature="fisher", weight_decay=decay)
    task = Task(
        cache / "text",
        lambda: build(width=32, layers=2, heads=4, positions=LENGTH),
        training,
        queries,
        recipe,
        token_cross_entropy,
        {"loss": token_cross_entropy},
    )
    rows = [
        *of_sampled_rows(decay),
        *of_factors(EKFAC(weight_decay=decay)),
        Row("influence, empirical Fisher, final model", fisher, 1, "last"),
        Row("influence, empirical Fisher, ten final models", fisher, RUNS, "last"),
        Row("influence, empirical Fisher, one run's ten checkpoints", fisher, 1, "all"),
        *of_gradients(decay),
    ]
    not_run = {
        "influence": "the Gauss-Newton matrix by conjugate gradients took more than three minutes",
        "trak": "a loss over positions is no function of one margin",
        HESSIAN.name: "34,688 parameters are too many for a Hessian in memory",
        "dattri IF-CG": "a thousand products with the Hessian take minutes",
        "dattri TRAK, traker": "their margins are those of one label",
    }
    order = ("ekfac, one run's ten checkpoints", "ekfac, ten final models", "ekfac, final model")
    return Setting(
        "text",
        f"A transformer with two blocks of width 32, on {LENGTH} bytes each, AdamW",
        task,
        0.5,
        40,
        2,
        rows,
        order,
        np.ones(len(queries), dtype=bool),
        OF_TEXT,
        not_run,
        (files[~query.numpy()], files[query.numpy()]),
        ClassesFirst,
    )


ADAM = Recipe("adam", 80, 64, learning_rate=3e-3, schedule="cosine", together=100)
SETTINGS: dict[str, Callable[[Path], Setting]] = {
    "digits": lambda cache: of_digits(
        cache, "digits", "A perceptron 64-64-10, SGD with momentum and weight decay", RECIPE
    ),
    "cnn": lambda cache: of_digits(
        cache,
        "cnn",
        "Two convolutions and two linear layers, SGD with momentum and weight decay",
        replace(RECIPE, epochs=30, together=20),
        convolutional,
        subsets=40,
        seeds=2,
    ),
    "adam": lambda cache: of_digits(cache, "adam", "A perceptron 64-64-10, Adam", ADAM),
    "remove10": lambda cache: of_digits(
        cache,
        "remove10",
        "A perceptron 64-64-10, SGD with momentum and weight decay",
        RECIPE,
        share=0.9,
        seeds=5,
    ),
    "text": of_text,
}


# -- Scores --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scored:
    """A line of the table: scores [n, m], the processor seconds, and the peak of bytes; none for controls."""

    kind: str
    scores: Array
    seconds: float | None = None
    memory: int | None = None


def ours(setting: Setting, runs: Sequence[list[Place]]) -> Iterator[tuple[str, Scored]]:
    together: dict[Any, list[str]] = {}
    for row in setting.rows:
        asked = together.setdefault(row.method, [])
        asked += [row.measurement] if row.measurement not in asked else []
    for row in setting.rows:
        scorer = Scorer(setting.task, together)
        joined = scorer.joined(row.method, row.places(runs), row.measurement, row.average)
        yield row.name, Scored("psgrad", joined, sum(scorer.seconds.values()), max(scorer.memory.values()))


def problem_of(setting: Setting, finals: Sequence[Place]) -> Problem:
    """The last models of so many runs, in float32."""
    models = [setting.rival_model(place.model()) for place in finals]
    states: list[State] = [
        {name: value.clone() for name, value in model.state_dict().items()} for model in models
    ]
    rows, queries = setting.task.training, setting.task.queries
    assert rows.target is not None
    assert queries.target is not None
    return Problem(
        models[0],
        rows.inputs[0],
        rows.target,
        queries.inputs[0],
        queries.target,
        states,
        (1.0,) * len(models),
    )


def theirs(setting: Setting, runs: Sequence[list[Place]]) -> Iterator[tuple[str, Scored]]:
    for rival in setting.rivals:
        path = setting.task.cache / f"{rival.name.replace(' ', '-').replace(',', '')}.npz"
        if not path.exists():
            try:
                importlib.import_module(rival.package)
            except ImportError as error:
                print(f"{rival.name}: {error.name} is not installed", flush=True)
                continue
            problem = problem_of(setting, [run[-1] for run in runs[: rival.models]])
            ask = rival.ask
            kept_apart([path], lambda ask=ask, problem=problem: [{"scores": ask(problem).double().numpy()}])
        with np.load(path) as stored:
            yield (
                rival.name,
                Scored("rival", stored["scores"], float(stored["seconds"]), int(stored["memory"])),
            )


def plain(setting: Setting, place: Place) -> Iterator[tuple[str, Scored]]:
    """The controls: scores without any influence method."""
    training, queries = (
        setting.task.examples(place.model(), rows) for rows in (setting.task.training, setting.task.queries)
    )
    if setting.labels is None:
        found = controls(training, queries)[0]
    else:
        one, other = setting.labels
        pairs = [pairs_of_bytes(rows.inputs[0]) for rows in (setting.task.training, setting.task.queries)]
        found = {
            "random": np.random.default_rng(0).standard_normal((len(one), len(other))),
            "same label (the file)": (one[:, None] == other[None, :]).astype(float),
            "nearest neighbour (cosine of counts of byte pairs)": (pairs[0] @ pairs[1].T).numpy(),
        }
        for name, column in own_controls(training).items():
            found[name] = np.repeat(column[:, None], len(other), axis=1)
    for name, scores in found.items():
        yield f"control: {name}", Scored("control", scores)


def pairs_of_bytes(tokens: Tensor) -> Tensor:
    """[n, 65536] with norm 1: how often each pair of bytes is in a passage [n, t]."""
    pairs = 256 * tokens[:, :-1] + tokens[:, 1:]
    counts = torch.zeros(len(tokens), 256 * 256).scatter_add_(1, pairs, torch.ones(pairs.shape))
    return nn.functional.normalize(counts, dim=1)


# -- The report ----------------------------------------------------------------------------------------------


def report(setting: Setting) -> dict[str, Any]:
    """What the JSON has."""
    outcomes, seconds = truth(setting)
    outcomes = outcomes[:, :, setting.counted]
    print(f"the truth took {seconds:.0f} s of the processor", flush=True)
    runs = [Place.all_of(setting.task, seed) for seed in range(RUNS)]
    scored: dict[str, Scored] = {}
    for found in (ours(setting, runs), theirs(setting, runs), plain(setting, runs[0][-1])):
        for name, one in found:
            scored[name] = replace(one, scores=one.scores[:, setting.counted])
            spent = "" if one.seconds is None else f"{one.seconds:.1f} s, {(one.memory or 0) / 2**20:.0f} MB"
            print(f"{name}: {spent}", flush=True)
    middle = setting.order[1]
    results = lds({name: one.scores for name, one in scored.items()}, setting.chosen, outcomes, middle)
    best = ceiling(outcomes)
    content = facts(setting, runs[0][-1]) | {
        "truth_cpu_seconds": seconds,
        "ceiling": None if best is None else asdict(best),
        "order": setting.order,
        "not_run": setting.not_run,
        "intervals": "jackknife",
        "rows": [],
    }
    for name, result in results.items():
        one = scored[name]
        content["rows"].append(
            {"name": name, "kind": one.kind, "mean": result.mean, "interval": result.interval}
            | {"behind": result.ahead, "behind_interval": result.ahead_interval}
            | {"cpu_seconds": one.seconds, "memory": one.memory, "undefined": result.undefined}
        )
        low, high = result.interval
        print(f"{name:<60}{result.mean:>7.3f}  ({low:.3f} to {high:.3f})", flush=True)
    return content


def facts(setting: Setting, place: Place) -> dict[str, Any]:
    task, model = setting.task, place.model()

    def mean_loss(rows: LoadedRows) -> float:
        with torch.no_grad():
            losses = torch.func.vmap(task.criterion)(model(rows.inputs[0]), rows.target)
        return float(losses.mean())

    return {
        "setting": setting.name,
        "words": setting.words,
        "training_rows": len(task.training),
        "queries": int(setting.counted.sum()),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "epochs": task.recipe.epochs,
        "share": setting.share,
        "subsets": setting.subsets,
        "seeds": setting.seeds,
        "loss": {"training": mean_loss(task.training), "queries": mean_loss(task.queries)},
        "machine": machine(torch.device("cpu")) | {"load": os.getloadavg()[0]},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Linear datamodeling scores of influence methods.")
    parser.add_argument("--setting", required=True, choices=SETTINGS, help="one of them")
    parser.add_argument(
        "--cache",
        type=Path,
        default=Path(tempfile.gettempdir()) / "psgrad-influence-settings",
        metavar="DIR",
        help="trained models, outcomes and scores",
    )
    parser.add_argument("--short", action="store_true", help="without other libraries and three runs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers to this file too")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    setting = SETTINGS[arguments.setting](arguments.cache)
    content = report(shortened(setting) if arguments.short else setting)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
