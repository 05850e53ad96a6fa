"""The way of each sample through training: its loss, gradient norm and prediction at each checkpoint."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch

from psgrad.engine.measures.measure import Gathered, Measure, Setting
from psgrad.engine.measures.moments import History, require_moments
from psgrad.engine.measures.moments.agreement import slope

_KEPT = ("loss", "grad_norm", "confidence", "right", "prediction")


@dataclass
class Trajectory(Measure):
    """Every sample at every checkpoint, and a few numbers that summarise its changes."""

    name: ClassVar[str] = "trajectory"
    title: ClassVar[str] = "Trajectories over checkpoints"
    formula: ClassVar[str] = (
        "confidence mean_t p_t, variability sqrt(mean_t (p_t - mean p)^2), p_t the probability of the label at checkpoint t; "
        "correctness mean_t r_t; slopes by least squares over t = 0, 1, ..., T - 1"
    )
    unit: ClassVar[str] = "as each column says"
    source: ClassVar[str] = (
        "Swayamdipta et al.: Dataset Cartography: Mapping and Diagnosing Datasets with Training Dynamics (EMNLP 2020), section 2"
    )
    cost: ClassVar[str] = "one pass of norms for each checkpoint, shared with the other measures over checkpoints"
    meanings: ClassVar[dict[str, str]] = {
        "mean_confidence": "probability of the label, mean over the checkpoints (0 to 1; of several positions their mean)",
        "variability": "its standard deviation over the checkpoints (probability; T in the denominator)",
        "correctness": "share of the checkpoints whose prediction is right (0 to 1; of several positions their mean)",
        "loss_slope": "slope of the loss from checkpoint to checkpoint ({loss} per checkpoint)",
        "norm_slope": "slope of the gradient norm from checkpoint to checkpoint (units of the norm per checkpoint)",
    }
    needs: ClassVar[tuple[str, ...]] = ("moments",)

    def prepare(self, setting: Setting) -> None:
        require_moments(self, setting, 2, "one point is no way")
        self._setting = setting

    def gather(self, rows: Mapping[str, torch.Tensor]) -> Gathered:
        names = [moment.name for moment in self._setting.moments]
        history = History.of(names, rows)
        columns = {"loss_slope": slope(history.whole("loss")), "norm_slope": slope(history.whole("grad_norm"))}
        if "confidence" in history:
            confidence = history.whole("confidence")
            columns |= {"mean_confidence": confidence.mean(1), "variability": confidence.std(1, correction=0)}
            columns["correctness"] = history.whole("right").mean(1)
        return Gathered(
            columns,
            {"checkpoints": names, "nonfinite": history.nonfinite()},
            {"checkpoints": _by_checkpoint(history)},
            {name: history[name].float() for name in _KEPT if name in history},
        )


def _by_checkpoint(history: History) -> dict[str, Any]:
    """A row a checkpoint: how all samples that are finite there stand."""
    rows = [_row(history, t) for t in range(len(history.names))]
    return {"checkpoint": list(history.names), **{name: [row[name] for row in rows] for name in rows[0]}}


def _row(history: History, t: int) -> dict[str, float]:
    finite = history.finite[:, t]
    loss, norm = history["loss"][finite, t], history["grad_norm"][finite, t]
    row: dict[str, float] = {
        "samples": int(finite.sum()),
        "nonfinite": int((~finite).sum()),
        "mean_loss": float(loss.mean()),
        "median_loss": _quantile(loss, 0.5),
        "median_norm": _quantile(norm, 0.5),
        "q05_norm": _quantile(norm, 0.05),
        "q95_norm": _quantile(norm, 0.95),
    }
    if "confidence" in history:
        row["mean_confidence"] = float(history["confidence"][finite, t].nanmean())
        row["accuracy"] = float(history["right"][finite, t].nanmean())
    return row


def _quantile(values: torch.Tensor, q: float) -> float:
    """Of any number of values (torch.quantile takes 16 million at most); NaN of none."""
    return float(np.quantile(values.numpy(), q)) if len(values) else math.nan
