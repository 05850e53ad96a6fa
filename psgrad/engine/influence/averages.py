"""The scores of several checkpoints on one scale, and how far the checkpoints agree.

The gradient of a query's loss shrinks as the query is learnt, and at another rate for each query. A plain
mean of such scores follows the checkpoints at which the query's loss was large, which are the early ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Literal

import torch

from psgrad.engine.influence.method import Method, ScoreBlock, with_total

Average = Literal["relative", "plain"]


def is_relative(method: Method, checkpoints: int, average: Average) -> bool:
    """Whether the scores of several checkpoints are divided by a scale of each checkpoint and query before
    they are averaged.
    """
    return average == "relative" and checkpoints > 1 and not method.joins_by_own_rule


def joined_self(method: Method, found: Sequence[torch.Tensor], average: Average = "relative") -> torch.Tensor:
    """[n]: the self-influence of all checkpoints together, of that of each, [n].

    Where scores are put on one scale, each checkpoint's are divided by their root mean square over the
    training examples.
    """
    if is_relative(method, len(found), average):
        blocks = [ScoreBlock(0, len(own), {"": own.unsqueeze(1)}) for own in found]
        found = [own / root_mean_square([block]) for own, block in zip(found, blocks, strict=True)]
    return method.across_self(found)


def on_one_scale(parts: Sequence[list[ScoreBlock]]) -> Iterator[list[ScoreBlock]]:
    """Blocks of all training examples, each [checkpoints], with every checkpoint's scores of a query divided
    by their root mean square over the training examples.

    The gradient of a query's loss shrinks as the query is learnt, at each query at its own rate. A plain mean
    therefore follows the early checkpoints, and for a query that is learnt late other checkpoints than for
    the rest.
    """
    count = len(parts[0]) if parts else 0
    scales = [root_mean_square([blocks[place] for blocks in parts]) for place in range(count)]
    for blocks in parts:
        yield [
            replace(block, scores={label: scores / scale for label, scores in block.scores.items()})
            for block, scale in zip(blocks, scales, strict=True)
        ]


def root_mean_square(blocks: Sequence[ScoreBlock]) -> torch.Tensor:
    """[m]: of the scores of each query that are finite, those of all layers together; 1 where that is 0."""
    squares, counts = [], []
    for block in blocks:
        total = with_total(block.scores)[""].double()
        finite = total.isfinite()
        squares.append(torch.where(finite, total, 0.0).square().sum(0))
        counts.append(finite.sum(0))
    mean = torch.stack(squares).sum(0) / torch.stack(counts).sum(0)
    return torch.where(mean > 0, mean, 1.0).sqrt()


class Agreement:
    """How far the scores of T checkpoints agree, query by query, from blocks of training examples.

    An example whose score is not finite at some checkpoint is left out of that query's numbers.
    """

    def __init__(self) -> None:
        self._count = torch.zeros(())
        self._sums = torch.zeros(())
        self._products = torch.zeros(())

    def add(self, single: Sequence[torch.Tensor]) -> None:
        """single: of each checkpoint the scores [k, m] of some training examples, before they are scaled or
        after.
        """
        scores = torch.stack([each.double() for each in single])
        finite = scores.isfinite().all(0)
        scores = torch.where(finite, scores, 0.0)
        self._count = self._count + finite.sum(0)
        self._sums = self._sums + scores.sum(1)
        self._products = self._products + torch.einsum("tkm,skm->tsm", scores, scores)

    def correlation(self) -> torch.Tensor:
        """[m]: the mean over pairs of checkpoints of the correlation of their scores over the training
        examples; NaN where the scores of a checkpoint do not vary.
        """
        means = self._sums / self._count
        covariance = self._products / self._count - means.unsqueeze(0) * means.unsqueeze(1)
        squares = self._products.diagonal(dim1=0, dim2=1).t() / self._count
        variance = covariance.diagonal(dim1=0, dim2=1).t()
        deviation = torch.where(variance > _ROUNDING * squares, variance, torch.nan).sqrt()
        correlation = covariance / (deviation.unsqueeze(0) * deviation.unsqueeze(1))
        above = torch.ones(len(means), len(means)).triu(1).bool()
        return correlation[above].mean(0).clamp(-1.0, 1.0)

    def largest_share(self) -> torch.Tensor:
        """[m]: the root mean square of the scores of the checkpoint that has the largest, as a share of the
        sum over checkpoints; NaN where all scores are zero.
        """
        sizes = self._products.diagonal(dim1=0, dim2=1).t().sqrt()
        return sizes.amax(0) / sizes.sum(0)


# A variance below that share of the mean square is rounding.
_ROUNDING = 1e-12
