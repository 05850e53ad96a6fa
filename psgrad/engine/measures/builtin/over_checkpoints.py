"""Measures over the checkpoints of a training run: `moments`, which gathers loss, norm and prediction at each
checkpoint, and what is made of them: GraNd, mean EL2N, forgetting events and trajectories.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch

from psgrad.engine.execution.chunk_measure import Columns
from psgrad.engine.gradients import PerSampleGradients, SquareNorms
from psgrad.engine.measures.checkpoint_history import (
    History,
    checkpoint_summary,
    column,
    disagreement,
    rank_correlation,
    require_checkpoints,
    require_labels,
    slope,
)
from psgrad.engine.measures.measure import (
    Arrays,
    CheckpointModel,
    Gathered,
    Measure,
    OwnPass,
    Setting,
    require_classes,
)


class CheckpointOutputs(Measure):
    """Loss, gradient norm and prediction of each sample at each checkpoint, for the measures that need them;
    not stored afterwards.
    """

    name: ClassVar[str] = "moments"
    title: ClassVar[str] = "Checkpoints, each passed once"
    formula: ClassVar[str] = (
        "loss l_i(theta_t), norm |g_i(theta_t)|, probability of the label, prediction, at each checkpoint t"
    )
    unit: ClassVar[str] = "as loss and grad_norm"
    source: ClassVar[str] = "none: grand, el2n_over_checkpoints, forgetting and trajectory use it"
    cost: ClassVar[str] = "one pass of norms for each checkpoint"

    def prepare(self, setting: Setting) -> None:
        require_checkpoints(self, setting, 1, "the samples pass at each")
        self._setting = setting

    def passes(self) -> Sequence[OwnPass]:
        return [
            OwnPass(f"checkpoint-{t}", partial(self._run, t, checkpoint))
            for t, checkpoint in enumerate(self._setting.checkpoints)
        ]

    def gather(self, rows: Mapping[str, torch.Tensor]) -> Gathered:
        history = History.of(self._setting.checkpoint_names, rows)
        return Gathered(
            numbers={"checkpoints": self._setting.checkpoint_names, "nonfinite": history.nonfinite()}
        )

    def _run(self, t: int, checkpoint: CheckpointModel, rows: range, chunk_size: int) -> Iterator[Columns]:
        """The pass at checkpoint t, whose weights are in memory during the pass."""
        objective = checkpoint.objective().with_summary(self._summary())
        there = replace(self._setting.examples, objective=objective).sized(chunk_size)
        return there.stream.run(rows.stop, [CheckpointColumns(t)], start=rows.start)

    def _summary(self) -> Callable[[Any, Any], dict[str, torch.Tensor]]:
        return checkpoint_summary(self._setting.kind, self._setting.ignore_index)


class CheckpointColumns:
    """Loss, norm and the kept part of the output at checkpoint t, as columns [k, 1], which are not columns of
    the table of samples.
    """

    needs_factors = False

    def __init__(self, t: int) -> None:
        self._t = t

    def columns(self, found: PerSampleGradients | SquareNorms) -> Arrays:
        columns = {"loss": found.losses.double(), "grad_norm": found.square_norms().sqrt(), **found.aux}
        return {column(name, self._t): values.unsqueeze(1) for name, values in columns.items()}

    def keep(self) -> None:
        """Nothing is gathered."""


class OverCheckpoints(Measure):
    """A measure made from what `moments` gathered of each sample at each checkpoint.

    Class attributes:
        why: what is wrong with a single checkpoint.
    """

    cost: ClassVar[str] = (
        "one pass of norms for each checkpoint, shared with the other measures over checkpoints"
    )
    needs: ClassVar[tuple[str, ...]] = (CheckpointOutputs.name,)
    why: ClassVar[str] = ""

    def prepare(self, setting: Setting) -> None:
        require_checkpoints(self, setting, 2, self.why)
        self._setting = setting

    def history(self, rows: Mapping[str, torch.Tensor]) -> History:
        """rows: as `gather` has them, name -> [n, ...]."""
        return History.of(self._setting.checkpoint_names, rows)

    def mean_and_spread(
        self, rows: Mapping[str, torch.Tensor], what: str, mean: str, spread: str
    ) -> Gathered:
        """The columns `mean` and `spread` [n] of the number `what` of the history over the checkpoints, and
        how far the checkpoints agree on the order of the samples.
        """
        values = self.history(rows).whole(what)
        correlation = rank_correlation(values)
        warning = disagreement(correlation, self._setting.checkpoint_names, self.name)
        if warning:
            self._setting.say(warning)
        return Gathered(
            {mean: values.mean(1), spread: values.std(1)},
            {
                "checkpoints": self._setting.checkpoint_names,
                "rank_correlation": correlation,
                "warning": warning,
            },
        )


@dataclass
class GraNd(OverCheckpoints):
    """Mean and spread of the gradient norm over the checkpoints of one run, or over the last (or first)
    checkpoints of several runs.
    """

    name: ClassVar[str] = "grand"
    title: ClassVar[str] = "GraNd, the mean gradient norm over checkpoints"
    formula: ClassVar[str] = (
        "mean_t |g_i(theta_t)|_2, g_i the gradient of the sample's loss in all parameters"
    )
    unit: ClassVar[str] = "{loss} per unit of parameter"
    source: ClassVar[str] = (
        "Paul, Ganguli, Dziugaite: Deep Learning on a Data Diet (2021), definition 2.1, early in training and"
        " over several seeds; Kirsch, Does Deep Learning on a Data Diet reproduce? Overall yes, but GraNd at"
        " Initialization does not (2023), found no use in it at initialisation, where it follows the norm of"
        " the input"
    )
    meanings: ClassVar[dict[str, str]] = {
        "grand": (
            "gradient norm, mean over the checkpoints ({loss} per unit of parameter); NaN if it is not finite"
            " at one of them"
        ),
        "grand_std": (
            "its standard deviation over the checkpoints ({loss} per unit of parameter; T - 1 in the"
            " denominator)"
        ),
    }
    why: ClassVar[str] = "at one checkpoint it is grad_norm, which every run has"

    def gather(self, rows: Mapping[str, torch.Tensor]) -> Gathered:
        return self.mean_and_spread(rows, "grad_norm", "grand", "grand_std")


@dataclass
class EL2NOverCheckpoints(OverCheckpoints):
    """Mean and spread of the error L2-norm over the checkpoints of one run, or of several runs; el2n is the
    value at model.checkpoint.
    """

    name: ClassVar[str] = "el2n_over_checkpoints"
    title: ClassVar[str] = "Error L2-norm over checkpoints"
    formula: ClassVar[str] = "mean_t |softmax(z(theta_t)) - onehot(y)|_2"
    unit: ClassVar[str] = "probability, 0 to sqrt(2)"
    source: ClassVar[str] = (
        "Paul, Ganguli, Dziugaite: Deep Learning on a Data Diet (2021), definition 2.2: the mean over seeds,"
        " early in training"
    )
    meanings: ClassVar[dict[str, str]] = {
        "el2n_mean": (
            "distance of the predicted probabilities from the label's, mean over the checkpoints"
            " (probability, 0 to sqrt(2))"
        ),
        "el2n_std": "its standard deviation over the checkpoints (probability; T - 1 in the denominator)",
    }
    why: ClassVar[str] = "at one checkpoint it is el2n"

    def prepare(self, setting: Setting) -> None:
        require_classes(self, setting)
        super().prepare(setting)

    def gather(self, rows: Mapping[str, torch.Tensor]) -> Gathered:
        return self.mean_and_spread(rows, "el2n", "el2n_mean", "el2n_std")


@dataclass
class Forgetting(OverCheckpoints):
    """Forgetting events between the checkpoints; events between two neighbouring checkpoints are missed."""

    name: ClassVar[str] = "forgetting"
    title: ClassVar[str] = "Forgetting events"
    formula: ClassVar[str] = (
        "sum_t max(0, r_t - r_t+1), r_t = 1 if the prediction at checkpoint t is right, else 0"
    )
    unit: ClassVar[str] = "events"
    source: ClassVar[str] = (
        "Toneva et al.: An Empirical Study of Example Forgetting during Deep Neural Network Learning (ICLR"
        " 2019), section 3; there r_t is computed at each step that uses the sample, here at the checkpoints"
    )
    meanings: ClassVar[dict[str, str]] = {
        "forgetting_events": (
            "how often it changed from right to wrong between two checkpoints; T, the number of checkpoints,"
            " for a sample that was never right (it sorts above all others, which have at most T/2). With"
            " positions: r_t is the share of positions that are right, and the events are the sum of the"
            " shares that were lost (events)"
        ),
        "never_learnt": "1 if the prediction was right at no checkpoint (in no position), else 0",
        "unforgettable": "1 if it was learnt and not lost afterwards, else 0",
        "first_learnt": (
            "the first checkpoint, counted from 1, whose prediction was right (in some position); NaN if"
            " there is none"
        ),
    }
    why: ClassVar[str] = "nothing is forgotten at one"

    def prepare(self, setting: Setting) -> None:
        require_labels(self, setting)
        super().prepare(setting)

    def gather(self, rows: Mapping[str, torch.Tensor]) -> Gathered:
        names, history = self._setting.checkpoint_names, self.history(rows)
        right = history.whole("right")  # [n, T]
        finite = torch.isfinite(right).all(1)
        learnt = (right > 0).any(1)
        lost = (right[:, :-1] - right[:, 1:]).clamp(min=0).sum(1)
        result = {
            "forgetting_events": lost.where(learnt, float(len(names))),
            "never_learnt": (~learnt).double(),
            "unforgettable": (learnt & (lost == 0)).double(),
            "first_learnt": (right > 0).double().argmax(1).double().add(1).where(learnt, torch.nan),
        }
        columns = {name: column.where(finite, torch.nan) for name, column in result.items()}
        counts = torch.bincount(lost[finite & learnt].ceil().long()).tolist()
        numbers = {
            "checkpoints": names,
            "counts": {str(events): count for events, count in enumerate(counts) if count},
            "never_learnt": int((finite & ~learnt).sum()),
            "unforgettable": int((finite & learnt & (lost == 0)).sum()),
            "not_finite": int((~finite).sum()),
        }
        return Gathered(columns, numbers)


_KEPT = ("loss", "grad_norm", "confidence", "right", "prediction")


@dataclass
class Trajectory(OverCheckpoints):
    """Every sample at every checkpoint, and a few numbers that summarise its changes."""

    name: ClassVar[str] = "trajectory"
    title: ClassVar[str] = "Trajectories over checkpoints"
    formula: ClassVar[str] = (
        "confidence mean_t p_t, variability sqrt(mean_t (p_t - mean p)^2), p_t the probability of the label"
        " at checkpoint t; correctness mean_t r_t; slopes by least squares over t = 0, 1, ..., T - 1"
    )
    unit: ClassVar[str] = "as each column says"
    source: ClassVar[str] = (
        "Swayamdipta et al.: Dataset Cartography: Mapping and Diagnosing Datasets with Training Dynamics"
        " (EMNLP 2020), section 2"
    )
    meanings: ClassVar[dict[str, str]] = {
        "mean_confidence": (
            "probability of the label, mean over the checkpoints (0 to 1; of several positions their mean)"
        ),
        "variability": "its standard deviation over the checkpoints (probability; T in the denominator)",
        "correctness": (
            "share of the checkpoints whose prediction is right (0 to 1; of several positions their mean)"
        ),
        "loss_slope": "slope of the loss from checkpoint to checkpoint ({loss} per checkpoint)",
        "norm_slope": (
            "slope of the gradient norm from checkpoint to checkpoint (units of the norm per checkpoint)"
        ),
    }
    why: ClassVar[str] = "one point has no slope"

    def gather(self, rows: Mapping[str, torch.Tensor]) -> Gathered:
        names, history = self._setting.checkpoint_names, self.history(rows)
        columns = {
            "loss_slope": slope(history.whole("loss")),
            "norm_slope": slope(history.whole("grad_norm")),
        }
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
    """A row a checkpoint: statistics of all samples that are finite there."""
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
    """The quantile of any number of values (torch.quantile takes 16 million at most); NaN of none."""
    return float(np.quantile(values.numpy(), q)) if len(values) else math.nan
