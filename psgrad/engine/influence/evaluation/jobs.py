"""What is to be trained: a job a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from psgrad.engine.influence.evaluation.members import Rows


@dataclass(frozen=True)
class Job:
    """One model to be trained.

    name: for people. rows: the numbers of its training rows. seed: of its initial weights and shuffles. target: [n, ...] in place of the
    targets of all rows of the dataset; None for the dataset's own.
    """

    name: str
    rows: np.ndarray[Any, Any]
    seed: int
    target: torch.Tensor | None = None


def stacked_target(rows: Rows, jobs: Sequence[Job]) -> torch.Tensor | None:
    """[K, n, ...]: the targets that each model is trained on; a view where they are the dataset's own."""
    if rows.target is None:
        return None
    if all(job.target is None for job in jobs):
        return rows.target.expand(len(jobs), *rows.target.shape)
    return torch.stack([rows.target if job.target is None else job.target.to(rows.target) for job in jobs])
