"""Projections that are contracted during the backward pass: the numbers of those of stored gradients, and the
memory of one parameter.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from psgrad.engine.execution.chunk_memory import peak_bytes
from psgrad.engine.execution.objective import Objective
from psgrad.engine.execution.recompute import Recompute
from psgrad.engine.gradients import (
    Projection,
    Sparse,
    TwoSided,
    per_sample_gradients,
    per_sample_projections,
)
from tests import small_models as models
from tests.oracles import one_sample_gradients
from tests.small_models import Architecture

SAMPLES = 5
PROJECTIONS: list[Projection] = [
    Sparse(16, seed=3),
    Sparse(8, seed=2, per="parameter"),
    TwoSided(3, 3, seed=4),
]


@pytest.mark.parametrize("projection", PROJECTIONS, ids=lambda projection: projection.kind)
@pytest.mark.parametrize("architecture", models.ARCHITECTURES, ids=lambda architecture: architecture.name)
def test_one_pass_projects_as_stored_gradients_do(architecture: Architecture, projection: Projection) -> None:
    """Rows have the bits of stored gradients', whose tests have their oracles; norms: a loop of autograd."""
    model = architecture.build(dtype=torch.float64)
    objective = Objective(model, architecture.loss)
    inputs, target = architecture.batch(SAMPLES, dtype=torch.float64)
    options: dict[str, Any] = {"in_dims": (0, 0), "has_aux": True}
    found = per_sample_projections(
        objective.loss, objective.params, inputs, target, projection=projection, **options
    )
    stored = per_sample_gradients(objective.loss, objective.params, inputs, target, **options)
    torch.testing.assert_close(found.rows, stored.project(projection), rtol=0, atol=0)
    gradients = one_sample_gradients(model, architecture.loss, inputs, target)
    square = torch.stack([each.flatten(1).square().sum(1) for each in gradients.values()]).sum(0)
    torch.testing.assert_close(found.norms.square_norms(), square, rtol=1e-10, atol=0)
    losses = torch.stack([architecture.loss(*each) for each in zip(model(*inputs), target, strict=True)])
    torch.testing.assert_close(found.norms.losses, losses.detach(), rtol=1e-10, atol=1e-12)


def test_samples_that_take_another_branch_are_projected_in_their_places() -> None:
    def loss(params: dict[str, Tensor], x: Tensor) -> Tensor:
        y = params["w"] @ x
        return y.square().sum() if bool(y.sum() > 0) else y.exp().sum()

    params = {"w": torch.randn(4, 3, dtype=torch.float64)}
    x = torch.randn(7, 3, dtype=torch.float64)
    projection = Sparse(8, seed=0)
    found = per_sample_projections(loss, params, x, projection=projection)
    for sample in range(7):
        alone = per_sample_gradients(loss, params, x[sample : sample + 1])
        torch.testing.assert_close(found.rows[sample], alone.project(projection)[0], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(found.norms.square_norms()[sample], alone.square_norms()[0])


@pytest.mark.parametrize("projection", [TwoSided(4, 4, seed=4)], ids=["two-sided"])
def test_memory_of_one_pass_is_that_of_one_parameter(projection: Projection) -> None:
    """Stored factors of 12 layers take more than twice the peak of one pass beyond that of 2 layers."""

    def peak(layers: int, how: Any) -> int:
        model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(layers)))
        again = Recompute(True)
        again.add(nn.ModuleDict({"body": model}))
        objective = Objective(model, lambda output, target: (output - target).square().sum())
        x = torch.randn(16, 32, 64)
        follow = partial(how, objective.loss, in_dims=(0, 0), has_aux=True)
        return peak_bytes(follow, objective.params, (x,), x)

    one_pass = partial(per_sample_projections, projection=projection)
    few, many = (peak(layers, one_pass) for layers in (4, 16))
    stored = [peak(layers, partial(per_sample_gradients, settle=False)) for layers in (4, 16)]
    of_a_layer = 4 * 16 * 32 * 64  # what goes into it
    assert many - few <= 12 * of_a_layer * 1.05
    assert stored[1] - stored[0] >= 2 * 12 * of_a_layer * 0.95
