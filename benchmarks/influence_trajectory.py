"""How well influence over the checkpoints of a training run predicts retraining, on digits.

    python benchmarks/influence_trajectory.py [--cache DIR] [--only NAME ...] [--json FILE]

The truth is that of influence_quality.py: 100 random halves of the 1,437 training digits, three models
trained on each, and the loss of 300 queries. A score is the mean over queries of Spearman's correlation, over
the halves, of the summed scores with minus the mean loss. Intervals are by the jackknife over halves; the
ceiling is what the true expected outcome would score.

Three runs (seeds 0, 1, 2) are trained by the same recipe in a plain loop, in which psgrad.RunCheckpoints
saves ten checkpoints each. Nothing here is tuned: all methods have their default options, and the weight
decay of training. What the defaults are was chosen on runs of other seeds, other halves and the 60 other
queries.

The bars: ten checkpoints of one run by the default .77, three runs .81, EK-FAC on ten .68.

Score matrices are kept in the cache. Seconds are of the processor, of fit and scores, of one thread.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from influence_contenders import margin
from influence_ours import cross_entropy
from influence_runs import Place, Row, Scorer, Task
from influence_truth import RECIPE, Array, Bench, perceptron

from psgrad.engine.influence.evaluation.metrics import ceiling, lds
from psgrad.engine.influence.methods.ekfac import EKFAC
from psgrad.engine.influence.methods.gradient_products import GradientDot, TracIn
from psgrad.engine.influence.methods.influence import Influence

RUNS = (0, 1, 2)
EXACT, FACTORED = Influence(weight_decay=RECIPE.weight_decay), EKFAC(weight_decay=RECIPE.weight_decay)
# One or two random rows of the curvature for each example, with its rows' inner products.
SAMPLED, TWICE = (
    Influence(curvature="sampled", draws=draws, weight_decay=RECIPE.weight_decay) for draws in (1, 2)
)
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


def task_of(bench: Bench) -> Task:
    training, queries = bench.data
    return Task(bench.cache, perceptron, training, queries, bench.recipe, cross_entropy, MEASUREMENTS)


def rows() -> list[Row]:
    return [
        Row("influence, final checkpoint", EXACT, 1, "last"),
        Row("influence, final checkpoint, margin", EXACT, 1, "last", "margin"),
        Row(TEN, EXACT, 1, "all"),
        Row("influence, ten checkpoints, plain mean", EXACT, 1, "all", average="plain"),
        Row("influence, five of the ten", EXACT, 1, "half"),
        Row("influence, sampled, final checkpoint", SAMPLED, 1, "last"),
        Row("influence, sampled, ten checkpoints", SAMPLED, 1, "all"),
        Row("influence, sampled twice, ten checkpoints", TWICE, 1, "all"),
        Row("ekfac, final checkpoint", FACTORED, 1, "last"),
        Row(TEN_FACTORED, FACTORED, 1, "all"),
        Row("ekfac, ten checkpoints, plain mean", FACTORED, 1, "all", average="plain"),
        Row("gradient_dot, final checkpoint", GradientDot(), 1, "last"),
        Row("tracin, ten checkpoints, their learning rates", TracIn(), 1, "all"),
        Row(THREE, EXACT, 3, "all"),
        Row("influence, sampled, three runs x ten", SAMPLED, 3, "all"),
        Row("ekfac, three runs x ten", FACTORED, 3, "all"),
    ]


def report(bench: Bench, scorer: Scorer, wanted: Sequence[Row]) -> dict[str, Any]:
    """Prints the table, and returns what the JSON has of it."""
    truth, best = bench.truth, ceiling(bench.truth.losses)
    runs = [Place.all_of(scorer.task, seed) for seed in RUNS]
    scores: dict[str, Array] = {}
    seconds: dict[str, float] = {}
    for row in wanted:
        scorer.seconds = {}
        whole = scorer.joined(row.method, row.places(runs), row.measurement, row.average)
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
    content = report(bench, Scorer(task_of(bench)), [row for row in rows() if row.name in arguments.only])
    content |= {"torch": torch.__version__, "threads": torch.get_num_threads(), "load": os.getloadavg()[0]}
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
