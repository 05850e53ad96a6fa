"""Rows from labels that the model draws: their mean second moment against the Gauss-Newton matrix by
torch.func.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from psgrad.engine.execution.examples import Examples
from psgrad.engine.execution.objective import Objective
from psgrad.engine.execution.output_rows import LARGEST_OUTPUT
from psgrad.engine.influence.curvature.kronecker_fitting import (
    SampledLabelRows,
    fisher_rows,
    sampled_label_rows,
)
from psgrad.errors import InfluenceError
from psgrad.ragged import Block
from tests.engine.influence.problems import gauss_newton
from tests.engine.influence.test_token_scores import IGNORED, mean_loss, sum_loss

DRAWS, COPIES = 40, 100  # of a sample, and of the samples: 4,000 rows of each


class Words(nn.Module):
    def __init__(self, words: int = 4) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(3, 2), nn.Linear(2, words)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.inner(x)))


def examples(criterion, words: int = 4, positions: int = 5) -> tuple[Examples, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    model = Words(words).double()
    x, target = torch.randn(3, positions, 3).double(), torch.randint(0, words, (3, positions))
    target[:, 1] = IGNORED
    xs, targets = x.repeat(COPIES, 1, 1), target.repeat(COPIES, 1)
    return Examples(Objective(model, criterion), Block((xs,), targets)), x, target


@pytest.mark.long
@pytest.mark.parametrize("criterion", [mean_loss, sum_loss])
def test_sampled_label_rows_have_the_gauss_newton_matrix_as_their_mean(criterion) -> None:
    found, x, target = examples(criterion)
    rows = sampled_label_rows(found, DRAWS, seed=0)
    total = rows.fold(lambda gradients: {"m": _moment(gradients)})["m"] / COPIES
    wanted = torch.from_numpy(gauss_newton(found.objective.model, criterion, x, target))
    assert float((total - wanted).norm() / wanted.norm()) < 4 / (DRAWS * COPIES) ** 0.5


def _moment(gradients) -> torch.Tensor:
    flat = torch.cat([value.flatten(1) for value in gradients.materialise().values()], 1)
    return flat.T @ flat


def test_sampled_label_rows_are_taken_for_large_outputs_only() -> None:
    small, large = examples(mean_loss)[0], examples(mean_loss, words=40)[0]
    assert not isinstance(fisher_rows(small, 1, 0), SampledLabelRows)
    assert LARGEST_OUTPUT < 40 * 5
    assert isinstance(fisher_rows(large, 1, 0), SampledLabelRows)
    with pytest.raises(InfluenceError, match="has 200 numbers"):
        fisher_rows(large, None, 0)


def test_sampled_label_rows_of_another_loss_are_refused() -> None:
    found, _, _ = examples(lambda output, target: (output**2).sum() + mean_loss(output, target), words=40)
    with pytest.raises(InfluenceError, match="not that of a softmax"):
        fisher_rows(found, 1, 0).fold(lambda gradients: {"m": _moment(gradients)})
