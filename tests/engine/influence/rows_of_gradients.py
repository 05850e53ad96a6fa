"""TRAK and its relatives materialised: gradients by a loop of torch.autograd, projections as matrices, the
algebra in numpy, in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import nn

from psgrad.engine.execution.examples import Examples
from psgrad.engine.gradients.projections.projector import Projector
from psgrad.engine.influence.method import Checkpoint, Method
from tests.engine.gradients.matrices import projected
from tests.oracles import one_sample_gradients

Scalar = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def log_odds(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Of the label, as the definition has it."""
    p = output.double().softmax(0)[target]
    return p.log() - (1 - p).log()


def rows_of(
    model: nn.Module, scalar: Scalar, inputs: torch.Tensor, target: torch.Tensor, projector: Projector
) -> np.ndarray:
    """[n, k]: projected gradients of a scalar of (output, target)."""
    gradients = one_sample_gradients(model, scalar, (inputs,), target)
    if projector.projection is None:
        return torch.cat([gradient.flatten(1) for gradient in gradients.values()], 1).double().numpy()
    return projected(projector.projection, gradients).numpy()


def probabilities(model: nn.Module, inputs: torch.Tensor, target: torch.Tensor) -> np.ndarray:
    """[n]: of each label."""
    with torch.no_grad():
        return model(inputs).double().softmax(1)[torch.arange(len(target)), target].numpy()


def ridge_products(
    queries: np.ndarray, rows: np.ndarray, relative: float | None = None, absolute: float | None = None
) -> np.ndarray:
    """[n, m]: rows (rows' rows + n lam I)^-1 queries'."""
    moment = rows.T @ rows
    n, k = rows.shape
    lam = absolute if relative is None else relative * np.trace(moment) / n / k
    return rows @ np.linalg.solve(moment + n * lam * np.eye(k), queries.T)


def scores_of(method: Method, training: Sequence[Examples], queries: Sequence[Examples]) -> np.ndarray:
    """[n, m]: joined over checkpoints, whose blocks must be the same."""
    streams = [
        list(method.fit(each, Checkpoint(number)).scores(asked))
        for number, (each, asked) in enumerate(zip(training, queries, strict=True))
    ]
    return torch.cat([method.across(list(blocks)) for blocks in zip(*streams, strict=True)]).numpy()
