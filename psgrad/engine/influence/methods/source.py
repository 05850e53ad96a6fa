"""Influence over a training run that is cut into segments, in each of which gradients and curvature stay as
they are at one checkpoint (SOURCE).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import torch

from psgrad.engine.execution.examples import Examples
from psgrad.engine.gradients.flat import Vectors, as_gradients
from psgrad.engine.gradients.queries import PerSampleGradients
from psgrad.engine.influence.curvature.kronecker_blocks import KroneckerBlock
from psgrad.engine.influence.curvature.kronecker_fitting import fisher_rows, fit_blocks
from psgrad.engine.influence.method import (
    RELATIVE,
    Checkpoint,
    Fitted,
    Method,
    Per,
    ScoreBlock,
    Scores,
    SelfBlock,
    labelled,
)
from psgrad.errors import ConfigError, InfluenceError


@dataclass(frozen=True)
class Source(Method):
    """score = (1 / n) sum over segments l of g_q' S_L ... S_{l+1} R_l g_i, with g_q the query's gradient at
    the last checkpoint, g_i the training example's at checkpoint l, S = exp(-t (C + weight_decay I)) and
    R = (C + weight_decay I)^-1 (I - S), C the mean curvature at checkpoint l by EK-FAC, and t the sum of the
    learning rates of the segment's steps.

    This is what gradient descent does to a change in one example's weight, where gradient and curvature are
    constant within a segment. Bae, Lin, Lorraine and Grosse, "Training Data Attribution via Approximate
    Unrolled Differentiation" (2024). Each checkpoint is a segment of its own here, from the checkpoint before
    it; the learning rate within is the mean of those at its two ends.

    Attributes:
        fisher, draws, seed: the curvature's rows, as of `EKFAC`.
        weight_decay: of training, on the mean loss.
        momentum: of training: a step then goes 1 / (1 - momentum) as far.
    """

    name = "source"
    unit = RELATIVE
    predicts_removal = False

    fisher: Literal["sampled", "exact", "empirical"] = "sampled"
    draws: int = 1
    seed: int = 0
    weight_decay: float = 0.0
    momentum: float = 0.0

    def __post_init__(self) -> None:
        if self.draws < 1 or not 0 <= self.momentum < 1 or not 0 <= self.weight_decay < math.inf:
            raise ConfigError(
                f"source: draws {self.draws}, momentum {self.momentum}, weight_decay {self.weight_decay};"
                " expected draws from 1 on, a momentum from 0 to below 1, a weight decay that is not"
                " negative",
            )

    def fit(self, training: Examples, checkpoint: Checkpoint) -> Fitted:
        return self.fit_run([(training, checkpoint)])[0]

    def fit_run(self, run: Sequence[tuple[Examples, Checkpoint]]) -> list[Fitted]:
        times = [time / (1 - self.momentum) for time in times_of([checkpoint for _, checkpoint in run])]
        segments = []
        for (training, _), time in zip(run, times, strict=True):
            rows = training
            if self.fisher != "empirical":
                rows = fisher_rows(training, self.draws if self.fisher == "sampled" else None, self.seed)
            segments.append(Segment(fit_blocks(rows, len(training)), time, self.weight_decay))
        return [
            FittedSource(training, segments[place], segments[:place:-1])
            for place, (training, _) in enumerate(run)
        ]

    def queries_of_run(self, queries: Sequence[Examples]) -> Sequence[Examples]:
        return [queries[-1]] * len(queries)

    def across(self, blocks: Sequence[ScoreBlock]) -> Scores:
        return {
            label: torch.stack([block.scores[label] for block in blocks]).sum(0) for label in blocks[0].scores
        }


def times_of(checkpoints: Sequence[Checkpoint]) -> list[float]:
    """The sum of the learning rates from each checkpoint's predecessor up to it.

    Raises InfluenceError where a learning rate or a step is not known, or steps do not rise.
    """
    found, steps, rates = list[float](), [0], list[float]()
    for checkpoint in checkpoints:
        missing = "learning rate" if checkpoint.learning_rate is None else "step"
        if checkpoint.learning_rate is None or checkpoint.step is None:
            raise InfluenceError(
                f"source adds up the learning rates of all steps, and checkpoint {checkpoint.number} has"
                f" no {missing}",
                hint="name them: influence.checkpoints: [{path: ..., learning_rate: ..., step: ...}]",
            )
        steps.append(checkpoint.step)
        rates.append(checkpoint.learning_rate)
    for place, (before, after) in enumerate(pairwise(steps)):
        if after <= before:
            raise InfluenceError(
                f"checkpoint {checkpoints[place].number} is of step {after}, and the one before it of step"
                f" {before}",
                hint="list the checkpoints of one run, in the order of their steps",
            )
        ends = rates[max(place - 1, 0)], rates[place]
        found.append((after - before) * sum(ends) / 2)
    return found


class Segment:
    """The curvature of a segment in blocks, and two functions of it.

    time: the sum of the segment's learning rates.
    """

    def __init__(self, blocks: list[KroneckerBlock], time: float, weight_decay: float) -> None:
        self.blocks, self.time = blocks, time
        curvatures = [block.values.clamp(min=0) + weight_decay for block in blocks]
        self._stays = [torch.exp(-time * values) for values in curvatures]
        # (1 - exp(-t c)) / c, which is t where c is zero
        self._moves = [
            torch.where(values > 0, -torch.expm1(-time * values) / values.clamp(min=_TINY), time)
            for values in curvatures
        ]

    def stay(self, gradients: PerSampleGradients) -> Vectors:
        """S v: what is left of a change of the parameters at the segment's end."""
        return self._applied(gradients, self._stays)

    def move(self, gradients: PerSampleGradients) -> Vectors:
        """R v: how far a constant change of the gradient moves the parameters within the segment."""
        return self._applied(gradients, self._moves)

    def _applied(self, gradients: PerSampleGradients, factors: list[torch.Tensor]) -> Vectors:
        total: Vectors = {}
        for block, factor in zip(self.blocks, factors, strict=True):
            for name, value in block.precondition(gradients, factor).items():
                total[name] = total[name] + value if name in total else value
        return {name: total[name] for name in gradients.gradients}


_TINY = torch.finfo(torch.float64).tiny


class FittedSource(Fitted):
    """The part of one segment in the scores. later: the segments after it, last first."""

    has_self_influence = False

    def __init__(self, training: Examples, segment: Segment, later: Sequence[Segment]) -> None:
        self.training, self.segment, self.later = training, segment, later
        self.facts = {"sum_of_learning_rates": segment.time}

    def scores(self, queries: Examples, per: Per = "total") -> Iterator[ScoreBlock]:
        parts = [found for _, found in queries.each(self._moved)]
        device, count = self.training.device, len(self.training)
        vectors = {
            name: torch.cat([part[name] for part in parts]).to(device) / count
            for name in self.training.params
        }
        prepared = as_gradients(vectors)
        for rows, found in self.training.each(lambda gradients: labelled(gradients.inner(prepared, per=per))):
            yield ScoreBlock(rows.start, rows.stop, found)

    def _moved(self, gradients: PerSampleGradients) -> Vectors:
        for segment in self.later:
            gradients = as_gradients(segment.stay(gradients))
        return self.segment.move(gradients)

    def self_influence(self) -> Iterator[SelfBlock]:
        raise InfluenceError(
            "source has no self-influence: it takes the query's gradient at the last checkpoint and the"
            " training example's at all others",
            hint="set influence.self_influence: never, and normalize: none",
        )
