"""per_sample_gradients: the gradient of each sample's loss, as factors, and the queries that contract them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from psgrad.engine.gradients.deferral import DeferredGradient, Placed, WeightDeferral, deferred_in, oriented
from psgrad.engine.gradients.layout import Layout
from psgrad.engine.gradients.norms import square_norms
from psgrad.engine.gradients.terms import Dense, Term, accumulating
from psgrad.engine.transforms.batching import BatchLevel
from psgrad.engine.transforms.differentiate import cotangents_and_value
from psgrad.engine.transforms.vectorize import flat_in_dims, mapped_size
from psgrad.errors import TransformError

Per = Literal["total", "parameter", "module"]


def per_sample_gradients(
    loss: Callable[..., Any],
    params: Mapping[str, torch.Tensor],
    *batch: Any,
    in_dims: Any = 0,
    has_aux: bool = False,
    randomness: str = "error",
) -> PerSampleGradients:
    """The gradients of `loss(params, *sample)` for each sample of a batch, in one pass forward and one back.

    Args:
        loss: the loss of one sample, without a batch axis: a real tensor of shape (); with `has_aux` a pair of it and a pytree
            of tensors.
        params: name -> parameter, shared by all samples.
        batch: pytrees of tensors with a sample axis, n long.
        in_dims: where that axis is, as for `vmap`; None for an argument that all samples share.
        randomness: as for `vmap`.

    Nothing of the size n x parameters is made here, nor by a query that does not ask for it.
    """
    found: dict[str, DeferredGradient] = {}
    losses, aux = _pass(loss, params, batch, in_dims, has_aux, randomness, found.__setitem__)
    return PerSampleGradients({name: found[name] for name in params}, losses, aux)


def per_sample_square_norms(
    loss: Callable[..., Any],
    params: Mapping[str, torch.Tensor],
    *batch: Any,
    in_dims: Any = 0,
    has_aux: bool = False,
    randomness: str = "error",
) -> SquareNorms:
    """The squared norms alone, with the arguments of `per_sample_gradients`.

    Each parameter's gradient is contracted as soon as the pass back has all of it, and dropped: the factors of all parameters never
    exist together.
    """
    norms: dict[str, torch.Tensor] = {}
    computed_as: dict[str, str] = {}

    def contract(name: str, gradient: DeferredGradient) -> None:
        computed_as[name] = gradient.describe()
        if gradient.terms:
            norms[name] = square_norms([gradient])[0]

    losses, aux = _pass(loss, params, batch, in_dims, has_aux, randomness, contract)
    zero = torch.zeros(losses.shape, dtype=torch.float64, device=losses.device)
    return SquareNorms({name: norms.get(name, zero) for name in params}, losses, aux, computed_as)


def _pass(
    loss: Callable[..., Any],
    params: Mapping[str, torch.Tensor],
    batch: tuple[Any, ...],
    in_dims: Any,
    has_aux: bool,
    randomness: str,
    consume: Callable[[str, DeferredGradient], None],
) -> tuple[torch.Tensor, Any]:
    """(losses [n], aux) of a batch; `consume` is told each parameter's gradient when it is complete."""
    title = getattr(loss, "__name__", repr(loss))
    flat, spec = tree_flatten(batch)
    dims = flat_in_dims(in_dims, batch, flat, spec, title)
    level = BatchLevel(mapped_size(flat, dims, title), randomness, WeightDeferral())
    names = list(params)

    def complete(number: int, cotangent: torch.Tensor | None) -> None:
        consume(names[number], _collected(level, params[names[number]], cotangent))

    with level.body(attach=False):
        traced = [x if d is None else level.lift(x.movedim(d, 0)) for x, d in zip(flat, dims, strict=True)]
        record = cotangents_and_value(loss, (0,), (dict(params), *tree_unflatten(traced, spec)), {}, has_aux, complete)
        aux = tree_map(lambda x: level.batch.physical(x) if isinstance(x, torch.Tensor) else x, record.aux)
        return level.batch.physical(record.value), aux


def _collected(level: BatchLevel, parameter: torch.Tensor, cotangent: torch.Tensor | None) -> DeferredGradient:
    shape = parameter.shape
    if cotangent is None:  # the loss does not depend on the parameter
        return DeferredGradient((), shape, parameter.dtype, parameter.device)
    value = deferred_in(level.batch, cotangent)
    if value is None:
        value = DeferredGradient.of(Dense(level.batch.physical(cotangent)), shape)
    return value.with_terms(_merged(value.terms))


def _merged(terms: Iterable[Placed]) -> list[Placed]:
    """Terms of one kind and layout as one: more positions of the same product. What is left over has cross terms of its own."""
    groups: dict[Any, list[Placed]] = {}
    for placed in map(_upright, terms):
        groups.setdefault((placed.layout, placed.term.kin()), []).append(placed)
    return [
        Placed(first.term.plus([placed.term for placed in others]), first.layout) if others else first for first, *others in groups.values()
    ]


def _upright(placed: Placed) -> Placed:
    """The same with its elements in the parameter's order where that costs nothing, so that a weight and its transpose meet."""
    term = oriented(placed)
    layout = Layout.identity(term.shape).reshape(placed.layout.shape) if term is not None else None
    return Placed(term, layout) if term is not None and layout is not None else placed


