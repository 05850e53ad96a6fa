"""Projections of per-sample gradients in one pass, in which no more than one parameter's gradient is kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from psgrad.engine.gradients.deferred import DeferredGradient
from psgrad.engine.gradients.groups import in_order
from psgrad.engine.gradients.per_sample import NormsByName, Pass, materialised_if_smaller
from psgrad.engine.gradients.projections.base import ProjectedRows, Projection
from psgrad.engine.gradients.queries import SquareNorms
from psgrad.engine.transforms.levels import Divergence


@dataclass(frozen=True)
class ProjectedGradients:
    """Projected per-sample gradients and their norms.

    Attributes:
        rows: [n, k], as `PerSampleGradients.project` returns them.
        norms: the squared norms of the whole gradients, losses and aux.
    """

    rows: torch.Tensor
    norms: SquareNorms

    @classmethod
    def of_groups(cls, parts: list[ProjectedGradients], groups: list[torch.Tensor]) -> ProjectedGradients:
        """As SquareNorms.of_groups."""
        norms = SquareNorms.of_groups([part.norms for part in parts], groups)
        return cls(in_order([part.rows for part in parts], groups), norms)

    def __len__(self) -> int:
        return len(self.norms)


def per_sample_projections(
    loss: Callable[..., Any],
    params: Mapping[str, torch.Tensor],
    *batch: Any,
    projection: Projection,
    in_dims: Any = 0,
    has_aux: bool = False,
    randomness: str = "error",
) -> ProjectedGradients:
    """`per_sample_gradients(...).project(projection)` [n, k] and the squared norms [n], in the memory of
    `per_sample_square_norms`: each parameter's gradient is contracted and deleted as soon as the backward
    pass completes it. The rows are those of `project`, bit for bit. With per='total' up to n * k numbers for
    each parameter are kept, as the backward pass has the last parameters first.

    The other arguments are those of `per_sample_gradients`.
    """
    job = Pass(loss, params, batch, in_dims, has_aux, randomness)
    norms, types = NormsByName(), {name: parameter.dtype for name, parameter in params.items()}
    rows = ProjectedRows(projection, types, job.level.batch.size, next(iter(params.values())).device)

    def complete(name: str, gradient: DeferredGradient) -> None:
        gradient = materialised_if_smaller(gradient)
        norms.add(name, gradient)
        rows.add(name, gradient)

    try:
        losses, aux = job.run(complete)
    except Divergence as divergence:
        again = partial(per_sample_projections, loss, params, projection=projection, **job.settings)
        return job.split(divergence, again, ProjectedGradients.of_groups)
    return ProjectedGradients(rows.joined(), norms.of(params, losses, aux))
