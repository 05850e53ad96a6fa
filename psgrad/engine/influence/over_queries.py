"""The scores of a training example for many queries as one number, and those of many training examples as
that of their group.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

OverQueries = Literal["mean", "max"]


def over_queries(scores: torch.Tensor, how: OverQueries) -> torch.Tensor:
    """[2, n, c] of scores [n, m, c]: a numerator and a count, whose quotient joins the scores that are not
    NaN: their mean, or the score of largest size. 0 / 0 where there is none.
    """
    known = ~scores.isnan()
    if how == "mean":
        return torch.stack([scores.nansum(1), known.sum(1)])
    place = torch.where(known, scores.abs(), -1.0).argmax(1, keepdim=True)
    largest = torch.where(known, scores, 0.0).gather(1, place).squeeze(1)
    return torch.stack([largest, known.any(1)])


def joined_over(parts: Sequence[torch.Tensor], how: OverQueries) -> torch.Tensor:
    """[2, n, c]: the same of the queries of all parts, each [2, n, c]."""
    whole = torch.stack(list(parts))
    if how == "mean":
        return whole.sum(0)
    values = torch.where(whole[:, 1] > 0, whole[:, 0], torch.nan)
    return over_queries(values.transpose(0, 1), how)


def summed_over_groups(scores: torch.Tensor, groups: torch.Tensor, count: int) -> torch.Tensor:
    """[count, m]: the sums of scores [n, m] over the rows of each group; groups [n] of 0, ..., count - 1. To
    first order the predicted change if the group were removed. NaN where no row of a group has a score.
    """
    known = ~scores.isnan()
    empty = torch.zeros(count, scores.shape[1], dtype=scores.dtype)
    sums = empty.index_add(0, groups, torch.where(known, scores, 0.0))
    there = empty.index_add(0, groups, known.to(scores.dtype))
    return torch.where(there > 0, sums, torch.nan)
