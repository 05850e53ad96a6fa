"""Per-sample gradients, norms and projections of a batch, by one forward and one backward pass.

Each parameter's gradient is stored in the smaller form: as factors or as a value. For norms and projections
no more than one parameter's gradient is kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from psgrad import random_state
from psgrad.engine.gradients.bounded_sums import absolute_sum, single_product, summed_square_norms
from psgrad.engine.gradients.deferral import WeightDeferral, deferred_in
from psgrad.engine.gradients.deferred import DeferredGradient, Placed, in_order, merged, term_of
from psgrad.engine.gradients.projections.projection import ProjectedRows, Projection
from psgrad.engine.gradients.queries import PerSampleGradients, SquareNorms
from psgrad.engine.gradients.square_norms import checked_square_norms, square_norms
from psgrad.engine.gradients.terms import Dense, Product, Term, accumulating_dtype
from psgrad.engine.transforms.batching import BatchLevel
from psgrad.engine.transforms.grad import cotangents_and_value
from psgrad.engine.transforms.levels import Divergence, WriteCounts
from psgrad.engine.transforms.private_torch import DisableTorchFunction, storage_key
from psgrad.engine.transforms.trees import flatten, map_leaves, unflatten
from psgrad.engine.transforms.vmap import flat_in_dims, mapped_size
from psgrad.errors import TransformError

# The largest ratio of a value's bytes to its factors' bytes for which it is stored for many queries. Each
# norm, sum or inner product of a convolution's gradient takes as long as materialising it, and a tenth of
# that time if the value is stored. Measured on the CNN of configs/digits.yaml.
_RATIO_FOR_MANY = 2.0


def materialised_for_many(gradients: PerSampleGradients) -> PerSampleGradients:
    """The gradients, prepared for many queries: a value may take up to twice the bytes of its factors."""
    result = {
        name: gradient.mapped(partial(materialised_if_smaller, size_ratio=_RATIO_FOR_MANY))
        for name, gradient in gradients.gradients.items()
    }
    return PerSampleGradients(result, gradients.losses, gradients.aux)


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
    if term.stored_value is not None or not term.samples:
        return False
    own = [factor for factor in term.factors if factor.stride(0)]  # stride 0: one tensor for all samples
    factor_bytes = sum(factor.shape[1:].numel() * factor.element_size() for factor in own)
    return (
        term.describe() == "materialise"
        and math.prod(term.shape) * dtype.itemsize <= size_ratio * factor_bytes
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
    gradients: dict[str, DeferredGradient] = {}
    job = BatchPass(loss, params, batch, in_dims, has_aux, randomness)
    try:
        losses, aux = job.run(
            lambda name, gradient: gradients.__setitem__(
                name, materialised_if_smaller(gradient) if settle else gradient
            )
        )
    except Divergence as divergence:
        again = partial(per_sample_gradients, loss, params, settle=settle, **job.settings)
        return job.split(divergence, again, PerSampleGradients.of_groups)
    return PerSampleGradients({name: gradients[name] for name in params}, losses, aux)


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
    norms = NormsByName(absolute)
    job = BatchPass(loss, params, batch, in_dims, has_aux, randomness)
    try:
        losses, aux = job.run(norms.add)
    except Divergence as divergence:
        again = partial(per_sample_square_norms, loss, params, absolute=absolute, **job.settings)
        return job.split(divergence, again, SquareNorms.of_groups)
    return norms.of(params, losses, aux)


class NormsByName:
    """Collects the squared norms of each parameter's gradient when the backward pass completes it."""

    def __init__(self, absolute: bool = False) -> None:
        self.norms: dict[str, torch.Tensor] = {}
        self.absolute: dict[str, torch.Tensor] | None = {} if absolute else None
        self.computed_as: dict[str, str] = {}
        # Small factors wait: name -> (length, key) of each; length -> key -> the factor [n, length]. And the
        # terms whose norms are checked.
        self._names: dict[str, list[tuple[int, Any]]] = {}
        self._terms: dict[str, Term] = {}
        self._waiting: dict[int, dict[Any, torch.Tensor]] = {}
        self._waiting_bytes = 0

    def add(self, name: str, gradient: DeferredGradient) -> None:
        terms = gradient.terms
        if self.absolute is not None and (product := single_product(gradient)) is not None:
            self.norms[name] = summed_square_norms(product)
            self.absolute[name] = self.norms[name].sqrt()
            self.computed_as[name] = gradient.describe()
            return
        if len(terms) == 1 and (small := _small_factors(terms[0].term)):
            self._wait(name, small)
        elif len(terms) == 1 and _has_small_value(terms[0].term):
            self._terms[name] = terms[0].term
            self._wait(name, [terms[0].term.materialise()])
        elif terms:
            self.norms[name] = square_norms([gradient])[0]
        if self.absolute is not None and terms:
            self.absolute[name] = absolute_sum(gradient)
        self.computed_as[name] = gradient.describe()

    def _wait(self, name: str, factors: Sequence[torch.Tensor]) -> None:
        places = self._names[name] = []
        for factor in factors:
            factor = factor.reshape(factor.shape[0], factor.shape[1:].numel())
            with DisableTorchFunction():  # a recorder would take it for a read of the memory
                storage = storage_key(factor.untyped_storage())
            # One of a layer's weight is often its bias's gradient.
            key = storage, factor.storage_offset(), factor.stride(), factor.dtype
            places.append((factor.shape[1], key))
            self._waiting.setdefault(factor.shape[1], {})[key] = factor
            self._waiting_bytes += factor.numel() * factor.element_size()
        if self._waiting_bytes > _MOST_WAITING or self.absolute is not None:
            self._add_waiting()

    def _add_waiting(self) -> None:
        """The norms of what waits, of factors of one length together: kernels are what they cost."""
        squares = dict[Any, torch.Tensor]()
        for length, waiting in self._waiting.items():
            factors = list(waiting.values())
            stacked = factors[0].unsqueeze(0) if len(factors) == 1 else torch.stack(factors)
            norms = torch.linalg.vector_norm(stacked.double(), dim=2).square_()
            squares.update(zip(((length, key) for key in waiting), norms.unbind(), strict=True))
        for name, places in self._names.items():
            first, *second = (squares[place] for place in places)
            self.norms[name] = first * second[0] if second else first
        if self._terms:
            found = [self.norms[name] for name in self._terms]
            found = checked_square_norms(list(self._terms.values()), found)
            self.norms.update(zip(self._terms, found, strict=True))
        self._names.clear()
        self._terms.clear()
        self._waiting.clear()
        self._waiting_bytes = 0

    def of(self, names: Iterable[str], losses: torch.Tensor, aux: Any) -> SquareNorms:
        """The squared norms [n] of all parameters, in order. losses: [n]."""
        self._add_waiting()
        zero = torch.zeros(losses.shape, dtype=torch.float64, device=losses.device)
        absolute = {} if self.absolute is None else {name: self.absolute.get(name, zero) for name in names}
        return SquareNorms(
            {name: self.norms.get(name, zero) for name in names}, losses, aux, self.computed_as, absolute
        )


