"""Scores joined and ranked: over queries, over checkpoints, and the largest and smallest of each query.

The gradient of a query's loss shrinks as the query is learnt, and at another rate for each query. A plain
mean over checkpoints follows those at which the query's loss was large, which are the early ones. So scores
of checkpoints are brought to one scale first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

from psgrad.engine.execution.examples import Examples
from psgrad.engine.influence.method import Fitted, Method, ScoreBlock, SelfBlock


def over_queries(scores: torch.Tensor) -> torch.Tensor:
    """[2, n, c] of scores [n, m, c]: the sums and the numbers of the scores that are not NaN."""
    return torch.stack([scores.nansum(1), (~scores.isnan()).sum(1)])


def summed_over_groups(scores: torch.Tensor, groups: torch.Tensor, count: int) -> torch.Tensor:
    """[count, m]: the sums of scores [n, m] over the rows of each group; groups [n] of 0, ..., count - 1. To
    first order the predicted change if the group were removed. NaN where no row of a group has a score.
    """
    known = ~scores.isnan()
    empty = torch.zeros(count, scores.shape[1], dtype=scores.dtype)
    sums = empty.index_add(0, groups, torch.where(known, scores, 0.0))
    there = empty.index_add(0, groups, known.to(scores.dtype))
    return torch.where(there > 0, sums, torch.nan)


def is_relative(method: Method, checkpoints: int) -> bool:
    """Whether the scores of several checkpoints are divided by a scale of each checkpoint and query before
    they are averaged.
    """
    return checkpoints > 1 and not method.joins_by_own_rule


def joined_self(method: Method, found: Sequence[torch.Tensor]) -> torch.Tensor:
    """[n]: the self-influence of all checkpoints together, of that of each, [n].

    Where scores are put on one scale, each checkpoint's are divided by their root mean square over the
    training examples.
    """
    blocks = [ScoreBlock(0, len(own), own.unsqueeze(1)) for own in found]
    joined = next(on_one_scale([blocks])) if is_relative(method, len(found)) else blocks
    return method.across(joined).squeeze(1)


def on_one_scale(parts: Sequence[list[ScoreBlock]]) -> Iterator[list[ScoreBlock]]:
    """Blocks of all training examples, each [checkpoints], with every checkpoint's scores of a query divided
    by their root mean square over the training examples.
    """
    count = len(parts[0]) if parts else 0
    scales = [root_mean_square([blocks[place] for blocks in parts]) for place in range(count)]
    for blocks in parts:
        yield [
            replace(block, scores=block.scores / scale) for block, scale in zip(blocks, scales, strict=True)
        ]


def root_mean_square(blocks: Sequence[ScoreBlock]) -> torch.Tensor:
    """[m]: of the scores of each query that are finite; 1 where that is 0."""
    squares, counts = [], []
    for block in blocks:
        total = block.scores.double()
        finite = total.isfinite()
        squares.append(torch.where(finite, total, 0.0).square().sum(0))
        counts.append(finite.sum(0))
    mean = torch.stack(squares).sum(0) / torch.stack(counts).sum(0)
    return torch.where(mean > 0, mean, 1.0).sqrt()


class CheckpointAgreement:
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


# A variance below that share of the mean square is rounding.
_ROUNDING = 1e-12


class Strongest:
    """The k largest positive and the k most negative scores of each of m columns, and the rows that they
    belong to. Of equal scores the earlier row comes first. Scores that are NaN are left out.

    Attributes:
        values: [2, k, m] float64, proponents (falling) and opponents (rising); 0 where there are fewer than
            k.
        rows: [2, k, m] int64; -1 where there are fewer than k.
        extras: name -> [2, k, m]: further columns of these pairs.
    """

    def __init__(self, k: int, m: int) -> None:
        self.k = k
        self.values = torch.zeros(2, 0, m, dtype=torch.float64)
        self.rows = torch.full((2, 0, m), -1)
        self.extras: dict[str, torch.Tensor] = {}

    def add(self, start: int, scores: torch.Tensor, **extras: torch.Tensor) -> None:
        """scores: [n, m] of the rows start, start + 1, ...; extras: [n, m] each."""
        rows = torch.arange(start, start + len(scores)).unsqueeze(1).expand_as(scores)
        sides = [
            torch.where(sign * scores > 0, sign * scores.double(), -torch.inf) for sign in (1, -1)
        ]  # NaN is never above 0
        before = torch.where(self.rows >= 0, self.values * _SIGNS, -torch.inf)
        joined = [torch.cat([old, new]) for old, new in zip(before, sides, strict=True)]
        places = torch.stack([_largest(side, self.k) for side in joined])
        best = torch.stack([side.gather(0, place) for side, place in zip(joined, places, strict=True)])
        finite = torch.isfinite(best)
        # An infinite score and an absent one are equal here; neither counts.
        self.values = torch.where(finite, best, 0.0) * _SIGNS
        self.rows = torch.where(finite, self._chosen(self.rows, rows, places), -1)
        for name, value in extras.items():
            earlier = self.extras.get(
                name, torch.zeros(2, before.shape[1], scores.shape[1], dtype=value.dtype)
            )
            self.extras[name] = self._chosen(earlier, value, places)

    @staticmethod
    def _chosen(old: torch.Tensor, new: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        return torch.stack(
            [torch.cat([side, new]).gather(0, place) for side, place in zip(old, places, strict=True)]
        )


_SIGNS = torch.tensor([1.0, -1.0], dtype=torch.float64).reshape(2, 1, 1)


def _largest(values: torch.Tensor, k: int) -> torch.Tensor:
    """[min(k, n), m]: where in each column of values [n, m] the largest are, falling; of equal ones the
    earliest first.
    """
    k = min(k, len(values))
    best, places = values.topk(k, dim=0)
    last = best[-1:]
    # topk takes any of those that equal the last one: where there are more of these than it took, the columns
    # are sorted in full.
    tied = ((values == last).sum(0) > (best == last).sum(0)) | (best[1:] == best[:-1]).any(0)
    columns = (tied & torch.isfinite(best[0])).nonzero().flatten()
    if len(columns):
        places[:, columns] = values[:, columns].sort(dim=0, descending=True, stable=True).indices[:k]
    return places


Normalize = Literal["none", "self_influence", "preconditioned_norm"]


@dataclass(frozen=True)
class JoinedBlock:
    """The scores of the training examples start, ..., stop - 1, joined over checkpoints, and of each
    checkpoint by itself.

    scores: [k, m]. single: of each checkpoint [k, m].
    """

    start: int
    stop: int
    scores: torch.Tensor
    single: tuple[torch.Tensor, ...]

    @property
    def spread(self) -> torch.Tensor:
        """[k, m]: the standard deviation of the checkpoints' scores."""
        return torch.stack(self.single).std(0)


