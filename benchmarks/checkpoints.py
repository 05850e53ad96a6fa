"""Measures over checkpoints: how well they find flipped labels.

    python benchmarks/checkpoints.py [--json FILE]

The digits of configs/digits-checkpoints.yaml, 54 of 1,797 labels flipped, at five checkpoints of one run. For
each column the area under the ROC curve and how many of the flipped digits are among the 54 with the most
suspicious values; beside them loss and gradient norm at each checkpoint alone.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.metrics import roc_auc_score

from benchmarks.script import command_line, write_json
from psgrad.commands.analyze import analyze
from psgrad.config import load_config

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


def main() -> None:
    parser = command_line("Measures over checkpoints: what they find.")
    arguments = parser.parse_args()
    content: dict[str, Any] = {"quality": quality()}
    print(f"{'':<36}{'AUC':>8}{'flipped in the first 54':>26}")
    for name, row in content["quality"].items():
        print(f"{name:<36}{row['auc']:>8.3f}{row['found']:>26.1f}")
    write_json(arguments, content)


if __name__ == "__main__":
    main()
