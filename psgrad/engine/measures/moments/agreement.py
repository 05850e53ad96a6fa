"""How far checkpoints agree on the order of the samples, and how a sample's numbers move along them."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import numpy as np
import torch

# Under it, less than a quarter of the ranks' variance is shared.
_HARDLY = 0.5


def rank_correlation(values: torch.Tensor) -> list[list[float]]:
    """[T][T]: Spearman's rank correlation between the columns of [n, T], over the rows without NaN; NaN where it has none.

    How far two checkpoints agree on which samples stand out.
    """
    from scipy.stats import rankdata

    kept = values[torch.isfinite(values).all(1)].numpy()
    if len(kept) < 2:
        return np.full((values.shape[1],) * 2, np.nan).tolist()  # type: ignore[no-any-return]
    with warnings.catch_warnings(), np.errstate(invalid="ignore", divide="ignore"):
        warnings.simplefilter("ignore", RuntimeWarning)  # a checkpoint at which all samples are alike has no ranking: NaN says so
        found: list[list[float]] = np.corrcoef(np.stack([rankdata(each) for each in kept.T])).tolist()
    return found


def disagreement(correlation: list[list[float]], names: Sequence[str], what: str) -> str | None:
    """A sentence where two checkpoints hardly agree on the order of the samples; None where all do."""
    pairs = [(correlation[i][j], names[i], names[j]) for i in range(len(names)) for j in range(i) if not np.isnan(correlation[i][j])]
    if not pairs or min(pairs)[0] >= _HARDLY:
        return None
    least, later, earlier = min(pairs)
    return (
        f"{what}: the checkpoints {earlier} and {later} rank the samples differently (Spearman's rank correlation {least:.2f}); "
        "a mean over both is dominated by whichever has the larger numbers"
    )


def slope(values: torch.Tensor) -> torch.Tensor:
    """[n]: the least-squares slope of [n, T] over 0, ..., T - 1."""
    steps = torch.arange(values.shape[1], dtype=values.dtype)
    steps = steps - steps.mean()
    return (values - values.mean(1, keepdim=True)) @ steps / steps.square().sum()
