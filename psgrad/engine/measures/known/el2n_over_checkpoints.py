"""EL2N, averaged over checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from psgrad.engine.measures.measure import Gathered, Measure, Setting
from psgrad.engine.measures.moments import History, require_moments
from psgrad.engine.measures.moments.agreement import disagreement, rank_correlation
from psgrad.engine.measures.refusals import require_classes


@dataclass
class EL2NOverCheckpoints(Measure):
    """Mean and spread of the error L2-norm over the checkpoints of one run, or of several runs; el2n is the value at model.checkpoint."""

    name: ClassVar[str] = "el2n_over_checkpoints"
    title: ClassVar[str] = "Error L2-norm over checkpoints"
    formula: ClassVar[str] = "mean_t |softmax(z(theta_t)) - onehot(y)|_2"
    unit: ClassVar[str] = "probability, 0 to sqrt(2)"
    source: ClassVar[str] = (
        "Paul, Ganguli, Dziugaite: Deep Learning on a Data Diet (2021), definition 2.2: the mean over seeds, early in training"
    )
    cost: ClassVar[str] = "one pass of norms for each checkpoint, shared with the other measures over checkpoints"
    meanings: ClassVar[dict[str, str]] = {
        "el2n_mean": "distance of the predicted probabilities from the label's, mean over the checkpoints (probability, 0 to sqrt(2))",
        "el2n_std": "its standard deviation over the checkpoints (probability; T - 1 in the denominator)",
    }
    needs: ClassVar[tuple[str, ...]] = ("moments",)

    def prepare(self, setting: Setting) -> None:
        require_classes(self, setting)
        require_moments(self, setting, 2, "at one checkpoint it is el2n")
        self._setting = setting

    def gather(self, rows: Mapping[str, torch.Tensor]) -> Gathered:
        names = [moment.name for moment in self._setting.moments]
        errors = History.of(names, rows).whole("el2n")
        correlation = rank_correlation(errors)
        warning = disagreement(correlation, names, self.name)
        if warning:
            self._setting.say(warning)
        return Gathered(
            {"el2n_mean": errors.mean(1), "el2n_std": errors.std(1)},
            {"checkpoints": names, "rank_correlation": correlation, "warning": warning},
        )
