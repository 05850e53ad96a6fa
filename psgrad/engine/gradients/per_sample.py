"""Per-sample gradients, norms and projections of a batch, by one forward and one backward pass.

Each parameter's gradient is stored in the smaller form: as factors or as a value. For norms and projections
no more than one parameter's gradient is kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from psgrad.engine.gradients.batch_pass import BatchPass
from psgrad.engine.gradients.deferred import DeferredGradient, Placed
from psgrad.engine.gradients.norm_collector import NormsByName
from psgrad.engine.gradients.parts import Part, in_order
from psgrad.engine.gradients.projections.projection import ProjectedRows, Projection
from psgrad.engine.gradients.queries import PerSampleGradients, SquareNorms
from psgrad.engine.gradients.terms import Dense, Term, accumulating_dtype

# The largest ratio of a value's bytes to its factors' bytes for which it is stored for many queries. Each
# norm, sum or inner product of a convolution's gradient takes as long as materialising it, and a tenth of
# that time if the value is stored. Measured on the CNN of configs/digits.yaml.
_RATIO_FOR_MANY = 2.0


def materialised_for_many(gradients: PerSampleGradients) -> PerSampleGradients:
    """The gradients, prepared for many queries: a value may take up to twice the bytes of its factors."""
    change = partial(materialised_if_smaller, size_ratio=_RATIO_FOR_MANY)
    parts = [
        Part(part.places, {name: change(gradient) for name, gradient in part.gradients.items()})
        for part in gradients.parts
    ]
    return PerSampleGradients(tuple(parts), gradients.losses, gradients.aux)


def materialised_if_smaller(gradient: DeferredGradient, size_ratio: float = 1) -> DeferredGradient:
    """The gradient, materialised if its value takes at most `size_ratio` times the bytes of its factors.

    It is materialised only if its norm would be computed from the value too. The value costs as much as the
    sum over all samples, and later queries read it.
    """
    # rounding a value to half precision would lose digits that half-precision factors have
    if gradient.dtype != accumulating_dtype(gradient.dtype):
        return gradient
    if len(gradient.terms) != 1 or not _value_is_smaller(gradient.terms[0].term, gradient.dtype, size_ratio):
        return gradient
    return gradient.with_terms([Placed.plain(Dense(gradient.materialise(), materialised=True))])


def _value_is_smaller(term: Term, dtype: torch.dtype, size_ratio: float) -> bool:
    if isinstance(term, Dense) or not term.samples:
        return False
    own = [factor for factor in term.factors if factor.stride(0)]  # stride 0: one tensor for all samples
    factor_bytes = sum(factor.shape[1:].numel() * factor.element_size() for factor in own)
    return (
        term.order() == "materialise" and math.prod(term.shape) * dtype.itemsize <= size_ratio * factor_bytes
    )


def per_sample_gradients(
    loss: Callable[..., Any],
    params: Mapping[str, torch.Tensor],
    *batch: Any,
    in_dims: Any = 0,
    has_aux: bool = False,
    randomness: str = "error",
    settle: bool = True,
) -> PerSampleGradients:
    """The gradients of `loss(params, *sample)` for each sample of a batch, in one forward and one backward
    pass.

    Args:
        loss: the loss of one sample, without a batch axis: a real tensor of shape (); with `has_aux` a pair
            of it and a pytree of tensors.
        params: name -> parameter, shared by all samples.
        batch: pytrees of tensors with a sample axis, n long.
        in_dims: where that axis is, as for `vmap`; None for an argument that all samples share.
        randomness: as for `vmap`.
        settle: whether gradients that are smaller than their factors (of a convolution on large images, of a
            small layer over many positions) are materialised during the pass, and their factors deleted.

    No tensor of size n x parameters is made here, except for values that are smaller than their factors. A
    query makes one only if its result is one.

    If `loss` branches on a sample's data and samples disagree, it runs once for the samples of each outcome,
    as under `vmap`.
    """
    job = BatchPass(loss, params, batch, in_dims, has_aux, randomness)
    return PerSampleGradients.of_groups(*job.collected(lambda part: _Gradients(list(part.params), settle)))


class _Gradients:
    """Collects the gradients of one pass. settle: see `per_sample_gradients`."""

    def __init__(self, names: list[str], settle: bool) -> None:
        self._names, self._settle = names, settle
        self._gradients: dict[str, DeferredGradient] = {}

    def add(self, name: str, gradient: DeferredGradient) -> None:
        self._gradients[name] = materialised_if_smaller(gradient) if self._settle else gradient

    def result(self, losses: torch.Tensor, aux: Any) -> PerSampleGradients:
        return PerSampleGradients.of({name: self._gradients[name] for name in self._names}, losses, aux)


def per_sample_square_norms(
    loss: Callable[..., Any],
    params: Mapping[str, torch.Tensor],
    *batch: Any,
    in_dims: Any = 0,
    has_aux: bool = False,
    randomness: str = "error",
    absolute: bool = False,
) -> SquareNorms:
    """The squared norms only, [n] for each parameter, with the arguments of `per_sample_gradients`. absolute:
    whether `SquareNorms.absolute` is computed too.

    Each parameter's gradient is contracted and deleted as soon as the backward pass completes it. So the
    factors of all parameters never exist at the same time.
    """
    job = BatchPass(loss, params, batch, in_dims, has_aux, randomness)
    return SquareNorms.of_groups(*job.collected(lambda part: NormsByName(list(part.params), absolute)))


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
        if len(parts) == 1:
            return parts[0]
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
    job = BatchPass(loss, params, batch, in_dims, has_aux, randomness)
    return ProjectedGradients.of_groups(*job.collected(lambda part: _Projections(part, projection)))


class _Projections:
    """Collects the projected gradients of one pass."""

    def __init__(self, job: BatchPass, projection: Projection) -> None:
        self._norms = NormsByName(list(job.params))
        dtypes = {name: parameter.dtype for name, parameter in job.params.items()}
        device = next(iter(job.params.values())).device
        self._rows = ProjectedRows(projection, dtypes, job.size, device)

    def add(self, name: str, gradient: DeferredGradient) -> None:
        gradient = materialised_if_smaller(gradient)
        self._norms.add(name, gradient)
        self._rows.add(name, gradient)

    def result(self, losses: torch.Tensor, aux: Any) -> ProjectedGradients:
        return ProjectedGradients(self._rows.joined(), self._norms.result(losses, aux))