# Entries of a factor, or of a parameter (such as a bias), whose norm is computed in float64 at once.
_SMALL = 1024
# Bytes of such values that wait for others.
_MOST_WAITING = 1 << 18
# Numbers of a parameter's gradients for all samples that are materialised to wait for others.
_MOST_VALUES = 1 << 14


def _small_factors(term: Term) -> Sequence[torch.Tensor]:
    """[n, ...] each: the factors of an outer product, or the value, whose norms make the term's in float64
    without a check; none where they are large.
    """
    if isinstance(term, Product):
        one = term.is_outer_product and term.shape[0] == 1 and term.dtype != torch.float64
        factors: Sequence[torch.Tensor] = term.factors if one else ()
    else:
        factors = () if term.stored_value is None else (term.stored_value,)
    return factors if all(f.shape[1:].numel() <= _SMALL for f in factors) else ()


def _has_small_value(term: Term) -> bool:
    """Whether the norm is that of a small value in float32, which its factors do not show to be in range."""
    size = term.samples * math.prod(term.shape)
    return (
        math.prod(term.shape) <= _SMALL
        and 0 < size <= _MOST_VALUES
        and term.dtype == torch.float32
        and term.describe() == "materialise"
    )


class SamplesDisagree(Exception):
    """Samples disagree on a branch, and the batch was not to be split. groups: the places [k] of the samples
    of each outcome.
    """

    def __init__(self, groups: list[torch.Tensor]) -> None:
        super().__init__("samples disagree on a branch")
        self.groups = groups


