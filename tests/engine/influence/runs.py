"""What a fitted method says, as arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from psgrad.engine.execution.examples import Examples
from psgrad.engine.influence.method import Checkpoint, Fitted, Method


def fit(method: Method, training: Examples, said: list[str] | None = None) -> Any:
    """`said` gathers what a person would hear."""
    return method.fit(training, Checkpoint(say=(lambda _: None) if said is None else said.append))


def matrix_of(fitted: Fitted, queries: Examples) -> torch.Tensor:
    """[n, m], of blocks in order."""
    blocks = list(fitted.scores(queries))
    assert [block.start for block in blocks] == [0, *(block.stop for block in blocks[:-1])]
    return torch.cat([block.scores for block in blocks])


def scores(fitted: Fitted, queries: Examples) -> np.ndarray:
    """[n, m]"""
    return matrix_of(fitted, queries).numpy()


def self_influence(fitted: Fitted) -> tuple[np.ndarray, np.ndarray]:
    """(self-influence [n], norm of the preconditioned gradient [n])"""
    blocks = list(fitted.self_influence())
    return (
        torch.cat([b.self_influence for b in blocks]).numpy(),
        torch.cat([b.preconditioned_norm for b in blocks]).numpy(),
    )
