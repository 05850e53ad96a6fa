"""The largest and smallest scores of each query, from blocks of scores; and the scores of several checkpoints
joined.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from psgrad.engine.execution.examples import Examples
from psgrad.engine.influence.averages import Average, is_relative, on_one_scale
from psgrad.engine.influence.method import Fitted, Method, Per, ScoreBlock, Scores, SelfBlock


class Strongest:
    """Of each of m columns the k largest positive and the k most negative scores, and the rows that they
    belong to.

    Of equal scores the earlier row comes first. A score that is NaN is no one's.

    Attributes:
        values: [2, k, m] float64, proponents (falling) and opponents (rising); 0 where there are fewer than
            k.
        rows: [2, k, m] int64; -1 where there are fewer than k.
        extras: name -> [2, k, m]: what else was said of these pairs.
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
        # An infinite score and an absent one look the same here; neither counts.
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
    doubtful = ((values == last).sum(0) > (best == last).sum(0)) | (best[1:] == best[:-1]).any(0)
    columns = (doubtful & torch.isfinite(best[0])).nonzero().flatten()
    if len(columns):
        places[:, columns] = values[:, columns].sort(dim=0, descending=True, stable=True).indices[:k]
    return places


Normalize = Literal["none", "self_influence", "preconditioned_norm"]


@dataclass(frozen=True)
class JoinedBlock:
    """The scores of the training examples start, ..., stop - 1, joined over checkpoints, and of each
    checkpoint by itself.

    scores: label -> [k, m]. single: for each checkpoint label -> [k, m].
    """

    start: int
    stop: int
    scores: Scores
    single: tuple[Scores, ...]

    def spread(self, label: str) -> torch.Tensor:
        """[k, m]: the standard deviation of the checkpoints' scores."""
        return torch.stack([scores[label] for scores in self.single]).std(0)


def joined_scores(
    method: Method,
    fitted: Sequence[Fitted],
    queries: Sequence[Examples],
    per: Per = "total",
    divisors: Sequence[torch.Tensor] | None = None,
    average: Average = "relative",
) -> Iterator[JoinedBlock]:
    """The scores of all training examples in blocks, in order.

    Args:
        fitted, queries: one of each for every checkpoint.
        divisors: for each checkpoint [n], what each training example's scores are divided by; see `divisor`.
        average: 'relative' puts the checkpoints' scores on one scale for each query before they are averaged
            (see `is_relative`), which takes all of them in memory; 'plain' takes them as they are.
    """
    asked = method.queries_of_run(queries)
    streams = [each.scores(query, per) for each, query in zip(fitted, asked, strict=True)]
    parts = aligned(streams)
    if divisors is not None:
        parts = ([_divided(*pair) for pair in zip(blocks, divisors, strict=True)] for blocks in parts)
    if is_relative(method, len(fitted), average):
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
    return ScoreBlock(
        block.start, block.stop, {label: scores / by for label, scores in block.scores.items()}, block.weights
    )


def _part(block: ScoreBlock, start: int, stop: int) -> ScoreBlock:
    if (start, stop) == (block.start, block.stop):
        return block
    rows = slice(start - block.start, stop - block.start)
    weights = None if block.weights is None else block.weights[rows]
    return ScoreBlock(start, stop, {label: scores[rows] for label, scores in block.scores.items()}, weights)
