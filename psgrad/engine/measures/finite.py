"""Which samples have finite numbers."""

from __future__ import annotations

import torch

from psgrad.engine.gradients import PerSampleGradients, SquareNorms


def finite_rows(gradients: PerSampleGradients | SquareNorms) -> torch.Tensor:
    """[n] bool: the samples whose loss and gradient are finite."""
    return torch.isfinite(gradients.square_norms()) & torch.isfinite(gradients.losses)


def nan_elsewhere(values: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """[n] float64: the values of these rows [n] bool, NaN in the others."""
    return values.double().where(rows, torch.nan)
