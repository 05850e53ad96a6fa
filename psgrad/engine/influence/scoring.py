"""From methods fitted at several checkpoints to one stream of scores, with their spread."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from psgrad.engine.examples import Examples
from psgrad.engine.influence.method import Fitted, Method, Per, ScoreBlock, Scores, SelfBlock

Normalize = Literal["none", "self_influence", "preconditioned_norm"]


@dataclass(frozen=True)
class JoinedBlock:
    """The scores of the training examples start, ..., stop - 1, joined over checkpoints, and of each checkpoint by itself.

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
) -> Iterator[JoinedBlock]:
    """The scores of all training examples in blocks, in order.

    Args:
        fitted, queries: one of each for every checkpoint.
        divisors: for each checkpoint [n], what each training example's scores are divided by; see `divisor`.
    """
    streams = [each.scores(asked, per) for each, asked in zip(fitted, queries, strict=True)]
    for blocks in aligned(streams):
        if divisors is not None:
            blocks = [_divided(block, divisor) for block, divisor in zip(blocks, divisors, strict=True)]
        first = blocks[0]
        yield JoinedBlock(first.start, first.stop, method.across(blocks), tuple(method.across([block]) for block in blocks))


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
    """[n]: what scores are divided by to be relative: 'self_influence' the root of an example's influence on itself, 'preconditioned_norm'
    the norm of its preconditioned gradient, which is how far its removal moves the parameters. NaN where that is not above 0.

    Barshan, Brunet and Dziugaite, "RelatIF: Identifying Explanatory Training Samples via Relative Influence" (2020): l-RelatIF and
    theta-RelatIF.
    """
    by_self = normalize == "self_influence"
    found = torch.cat([block.self_influence.sqrt() if by_self else block.preconditioned_norm for block in blocks])
    return torch.where(found > 0, found, torch.nan)


def _divided(block: ScoreBlock, divisor: torch.Tensor) -> ScoreBlock:
    by = divisor[block.start : block.stop].unsqueeze(1)
    return ScoreBlock(block.start, block.stop, {label: scores / by for label, scores in block.scores.items()}, block.weights)


def _part(block: ScoreBlock, start: int, stop: int) -> ScoreBlock:
    if (start, stop) == (block.start, block.stop):
        return block
    rows = slice(start - block.start, stop - block.start)
    weights = None if block.weights is None else block.weights[rows]
    return ScoreBlock(start, stop, {label: scores[rows] for label, scores in block.scores.items()}, weights)
