"""How well the derivative of a training run predicts the same run without some of its examples, and what it
costs.

    python benchmarks/influence_replay.py [--seeds 0 1 2] [--subsets 30] [--shares 0.01 0.05] [--json FILE]

Each case is a network 64-64-10 on 1,437 digits, trained for 80 epochs of SGD with momentum. A run is trained
again without random subsets of its examples, all else the same: initial weights, order, batches. A score is
the mean over 60 queries of Spearman's correlation, over the subsets, of the summed scores with the actual
losses, and its interval is by the jackknife over subsets. `slope` is that of the actual changes on the
predicted ones.

The bars, on the smooth case: a score of .95 with 1 and 5 % left out; the derivative of one query at most 6
times the time of its training; the derivatives of 60 queries through one step within 5 ms, where the median
of many steps counts. Times are of the processor, of one thread where OMP_NUM_THREADS=1.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from influence_ours import cross_entropy, examples
from influence_truth import RECIPE, Array, Bench
from script import command_line, write_json
from torch import nn

from psgrad.engine.execution.examples import Examples
from psgrad.engine.execution.objective import Objective
from psgrad.engine.influence.evaluation.jobs import LoadedRows
from psgrad.engine.influence.evaluation.metrics import lds, random_subsets, subset_sums
from psgrad.engine.influence.evaluation.retraining import fresh_model
from psgrad.engine.influence.methods.replay import measured
from psgrad.engine.influence.training_run import TrainingRun
from psgrad.engine.transforms.private_torch import tree_map

QUERIES = 60
LDS_BAR, COST_BAR, STEP_BAR = 0.95, 6.0, 5.0
STEPS_TIMED = 40


@dataclass(frozen=True)
class Case:
    """A network and its learning rate. smooth: whether the bars are about it."""

    name: str
    activation: type[nn.Module]
    learning_rate: float
    smooth: bool = False

    def build(self, seed: int) -> nn.Module:
        return nn.Sequential(nn.Linear(64, 64), self.activation(), nn.Linear(64, 10))

    def run(self, rows: LoadedRows, seed: int, epochs: int) -> TrainingRun:
        objective = Objective(fresh_model(self.build, seed), cross_entropy)
        initial = {name: value.detach().clone() for name, value in objective.params.items()}
        recipe = replace(RECIPE, learning_rate=self.learning_rate, epochs=epochs)
        return TrainingRun(objective, rows, recipe, seed, initial)


CASES = (Case("tanh, .02", nn.Tanh, 0.02, smooth=True), Case("ReLU, .1", nn.ReLU, 0.1))


def asked(run: TrainingRun, rows: LoadedRows) -> Examples:
    """The first queries at the end of the run."""
    assert rows.target is not None
    found = examples(run.objective.model, rows.inputs[0][:QUERIES], rows.target[:QUERIES])
    found.objective.params = run.final
    return found


def scored(run: TrainingRun, queries: Examples) -> Array:
    """[n, m]: minus the derivatives of the queries' losses."""
    gradients = queries.flat.split(queries.materialise())
    scores: Array = -run.weight_derivatives(gradients).T.numpy()
    return scores


def agreement(
    run: TrainingRun, queries: Examples, scores: Array, share: float, subsets: int
) -> dict[str, Any]:
    """Score, interval and slope where this share of the examples is left out. scores: [n, m]."""
    loaded = LoadedRows.of(queries)
    left_out = random_subsets(len(scores), subsets, share, np.random.default_rng([run.seed, 6]))
    losses = measured(queries, loaded, run.retrained(torch.from_numpy(~left_out)))
    whole = measured(queries, loaded, {name: value.unsqueeze(0) for name, value in run.final.items()})
    predicted, actual = subset_sums(scores, left_out), losses - whole
    found = lds({"replay": scores}, ~left_out, losses[:, None], "replay")["replay"]
    slope = float((predicted * actual).sum() / (predicted * predicted).sum())
    return {"left_out": share, "mean": found.mean, "interval": found.interval, "slope": slope}


