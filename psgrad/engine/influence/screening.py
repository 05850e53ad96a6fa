"""Which rows have a loss and a gradient that are finite: one NaN would spoil every curvature that it is summed into."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from psgrad.engine.examples import Examples


@dataclass(frozen=True)
class Screened:
    """What a pass over n rows saw: finite [n], losses [n], norms [n] of the gradients, and further columns (a prediction)."""

    finite: torch.Tensor
    losses: np.ndarray
    norms: np.ndarray
    columns: dict[str, np.ndarray]


def screened(examples: Examples) -> Screened:
    """One pass for norms."""
    chunks = [found for _, found in examples.norms()]
    columns = {name: torch.cat([chunk[name] for chunk in chunks]) for name in chunks[0]}
    losses, squares = columns.pop("loss"), columns.pop("square_norm")
    finite = torch.isfinite(losses) & torch.isfinite(squares)
    return Screened(finite, losses.numpy(), squares.sqrt().numpy(), {name: value.numpy() for name, value in columns.items()})
