"""Random rows of the Gauss-Newton matrix, a few for each sample in place of one for each number of its output."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from psgrad.engine.influence.curvature.output_derivatives import OutputDerivatives
from psgrad.engine.influence.curvature.rows import OutputRows, gauss_newton_rows
from psgrad.engine.influence.examples import Examples


@dataclass(frozen=True)
class SampledRows(OutputRows):
    """Rows (S e)' J / sqrt(R), with S S' the second derivatives of a sample's loss in its output and e of random signs.

    The sum of j_r j_r' over all rows has the Gauss-Newton matrix of the sum of the losses as its mean, as that of gradients for labels
    drawn from the model has; with signs its variance is the least. A sample's signs follow from the seed and its number.
    """

    seed: int = 0

    def cotangents(self, outputs: torch.Tensor, target: torch.Tensor | None, rows: torch.Tensor) -> torch.Tensor:
        roots = OutputDerivatives.of(self.objective.criterion, outputs, target).root(rows)[0]
        signs = torch.stack([self._signs(int(row), roots.shape[2]) for row in rows]).to(roots)
        return torch.bmm(signs, roots.transpose(1, 2)) / math.sqrt(self.per_sample)

    def _signs(self, row: int, size: int) -> torch.Tensor:
        """[R, C]"""
        bits = np.random.default_rng((self.seed, row)).integers(2, size=(self.per_sample, size))
        return torch.from_numpy(bits * 2.0 - 1.0)


def sampled_rows(training: Examples, draws: int, seed: int) -> SampledRows:
    """`draws` rows for each sample. Raises InfluenceError as `gauss_newton_rows` does."""
    rows = gauss_newton_rows(training)
    return SampledRows(rows.objective, rows.read, rows.count, rows.options, per_sample=draws, seed=seed)
