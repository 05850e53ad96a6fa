"""How well scores find labels that were flipped on purpose, on digits: self-influence by several methods, and
simpler scores.

    python benchmarks/influence_mislabel.py [--cache DIR] [--flips 5] [--json FILE]

A tenth of the labels is flipped to another class, five times, and the perceptron of influence_truth.py is
trained on them, for 80 epochs and for twelve, which leave more of the flips unlearnt. Scores are of one
model; the cross-validated ones are of five, each of which has not seen the rows that it judges. AUC, average
precision and recall in the first tenth, with standard deviations over the flips.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from influence_ours import examples
from influence_truth import FIRST_SEED, RECIPE, Array, Bench

from benchmarks.script import command_line, write_json
from psgrad.engine.influence.evaluation.jobs import Job
from psgrad.engine.influence.evaluation.mislabel import (
    Detection,
    detect,
    flip,
    folds,
    over_flips,
    own_controls,
    suspicion,
)
from psgrad.engine.influence.evaluation.statistics import self_influences
from psgrad.engine.influence.method import Checkpoint, Method
from psgrad.engine.influence.methods.ekfac import EKFAC
from psgrad.engine.influence.methods.gradient_products import GradientDot
from psgrad.engine.influence.methods.influence import Influence

SHARE = 0.1
METHODS: dict[str, Method] = {
    "gradient_dot": GradientDot(),
    "influence": Influence(weight_decay=RECIPE.weight_decay),
    "ekfac": EKFAC(weight_decay=RECIPE.weight_decay),
}
RECIPES = {"80 epochs": RECIPE, "12 epochs": replace(RECIPE, epochs=12)}


def scored(bench: Bench, number: int) -> Iterator[tuple[str, Detection]]:
    """Each score and how well it finds one set of flips."""
    training, _ = bench.data
    assert training.target is not None
    random = np.random.default_rng(number)
    labels, flipped = flip(training.target.numpy(), SHARE, random)
    target = torch.as_tensor(labels)
    parts = folds(len(labels), random)
    seed = FIRST_SEED * (number + 10)
    whole = bench.train([Job("all rows", bench.everything, seed, target)])
    left = [
        Job(f"fold {fold}", np.setdiff1d(bench.everything, part), seed + 1 + fold, target)
        for fold, part in enumerate(parts)
    ]
    judged = np.empty((len(labels), 10))
    for part, outputs in zip(parts, bench.train(left).outputs(training), strict=True):
        judged[part] = outputs[part]

    model = whole.member(0).double()
    rows = examples(model, training.inputs[0].double(), target)
    found: dict[str, Array] = {
        f"self-influence, {name}": self_influences(method, [method.fit(rows, Checkpoint())])
        for name, method in METHODS.items()
    }
    found |= own_controls(rows) | suspicion(whole.outputs(training)[0], labels)
    found |= {f"cross-validated {name}": score for name, score in suspicion(judged, labels).items()}
    for name, score in found.items():
        yield name, detect(score, flipped)


def main() -> None:
    parser = command_line("Find flipped labels by self-influence and by simpler scores.")
    parser.add_argument(
        "--cache",
        type=Path,
        default=Path(tempfile.gettempdir()) / "psgrad-influence",
        metavar="DIR",
        help="trained models",
    )
    parser.add_argument("--flips", type=int, default=5, help="sets of flips (default: %(default)s)")
    arguments = parser.parse_args()
    content: dict[str, Any] = {}
    for title, recipe in RECIPES.items():
        bench = Bench(arguments.cache, recipe=recipe)
        found: dict[str, list[Detection]] = {}
        for number in range(arguments.flips):
            for name, detection in scored(bench, number):
                found.setdefault(name, []).append(detection)
        print(f"\n{title:<36}{'AUC':>15}{'average precision':>22}{'recall at 10 %':>18}")
        content[title] = {}
        for name, detections in found.items():
            mean = over_flips(detections)
            content[title][name] = asdict(mean)
            shown = (
                (mean.auc, mean.auc_deviation),
                (mean.average_precision, mean.average_precision_deviation),
            )
            both = "".join(
                f"{value:>{width}.3f} ± {deviation:.3f}"
                for width, (value, deviation) in zip((10, 14), shown, strict=True)
            )
            print(f"{name:<36}{both}{mean.recall:>10.3f} ± {mean.recall_deviation:.3f}", flush=True)
    write_json(arguments, content)


if __name__ == "__main__":
    main()