class BatchPass:
    """One forward and one backward pass over a batch, or over some samples of it."""

    def __init__(
        self, loss: Any, params: Any, batch: tuple[Any, ...], in_dims: Any, has_aux: bool, randomness: str
    ) -> None:
        if names := [name for name, value in params.items() if value.is_complex()]:
            raise TransformError(
                f"the parameter {names[0]} is complex, of dtype {params[names[0]].dtype}; expected real"
                " parameters: per-sample gradients are real",
                hint="keep its real and imaginary part as parameters, and join them with torch.complex",
            )
        self.loss, self.params, self.has_aux = loss, params, has_aux
        self.settings: dict[str, Any] = {"in_dims": in_dims, "has_aux": has_aux, "randomness": randomness}
        title = getattr(loss, "__name__", repr(loss))
        self.flat, self.structure = flatten(batch)
        self.dims = flat_in_dims(in_dims, batch, self.flat, title)
        self.level = BatchLevel(mapped_size(self.flat, self.dims, title), randomness, WeightDeferral())
        self.watch = WriteCounts(self.flat)
        self.states = random_state.states() if randomness == "same" else None

    def run(self, consume: Callable[[str, DeferredGradient], None]) -> tuple[torch.Tensor, Any]:
        """(losses [n], aux). Calls `consume` with the name and the gradient of each parameter when it is
        complete.
        """
        level, names = self.level, list(self.params)

        def complete(number: int, cotangent: torch.Tensor | None) -> None:
            consume(names[number], _collected(level, self.params[names[number]], cotangent))

        in_front = [x.movedim(d, 0) if d else x for x, d in zip(self.flat, self.dims, strict=True)]
        with level.body(attach=False):
            traced = [x if d is None else level.lift(x) for x, d in zip(in_front, self.dims, strict=True)]
            arguments = (dict(self.params), *unflatten(traced, self.structure))
            found = cotangents_and_value(self.loss, (0,), arguments, {}, self.has_aux, complete)
            aux = map_leaves(
                lambda x: level.batch.physical(x) if isinstance(x, torch.Tensor) else x, found.aux
            )
            return level.batch.physical(found.value), aux

    def split(
        self,
        divergence: Divergence,
        again: Callable[..., Any],
        join: Callable[[list[Any], list[torch.Tensor]], Any],
    ) -> Any:
        """The results of `again` for the samples of each outcome of a branch, joined."""
        groups = self.groups(divergence)
        return join([again(*some) for some in self._batches(groups)], groups)

    def groups(self, divergence: Divergence) -> list[torch.Tensor]:
        """The places [k] of the samples of each outcome of a branch on which they disagree."""
        if divergence.level is not self.level:
            raise divergence
        if self.watch.was_written():
            raise TransformError(
                f"samples disagree on a branch{divergence.where}, after the loss had written into the batch",
                hint="write into a clone, because the loss runs again for the samples of each outcome",
            )
        return divergence.groups(
            next(x.device for x, d in zip(self.flat, self.dims, strict=True) if d is not None)
        )

    def _batches(self, groups: list[torch.Tensor]) -> Iterator[tuple[Any, ...]]:
        for group in groups:
            if self.states is not None:  # one draw for all samples, in any group
                random_state.restore(self.states)
            yield self.batch_of(group)

    def batch_of(self, rows: torch.Tensor) -> tuple[Any, ...]:
        """The batch with these samples [k] in place of its own."""
        chosen = [
            x if d is None else x.index_select(d, rows) for x, d in zip(self.flat, self.dims, strict=True)
        ]
        return tuple(unflatten(chosen, self.structure))


def _collected(
    level: BatchLevel, parameter: torch.Tensor, cotangent: torch.Tensor | None
) -> DeferredGradient:
    shape = parameter.shape
    if cotangent is None:  # the loss does not depend on the parameter
        return DeferredGradient((), shape, parameter.dtype, parameter.device)
    value = deferred_in(level.batch, cotangent)
    if value is None:
        value = DeferredGradient.of(term_of(level.batch, cotangent), shape)
    return value.with_terms(merged(value.terms)) if len(value.terms) > 1 else value


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
    job = BatchPass(loss, params, batch, in_dims, has_aux, randomness)
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