@dataclass(frozen=True)
class PerSampleGradients:
    """Per-sample gradients, by parameter name, and the queries on them. All results are plain tensors.

    Attributes:
        gradients: name -> deferred gradient.
        losses: [n], each sample's loss.
        aux: what the loss returned besides, sample axis in front; None without `has_aux`.
    """

    gradients: dict[str, DeferredGradient]
    losses: torch.Tensor
    aux: Any = None

    def __len__(self) -> int:
        return int(self.losses.shape[0])

    def square_norms(self, per: Per = "total") -> Any:
        """Squared Euclidean norms, float64 [n] whatever the parameters' dtype.

        per: 'total' over all parameters; 'parameter' as name -> [n]; 'module' likewise, by the parameters' owner
        ('' for parameters of the model itself).
        """
        zero = torch.zeros(len(self), dtype=torch.float64, device=self.losses.device)
        found = square_norms(list(self.gradients.values()))
        return _grouped({name: norms if norms is not None else zero for name, norms in zip(self.gradients, found, strict=True)}, per)

    def weighted_sum(self, weights: torch.Tensor) -> dict[str, torch.Tensor]:
        """name -> [*shape]: the sum over samples of the gradients, each times its weight [n]."""
        weights = torch.as_tensor(weights, device=self.losses.device)
        if weights.shape != self.losses.shape:
            raise TransformError(
                f"weighted_sum: weights of shape {tuple(weights.shape)} for {len(self)} samples", expected=f"shape ({len(self)},)"
            )
        return {
            name: _summed(gradient, lambda term, layout: layout.apply(term.weighted_sum(weights)))
            for name, gradient in self.gradients.items()
        }

    def mean(self) -> dict[str, torch.Tensor]:
        """name -> [*shape]: the mean gradient."""
        return self.weighted_sum(torch.full_like(self.losses, 1 / max(len(self), 1)))

    def dot(self, vector: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """[n]: the inner product of each sample's gradient with one vector, given as name -> [*shape]. Absent names count zero."""
        unknown = set(vector) - set(self.gradients)
        if unknown:
            raise TransformError(f"dot: no gradient of the name(s) {sorted(unknown)}", expected=f"names among {list(self.gradients)[:8]}")
        total = torch.zeros(len(self), dtype=accumulating(self.losses).dtype, device=self.losses.device)
        for name, direction in vector.items():
            gradient = self.gradients[name]
            if direction.shape != gradient.shape:
                raise TransformError(f"dot: {name} has shape {tuple(direction.shape)}", expected=f"{tuple(gradient.shape)}")
            for placed in gradient.terms:
                total = total + placed.term.dot(placed.layout.invert(direction, placed.term.shape))
        return total

    def materialise(self) -> dict[str, torch.Tensor]:
        """name -> [n, *shape]: every per-sample gradient written out."""
        return {
            name: gradient.materialise()
            if gradient.terms
            else torch.zeros(len(self), *gradient.shape, dtype=gradient.dtype, device=gradient.device)
            for name, gradient in self.gradients.items()
        }

    def select(self, names: Iterable[str]) -> PerSampleGradients:
        """The same for some of the parameters."""
        return PerSampleGradients({name: self.gradients[name] for name in names}, self.losses, self.aux)

    def describe(self) -> dict[str, str]:
        """name -> how its norms are computed."""
        return {name: gradient.describe() for name, gradient in self.gradients.items()}


@dataclass(frozen=True)
class SquareNorms:
    """What is left of per-sample gradients when only their norms were wanted.

    Attributes:
        by_parameter: name -> [n] float64, the squared norms.
        losses, aux: as in PerSampleGradients.
        computed_as: name -> how its norms were computed.
    """

    by_parameter: dict[str, torch.Tensor]
    losses: torch.Tensor
    aux: Any
    computed_as: dict[str, str]

    def __len__(self) -> int:
        return int(self.losses.shape[0])

    def square_norms(self, per: Per = "total") -> Any:
        """As PerSampleGradients.square_norms."""
        return _grouped(self.by_parameter, per)

    def describe(self) -> dict[str, str]:
        """name -> how its norms were computed."""
        return self.computed_as


def _grouped(norms: dict[str, torch.Tensor], per: Per) -> Any:
    """Squared norms by parameter, added up as `per` says."""
    if per == "parameter":
        return norms
    if per == "total":
        return torch.stack(list(norms.values())).sum(0)
    if per != "module":
        raise ValueError(f"per={per!r}: expected 'total', 'parameter' or 'module'")
    modules: dict[str, torch.Tensor] = {}
    for name, square in norms.items():
        owner = name.rpartition(".")[0]
        modules[owner] = modules[owner] + square if owner in modules else square
    return modules


def _summed(gradient: DeferredGradient, query: Callable[[Term, Layout], torch.Tensor]) -> torch.Tensor:
    total: torch.Tensor | None = None
    for placed in gradient.terms:
        part = query(placed.term, placed.layout)
        total = part if total is None else total + part
    if total is None:
        return torch.zeros(gradient.shape, dtype=gradient.dtype, device=gradient.device)
    return total
