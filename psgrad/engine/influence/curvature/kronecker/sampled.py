"""Random rows of the Gauss-Newton matrix, a few for each sample in place of one for each number of its output."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from psgrad.engine.examples import Examples
from psgrad.engine.gradients.projections.entries import key_of, signs, streams, words_at
from psgrad.engine.influence.curvature.output_derivatives import OutputDerivatives
from psgrad.engine.influence.curvature.rows import LARGEST_OUTPUT, OutputRows, gauss_newton_rows, output_size
from psgrad.errors import InfluenceError


@dataclass(frozen=True)
class SampledRows(OutputRows):
    """Rows (S e)' J / sqrt(R), with S S' the second derivatives of a sample's loss in its output and e of random signs.

    The sum of j_r j_r' over all rows has the Gauss-Newton matrix of the sum of the losses as its mean, as that of gradients for labels
    drawn from the model has; with signs its variance is the least. A sample's signs follow from the seed and its number.
    """

    seed: int = 0

    def cotangents(self, outputs: torch.Tensor, target: torch.Tensor | None, rows: torch.Tensor) -> torch.Tensor:
        roots = OutputDerivatives.of(self.objective.criterion, outputs, target).root(self.numbers_of(rows))[0]
        size = self.per_sample * roots.shape[2]
        stream = streams(key_of(self.seed, "rows"), rows.to(outputs.device)).unsqueeze(1)
        words = words_at(stream, torch.arange(math.ceil(size / 64), device=outputs.device))
        drawn = signs(words)[:, :size].reshape(-1, self.per_sample, roots.shape[2]).to(roots)
        return torch.bmm(drawn, roots.transpose(1, 2)) / math.sqrt(self.per_sample)


def fisher_rows(training: Examples, draws: int | None, seed: int) -> OutputRows:
    """`draws` sampled rows for each example, or all rows where it is None.

    Raises InfluenceError where the output is no tensor or too large, and, as a pass goes on, where the loss is not convex in it.
    """
    size = output_size(training)
    if size > LARGEST_OUTPUT:
        raise InfluenceError(
            f"the model's output has {size} numbers for one example, too many for the second derivatives of its loss in them",
            expected=f"at most {LARGEST_OUTPUT}, for rows of the Gauss-Newton matrix",
            next_step="set fisher: empirical, which takes the gradients of the training loss",
        )
    if draws is None:
        return gauss_newton_rows(training)
    return SampledRows(training.objective, training.read, training.count, training.options, training.numbers, per_sample=draws, seed=seed)
