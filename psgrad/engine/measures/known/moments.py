"""The checkpoints of a training run, each passed once: what all measures over checkpoints are made of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import torch

from psgrad.engine.gradients import PerSampleGradients, SquareNorms
from psgrad.engine.gradients.streaming import Columns
from psgrad.engine.measures.measure import Arrays, Gathered, Measure, Moment, OwnPass, Setting
from psgrad.engine.measures.moments.ensemble import Ensemble
from psgrad.engine.measures.moments.grouping import Grouping, grouped
from psgrad.engine.measures.moments.history import History, column
from psgrad.engine.measures.moments.refusals import require_moments
from psgrad.engine.measures.moments.summaries import moment_summary
from psgrad.engine.objective import Objective


class Moments(Measure):
    """Loss, gradient norm and prediction of each sample at each checkpoint, for the measures that need them; not stored afterwards."""

    name: ClassVar[str] = "moments"
    title: ClassVar[str] = "Checkpoints, each passed once"
    formula: ClassVar[str] = "loss l_i(theta_t), norm |g_i(theta_t)|, probability of the label, prediction, at each checkpoint t"
    unit: ClassVar[str] = "as loss and grad_norm"
    source: ClassVar[str] = "none: grand, el2n_over_checkpoints, forgetting and trajectory use it"
    cost: ClassVar[str] = "one pass of norms for each checkpoint; several at once if that is priced lower (numbers.way says which)"

    def prepare(self, setting: Setting) -> None:
        require_moments(self, setting, 1, "the samples pass at each")
        self._setting = setting
        self._grouping: Grouping | None = None

    def passes(self) -> Sequence[OwnPass]:
        examples, moments = self._setting.examples, self._setting.moments
        model = self._with_summary(Objective(examples.objective.model, examples.objective.criterion, autocast=examples.objective.autocast))
        self._grouping = grouped(examples, model, len(moments), examples.stream.chunk_size)
        found, first = [], 0
        for size in self._grouping.sizes:
            found.append(OwnPass(_pass_name(first, size), partial(self._run, first, moments[first : first + size])))
            first += size
        return found

    def gather(self, rows: Mapping[str, torch.Tensor]) -> Gathered:
        history = History.of(self.names, rows)
        way = self._grouping.why if self._grouping else None
        return Gathered(numbers={"checkpoints": self.names, "way": way, "nonfinite": history.nonfinite()})

    @property
    def names(self) -> list[str]:
        return [moment.name for moment in self._setting.moments]

    def _run(self, first: int, moments: Sequence[Moment], start: int, chunk_size: int) -> Iterator[Columns]:
        """One group of checkpoints, the weights of which are in memory for as long as it passes."""
        examples = self._setting.examples
        objectives = [self._with_summary(moment.objective()) for moment in moments]
        there = replace(examples, objective=objectives[0]).sized(chunk_size)
        if len(moments) == 1:
            return there.stream.run(len(examples), [Asking(first)], start=start)
        ensemble = Ensemble.of(objectives[0], [objective.model for objective in objectives])
        return there.stream.run(len(examples), [Asking(first)], ensemble, start)

    def _with_summary(self, objective: Objective) -> Objective:
        objective.summary = moment_summary(self._setting.kind, self._setting.ignore_index)
        return objective


def _pass_name(first: int, size: int) -> str:
    return f"checkpoint-{first}" if size == 1 else f"checkpoints-{first}-to-{first + size - 1}"


class Asking:
    """What one pass says of a chunk, as columns [k, checkpoints of the pass]."""

    needs_factors = False

    def __init__(self, first: int) -> None:
        self._first = first

    def columns(self, found: Any) -> Arrays:
        if isinstance(found, PerSampleGradients | SquareNorms):
            said = {"loss": found.losses.double(), "grad_norm": found.square_norms().sqrt(), **found.aux}
            found = {name: values.unsqueeze(0) for name, values in said.items()}
        return {column(name, self._first): values.T.contiguous() for name, values in found.items()}

    def keep(self) -> None:
        """Nothing is gathered."""
