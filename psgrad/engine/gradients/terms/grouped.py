"""Products of every sample's factor with what all samples share."""

from __future__ import annotations

import torch


def times_shared(factor: torch.Tensor, shared: torch.Tensor) -> torch.Tensor:
    """[n, g, t, b] times [g, b, c]: [n, g, t, c].

    As one product for each group over all positions of all samples; `torch.matmul` would first repeat what is shared for each sample.
    """
    n, groups, positions, size = factor.shape
    if groups == 1:
        return (factor.reshape(n * positions, size) @ shared.squeeze(0)).reshape(n, 1, positions, shared.shape[2])
    rows = factor.transpose(0, 1).reshape(groups, n * positions, size)
    return torch.bmm(rows, shared).reshape(groups, n, positions, shared.shape[2]).transpose(0, 1)
