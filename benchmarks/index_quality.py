"""How well scores of an index predict retraining, on digits, beside the same method without an index.

    python benchmarks/index_quality.py [--models 1] [--cache DIR] [--json FILE]

The truth is that of influence_quality.py: 100 random halves of the 1,437 training digits, three models
trained on each, and the loss of 300 queries. A score is the mean over queries of Spearman's correlation, over
the halves, of the summed scores with minus the mean loss. Bytes are those of a row and a checkpoint, with its
scales and exponent; not its loss, its norm and its digest, which all rows have.

    no index                 all 4,810 entries of each gradient
    dense                    2,048 columns in float32, the default of an index
    others                   in a twentieth of those bytes: fewer columns, in 8 bits

The bar: at a twentieth of the bytes of the dense projection at most .01 less than without an index.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from influence_contenders import Problem
from influence_ours import cross_entropy, examples
from influence_truth import Bench
from norms import machine

from psgrad.engine.influence.evaluation.metrics import ceiling, lds
from psgrad.engine.influence.index.build import build_index, from_index
from psgrad.engine.influence.index.stored_index import IndexSpec, describe
from psgrad.engine.influence.method import Checkpoint, Method
from psgrad.engine.influence.methods.gradient_products import GradientDot
from psgrad.engine.influence.methods.projected import TRAK, ProjectedInfluence
from psgrad.engine.influence.ranking import joined_scores
from psgrad.run.gradient_index import GradientIndex

Array = np.ndarray[Any, Any]
LOST, SHARE = 0.01, 20
UNINDEXED, DENSE = "no index", "dense, float32"
METHODS: dict[str, Method] = {
    "trak": TRAK(projection="none"),
    "projected_influence": ProjectedInfluence(projection="none"),
    "gradient_dot": GradientDot(),
}
SPECS = {
    DENSE: IndexSpec(dimension=2048, features="margin"),
    "100 columns, float32": IndexSpec(dimension=100, features="margin"),
    "400 columns, int8": IndexSpec(dimension=400, features="margin", dtype="int8"),
    "two-sided 9 x 9, int8": IndexSpec(dimension=81, projection="two-sided", features="margin", dtype="int8"),
}


@dataclass(frozen=True)
class Measured:
    """Scores [n, m], bytes of a row, and the processor's seconds for the scores."""

    scores: Array
    size: float
    seconds: float


def scored(problem: Problem, method: Method, spec: IndexSpec | None) -> Measured:
    """By an index of these contents, or without one."""
    models = [problem.load(number) for number in range(len(problem.checkpoints))]
    training = [examples(model, problem.inputs, problem.target) for model in models]
    asked = [examples(model, problem.query_inputs, problem.query_target, cross_entropy) for model in models]
    with tempfile.TemporaryDirectory() as folder:
        size, answering = float("nan"), method
        if spec is not None:
            index = GradientIndex.create(Path(folder), describe(spec, training[0], {}, len(training)))
            build_index(index, training.__getitem__)
            answering, size = from_index(method, index), row_bytes(index)
        start = time.process_time()
        fits = [answering.fit(rows, Checkpoint(number, 1.0)) for number, rows in enumerate(training)]
        blocks = [block.scores for block in joined_scores(answering, fits, asked)]
        return Measured(torch.cat(blocks).numpy(), size, time.process_time() - start)


def row_bytes(index: GradientIndex) -> float:
    arrays = index.read(0, 0)
    kept = [arrays[name] for name in ("rows", "scales", "exponent") if name in arrays]
    return sum(array.nbytes for array in kept) / len(arrays["rows"])


def report(bench: Bench, models: int) -> dict[str, Any]:
    """Prints the tables, and returns what the JSON has of them."""
    problem = bench.problem(bench.whole, models, torch.float32)
    truth, best = bench.truth, ceiling(bench.truth.losses)
    content: dict[str, Any] = {"models": models, "ceiling": None if best is None else best.best}
    for name, method in METHODS.items():
        found = {UNINDEXED: scored(problem, method, None)}
        found |= {label: scored(problem, method, spec) for label, spec in SPECS.items()}
        matrices = {label: each.scores[:, ~bench.tuning_queries] for label, each in found.items()}
        judged = lds(matrices, truth.subsets, truth.losses, UNINDEXED)
        print(f"\n{name:<44}{'LDS':>6}{'lost':>8}{'bytes':>8}{'CPU seconds':>13}")
        rows = []
        for label, each in found.items():
            lost = judged[UNINDEXED].mean - judged[label].mean
            small = each.size * SHARE <= found[DENSE].size
            rows.append(
                {
                    "name": label,
                    "lds": judged[label].mean,
                    "interval": judged[label].interval,
                    "lost": lost,
                    "bytes": None if label == UNINDEXED else each.size,
                    "seconds": each.seconds,
                    "passed": lost <= LOST if small else None,
                }
            )
            verdict = {True: "  pass", False: "  FAIL", None: ""}[rows[-1]["passed"]]
            print(
                f"{label:<44}{judged[label].mean:6.3f}{lost:8.3f}{each.size:8.0f}{each.seconds:13.1f}{verdict}"
            )
        content[name] = rows
    if best is not None:
        print(f"\nceiling {best.best:.3f}")
    return content


def main() -> None:
    parser = argparse.ArgumentParser(description="Linear datamodeling scores of indexes, on digits.")
    parser.add_argument("--models", type=int, default=1, help="of which scores are joined, up to 10")
    parser.add_argument(
        "--cache", type=Path, default=Path(tempfile.gettempdir()) / "psgrad-influence", help="trained models"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers to this file too")
    arguments = parser.parse_args()
    content = report(Bench(arguments.cache), arguments.models)
    content["machine"] = machine(torch.device("cpu"))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
