"""The strongest proponents and opponents of each query, from scores that pass by once."""

from __future__ import annotations

import torch


class Strongest:
    """Of each of m columns the k largest positive and the k most negative scores, and the rows that they belong to.

    Of equal scores the earlier row comes first. A score that is NaN is no one's.

    Attributes:
        values: [2, k, m] float64, proponents (falling) and opponents (rising); 0 where there are fewer than k.
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
        sides = [torch.where(sign * scores > 0, sign * scores.double(), -torch.inf) for sign in (1, -1)]  # NaN is never above 0
        before = torch.where(self.rows >= 0, self.values * _SIGNS, -torch.inf)
        joined = [torch.cat([old, new]) for old, new in zip(before, sides, strict=True)]
        places = torch.stack([_largest(side, self.k) for side in joined])
        best = torch.stack([side.gather(0, place) for side, place in zip(joined, places, strict=True)])
        found = torch.isfinite(best)
        # A score of infinity can't be told from one that is absent, and neither is a score.
        self.values = torch.where(found, best, 0.0) * _SIGNS
        self.rows = torch.where(found, self._chosen(self.rows, rows, places), -1)
        for name, value in extras.items():
            earlier = self.extras.get(name, torch.zeros(2, before.shape[1], scores.shape[1], dtype=value.dtype))
            self.extras[name] = self._chosen(earlier, value, places)

    @staticmethod
    def _chosen(old: torch.Tensor, new: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        return torch.stack([torch.cat([side, new]).gather(0, place) for side, place in zip(old, places, strict=True)])


_SIGNS = torch.tensor([1.0, -1.0], dtype=torch.float64).reshape(2, 1, 1)


def _largest(values: torch.Tensor, k: int) -> torch.Tensor:
    """[min(k, n), m]: where in each column of values [n, m] the largest are, falling; of equal ones the earliest first."""
    k = min(k, len(values))
    best, places = values.topk(k, dim=0)
    last = best[-1:]
    # topk takes any of those that equal the last one: where there are more of these than it took, the columns are sorted in full.
    doubtful = ((values == last).sum(0) > (best == last).sum(0)) | (best[1:] == best[:-1]).any(0)
    columns = (doubtful & torch.isfinite(best[0])).nonzero().flatten()
    if len(columns):
        places[:, columns] = values[:, columns].sort(dim=0, descending=True, stable=True).indices[:k]
    return places