def times(case: Case, rows: LoadedRows, queries: LoadedRows, epochs: int) -> dict[str, float]:
    """training_seconds, one_query_seconds and their ratio; step_ms, of a step's derivatives for all
    queries.
    """
    run = case.run(rows, 0, epochs)
    seconds = {"training_seconds": clocked(lambda: run.final)}
    at_end = asked(run, queries)
    gradients = at_end.materialise()
    one, every = (at_end.flat.split(part) for part in (gradients[:1], gradients))
    seconds["one_query_seconds"] = clocked(lambda: run.weight_derivatives(one))
    seconds["ratio"] = seconds["one_query_seconds"] / seconds["training_seconds"]
    start, batch = run.start, run._batch(0)
    of_state = tree_map(lambda leaf: leaf.new_zeros((QUERIES, *leaf.shape)), start.state)
    each = [
        clocked(lambda: run._pulled(start.params, start.state, batch, every, of_state))
        for _ in range(STEPS_TIMED)
    ]
    seconds["step_ms"] = 1000 * statistics.median(each[STEPS_TIMED // 4 :])  # the first ones are captured
    return seconds


def clocked(run: Callable[[], Any]) -> float:
    """Seconds of the processor."""
    start = time.process_time()
    run()
    return time.process_time() - start


def report(bench: Bench, arguments: argparse.Namespace) -> dict[str, Any]:
    """Prints the table, and returns what the JSON has of it."""
    rows, queries = bench.data
    content: dict[str, Any] = {"cases": [], "bars": {}}
    print(f"{'':<12}{'left out':>9}{'seed':>6}{'LDS':>7}{'interval':>18}{'slope':>7}")
    for case in CASES:
        found = []
        for seed in arguments.seeds if arguments.shares else []:
            run = case.run(rows, seed, arguments.epochs)
            at_end = asked(run, queries)
            scores = scored(run, at_end)
            for share in arguments.shares:
                row = {"seed": seed, **agreement(run, at_end, scores, share, arguments.subsets)}
                low, high = row["interval"]
                interval = f"{low:.3f} .. {high:.3f}"
                print(
                    f"{case.name:<12}{share:>9.0%}{seed:>6}{row['mean']:>7.3f}{interval:>18}{row['slope']:>7.2f}",
                    flush=True,
                )
                found.append(row)
        content["cases"].append({"name": case.name, "rows": found})
        if case.smooth:
            for share in arguments.shares:
                mean = statistics.mean(row["mean"] for row in found if row["left_out"] == share)
                bar(content, f"{share:.0%} left out", mean, LDS_BAR, mean >= LDS_BAR)
    smooth = next(case for case in CASES if case.smooth)
    content["times"] = spent = times(smooth, rows, queries, arguments.epochs)
    bar(content, "one query, in trainings", spent["ratio"], COST_BAR, spent["ratio"] <= COST_BAR)
    bar(content, f"a step, {QUERIES} queries, ms", spent["step_ms"], STEP_BAR, spent["step_ms"] <= STEP_BAR)
    return content


def bar(content: dict[str, Any], name: str, value: float, limit: float, reached: bool) -> None:
    content["bars"][name] = {"value": value, "bar": limit, "reached": reached}
    print(f"{'pass' if reached else 'FAIL'}: {name}: {value:.3f}, bar {limit:g}", flush=True)


def main() -> None:
    parser = command_line(
        "Derivatives of a training run beside the same run without some examples, on digits."
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], metavar="N")
    parser.add_argument("--shares", type=float, nargs="*", default=[0.01, 0.05], metavar="SHARE")
    parser.add_argument("--subsets", type=int, default=30, help="of each share (default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=RECIPE.epochs, help="(default: %(default)s)")
    arguments = parser.parse_args()
    content = report(Bench(Path(tempfile.gettempdir()) / "psgrad-influence"), arguments)
    content |= {"torch": torch.__version__, "threads": torch.get_num_threads(), "load": os.getloadavg()[0]}
    write_json(arguments, content)


if __name__ == "__main__":
    main()
