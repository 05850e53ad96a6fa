"""GraNd: the gradient norm of a sample, averaged over checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from psgrad.engine.measures.measure import Gathered, Measure, Setting
from psgrad.engine.measures.moments import History, require_moments
from psgrad.engine.measures.moments.agreement import disagreement, rank_correlation


@dataclass
class GraNd(Measure):
    """Mean and spread of the gradient norm over the checkpoints of one run, or over the last (or first) checkpoints of several runs."""

    name: ClassVar[str] = "grand"
    title: ClassVar[str] = "GraNd, the mean gradient norm over checkpoints"
    formula: ClassVar[str] = "mean_t |g_i(theta_t)|_2, g_i the gradient of the sample's loss in all parameters"
    unit: ClassVar[str] = "{loss} per unit of parameter"
    source: ClassVar[str] = (
        "Paul, Ganguli, Dziugaite: Deep Learning on a Data Diet (2021), definition 2.1, early in training and over several seeds; "
        "Kirsch, Does Deep Learning on a Data Diet reproduce? Overall yes, but GraNd at Initialization does not (2023), "
        "found no use in it at initialisation, where it follows the norm of the input"
    )
    cost: ClassVar[str] = "one pass of norms for each checkpoint, shared with the other measures over checkpoints"
    meanings: ClassVar[dict[str, str]] = {
        "grand": "gradient norm, mean over the checkpoints ({loss} per unit of parameter); NaN if it is not finite at one of them",
        "grand_std": "its standard deviation over the checkpoints ({loss} per unit of parameter; T - 1 in the denominator)",
    }
    needs: ClassVar[tuple[str, ...]] = ("moments",)

    def prepare(self, setting: Setting) -> None:
        require_moments(self, setting, 2, "at one checkpoint it is grad_norm, which every run has")
        self._setting = setting

    def gather(self, rows: Mapping[str, torch.Tensor]) -> Gathered:
        names = [moment.name for moment in self._setting.moments]
        norms = History.of(names, rows).whole("grad_norm")
        correlation = rank_correlation(norms)
        warning = disagreement(correlation, names, self.name)
        if warning:
            self._setting.say(warning)
        return Gathered(
            {"grand": norms.mean(1), "grand_std": norms.std(1)},
            {"checkpoints": names, "rank_correlation": correlation, "warning": warning},
        )
