"""Measures over checkpoints: how well they find flipped labels, and whether several checkpoints in one pass
are faster.

    python benchmarks/checkpoints.py [--json FILE]

The digits of configs/digits-checkpoints.yaml, 54 of 1,797 labels flipped, at five checkpoints of one run. For
each column the area under the ROC curve and how many of the flipped digits are among the 54 with the most
suspicious values; beside them loss and gradient norm at each checkpoint alone. Then the seconds of all five
checkpoints one after another and with stacked weights, in one thread, interleaved, median of seven.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.metrics import roc_auc_score
from torch import nn

from benchmarks.script import command_line, write_json
from psgrad.commands.analyze import analyze
from psgrad.config import load_config
from psgrad.data.rows import Block
from psgrad.engine.execution.examples import Examples
from psgrad.engine.execution.objective import Objective
from psgrad.engine.measures.builtin.over_checkpoints import CheckpointColumns
from psgrad.engine.measures.checkpoint_history import checkpoint_summary
from psgrad.engine.measures.checkpoint_passes import StackedModels, grouped

CONFIGS = Path(__file__).parents[1] / "configs"
# Column -> whether large values are the suspicious ones.
COLUMNS = {
    "loss": True,
    "grad_norm": True,
    "grand": True,
    "grand_std": True,
    "el2n_mean": True,
    "forgetting_events": True,
    "mean_confidence": False,
    "variability": True,
    "correctness": False,
    "loss_slope": True,
    "norm_slope": True,
    "vog": True,
    "vog_z": True,
}
CHECKPOINTS, REPEATS, CHUNKS = 5, 7, 12


def quality() -> dict[str, dict[str, float]]:
    """name -> auc, found: of each column, and of loss and norm at each checkpoint."""
    with tempfile.TemporaryDirectory() as folder:
        result = analyze(
            load_config(CONFIGS / "digits-checkpoints.yaml", [f"output={folder}/run"]), report=False
        )
    frame = result.samples.sort_values("index")
    names = {
        each["id"] for each in json.loads((CONFIGS / "digits" / "flipped.json").read_text(encoding="utf-8"))
    }
    flipped = frame["id"].isin(names).to_numpy()
    scores = {name: (1 if up else -1) * frame[name].to_numpy() for name, up in COLUMNS.items()}
    trajectory = result.measures["trajectory"]
    for t, file in enumerate(trajectory.numbers["checkpoints"]):
        scores |= {
            f"{name} at {Path(file).stem}": trajectory.arrays[name][:, t] for name in ("loss", "grad_norm")
        }
    return {
        name: {"auc": float(roc_auc_score(flipped, score)), "found": found(score, flipped)}
        for name, score in scores.items()
    }


def found(score: np.ndarray[Any, Any], flipped: np.ndarray[Any, Any]) -> float:
    """How many of the flipped are among as many with the largest scores; those that tie at the edge count by
    their share.
    """
    count = int(flipped.sum())
    edge = np.sort(score)[-count]
    above, tied = score > edge, score == edge
    return float(flipped[above].sum() + (count - above.sum()) * flipped[tied].mean())


def models() -> dict[str, Callable[[], nn.Module]]:
    """Networks for the digits, by name."""
    sys.path.insert(0, str(CONFIGS / "digits"))
    from model import build

    return {
        "digits CNN, 30k parameters": build,
        "small CNN, 2.6k parameters": lambda: build(4, 16),
        "perceptron, 3.6k parameters": lambda: nn.Sequential(
            nn.Flatten(), nn.Linear(64, 48), nn.Tanh(), nn.Linear(48, 10)
        ),
    }


def speed(make: Callable[[], nn.Module], chunk_size: int) -> dict[str, Any]:
    """Seconds of a pass of all checkpoints, both ways, and which one the plan chooses."""
    with np.load(CONFIGS / "digits" / "digits.npz") as data:
        x, y = torch.from_numpy(data["image"]), torch.from_numpy(data["label"])
    n = min(len(x), chunk_size * CHUNKS)
    objectives = [
        Objective(make().eval(), F.cross_entropy, checkpoint_summary("class")) for _ in range(CHECKPOINTS)
    ]
    ensemble = StackedModels.of(objectives[0], [objective.model for objective in objectives])

    def examples(number: int) -> Examples:
        return Examples(
            objectives[number],
            lambda start, stop: Block((x[start:stop],), y[start:stop]),
            n,
            {"chunk_size": chunk_size},
        )

    def alone() -> None:
        for number in range(CHECKPOINTS):
            for _ in examples(number).stream.run(n, [CheckpointColumns(number)]):
                pass

    def together() -> None:
        for _ in examples(0).stream.run(n, [CheckpointColumns(0)], ensemble.columns):
            pass

    taken: dict[str, list[float]] = {"alone": [], "together": []}
    for _ in range(REPEATS):
        for name, way in (("alone", alone), ("together", together)):
            begin = time.perf_counter()
            way()
            taken[name].append(time.perf_counter() - begin)
    seconds = {name: statistics.median(each) for name, each in taken.items()}
    chosen = grouped(examples(0), objectives[0], CHECKPOINTS, chunk_size)
    return {
        **seconds,
        "rows": n,
        "chosen": "together" if max(chosen.sizes) > 1 else "alone",
        "why": chosen.why,
    }


def main() -> None:
    parser = command_line("Measures over checkpoints: what they find, and how they pass.")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    content: dict[str, Any] = {"quality": quality(), "speed": {}}
    print(f"{'':<36}{'AUC':>8}{'flipped in the first 54':>26}")
    for name, row in content["quality"].items():
        print(f"{name:<36}{row['auc']:>8.3f}{row['found']:>26.1f}")
    print(f"\n{'five checkpoints, seconds':<36}{'chunk':>8}{'one by one':>12}{'together':>12}{'  taken':<12}")
    for name, make in models().items():
        content["speed"][name] = {}
        for chunk_size in (8, 64, 512):
            row = content["speed"][name][str(chunk_size)] = speed(make, chunk_size)
            print(
                f"{name:<36}{chunk_size:>8}{row['alone']:>12.3f}{row['together']:>12.3f} "
                f" {row['chosen']:<12}",
                flush=True,
            )
    write_json(arguments, content)


if __name__ == "__main__":
    main()