def joined_scores(
    method: Method,
    fitted: Sequence[Fitted],
    queries: Sequence[Examples],
    divisors: Sequence[torch.Tensor] | None = None,
) -> Iterator[JoinedBlock]:
    """The scores of all training examples in blocks, in order. Where those of checkpoints are put on one
    scale, all of them are in memory.

    Args:
        fitted, queries: one of each for every checkpoint.
        divisors: for each checkpoint [n], what each training example's scores are divided by; see `divisor`.
    """
    streams = [each.scores(query) for each, query in zip(fitted, queries, strict=True)]
    parts = aligned(streams)
    if divisors is not None:
        parts = ([_divided(*pair) for pair in zip(blocks, divisors, strict=True)] for blocks in parts)
    if is_relative(method, len(fitted)):
        parts = on_one_scale(list(parts))
    for blocks in parts:
        first = blocks[0]
        yield JoinedBlock(
            first.start, first.stop, method.across(blocks), tuple(method.across([block]) for block in blocks)
        )


def aligned(streams: Sequence[Iterator[ScoreBlock]]) -> Iterator[list[ScoreBlock]]:
    """Blocks of the same rows from each stream, cut where any stream cuts."""
    waiting: list[ScoreBlock | None] = [next(stream, None) for stream in streams]
    while all(block is not None for block in waiting):
        blocks = [block for block in waiting if block is not None]
        stop = min(block.stop for block in blocks)
        yield [_part(block, block.start, stop) for block in blocks]
        waiting = [
            next(stream, None) if block.stop == stop else _part(block, stop, block.stop)
            for stream, block in zip(streams, blocks, strict=True)
        ]


def divisor(blocks: Iterator[SelfBlock], normalize: Normalize) -> torch.Tensor:
    """[n]: what scores are divided by to be relative: 'self_influence' the root of an example's influence on
    itself, 'preconditioned_norm' the norm of its preconditioned gradient, which is how far its removal moves
    the parameters. NaN where that is not above 0.

    Barshan, Brunet and Dziugaite, "RelatIF: Identifying Explanatory Training Samples via Relative Influence"
    (2020): l-RelatIF and theta-RelatIF.
    """
    by_self = normalize == "self_influence"
    norms = torch.cat(
        [block.self_influence.sqrt() if by_self else block.preconditioned_norm for block in blocks]
    )
    return torch.where(norms > 0, norms, torch.nan)


def _divided(block: ScoreBlock, divisor: torch.Tensor) -> ScoreBlock:
    by = divisor[block.start : block.stop].unsqueeze(1)
    return replace(block, scores=block.scores / by)


def _part(block: ScoreBlock, start: int, stop: int) -> ScoreBlock:
    if (start, stop) == (block.start, block.stop):
        return block
    rows = slice(start - block.start, stop - block.start)
    weights = None if block.weights is None else block.weights[rows]
    return ScoreBlock(start, stop, block.scores[rows], weights)
