"""per_sample_gradients: the gradient of each sample's loss, as factors, and the queries that contract them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from psgrad.engine.gradients.deferral import DeferredGradient, Placed, WeightDeferral, deferred_in, oriented
from psgrad.engine.gradients.layout import Layout
from psgrad.engine.gradients.norms import square_norms
from psgrad.engine.gradients.terms import Dense, Term, accumulating
from psgrad.engine.transforms import generators
from psgrad.engine.transforms.batching import BatchLevel
from psgrad.engine.transforms.branching import Divergence, WriteWatch
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

    Where `loss` branches on a sample's data and samples disagree, it runs once for the samples of each outcome, as under `vmap`.
    """
    found: dict[str, DeferredGradient] = {}
    job = _Pass(loss, params, batch, in_dims, has_aux, randomness)
    try:
        losses, aux = job.run(found.__setitem__)
    except Divergence as divergence:
        groups = job.groups(divergence)
        parts = [
            per_sample_gradients(loss, params, *some, in_dims=in_dims, has_aux=has_aux, randomness=randomness)
            for some in job.batches(groups)
        ]
        return PerSampleGradients.of_groups(parts, groups)
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
    job = _Pass(loss, params, batch, in_dims, has_aux, randomness)

    def contract(name: str, gradient: DeferredGradient) -> None:
        computed_as[name] = gradient.describe()
        if gradient.terms:
            norms[name] = square_norms([gradient])[0]

    try:
        losses, aux = job.run(contract)
    except Divergence as divergence:
        groups = job.groups(divergence)
        parts = [
            per_sample_square_norms(loss, params, *some, in_dims=in_dims, has_aux=has_aux, randomness=randomness)
            for some in job.batches(groups)
        ]
        return SquareNorms.of_groups(parts, groups)
    zero = torch.zeros(losses.shape, dtype=torch.float64, device=losses.device)
    return SquareNorms({name: norms.get(name, zero) for name in params}, losses, aux, computed_as)


class _Pass:
    """One pass forward and back over a batch, or over some samples of it."""

    def __init__(self, loss: Any, params: Any, batch: tuple[Any, ...], in_dims: Any, has_aux: bool, randomness: str) -> None:
        self.loss, self.params, self.has_aux = loss, params, has_aux
        title = getattr(loss, "__name__", repr(loss))
        self.flat, self.spec = tree_flatten(batch)
        self.dims = flat_in_dims(in_dims, batch, self.flat, self.spec, title)
        self.level = BatchLevel(mapped_size(self.flat, self.dims, title), randomness, WeightDeferral())
        self.watch = WriteWatch(self.flat)
        self.states = generators.states() if randomness == "same" else None

    def run(self, consume: Callable[[str, DeferredGradient], None]) -> tuple[torch.Tensor, Any]:
        """(losses [n], aux); `consume` is told each parameter's gradient when it is complete."""
        level, names = self.level, list(self.params)

        def complete(number: int, cotangent: torch.Tensor | None) -> None:
            consume(names[number], _collected(level, self.params[names[number]], cotangent))

        in_front = [x.movedim(d, 0) if d else x for x, d in zip(self.flat, self.dims, strict=True)]
        with level.body(attach=False):
            traced = [x if d is None else level.lift(x) for x, d in zip(in_front, self.dims, strict=True)]
            arguments = (dict(self.params), *tree_unflatten(traced, self.spec))
            record = cotangents_and_value(self.loss, (0,), arguments, {}, self.has_aux, complete)
            aux = tree_map(lambda x: level.batch.physical(x) if isinstance(x, torch.Tensor) else x, record.aux)
            return level.batch.physical(record.value), aux

    def groups(self, divergence: Divergence) -> list[torch.Tensor]:
        """The samples of each outcome of a branch on which they disagree."""
        if divergence.level is not self.level:
            raise divergence
        if self.watch.saw_a_write():
            raise TransformError(
                f"samples disagree on a branch{divergence.where}, after the loss had written into the batch",
                next_step="write into a clone: the loss runs again for the samples of each outcome",
            )
        return divergence.groups(next(x.device for x, d in zip(self.flat, self.dims, strict=True) if d is not None))

    def batches(self, groups: list[torch.Tensor]) -> Iterator[tuple[Any, ...]]:
        for group in groups:
            if self.states is not None:  # one draw for all samples, whatever group they are in
                generators.restore(self.states)
            chosen = [x if d is None else x.index_select(d, group) for x, d in zip(self.flat, self.dims, strict=True)]
            yield tuple(tree_unflatten(chosen, self.spec))


def _in_order(parts: list[Any], groups: list[torch.Tensor]) -> Any:
    """What each group of samples gave (a pytree of tensors, sample axis in front), joined in the samples' order."""
    order = torch.cat(groups).argsort()
    return tree_map(lambda *items: torch.cat(items).index_select(0, order) if isinstance(items[0], torch.Tensor) else items[0], *parts)


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

    @classmethod
    def of_groups(cls, parts: list[PerSampleGradients], groups: list[torch.Tensor]) -> PerSampleGradients:
        """The gradients of groups of samples as one; `groups` holds each one's places."""
        count = sum(len(part) for part in parts)

        def gradient(name: str) -> DeferredGradient:
            terms = [
                Placed(placed.term.among(group, count), placed.layout)
                for part, group in zip(parts, groups, strict=True)
                for placed in part.gradients[name].terms
            ]
            return parts[0].gradients[name].with_terms(_merged(terms))

        losses, aux = _in_order([(part.losses, part.aux) for part in parts], groups)
        return cls({name: gradient(name) for name in parts[0].gradients}, losses, aux)

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

    @classmethod
    def of_groups(cls, parts: list[SquareNorms], groups: list[torch.Tensor]) -> SquareNorms:
        """The norms of groups of samples as one; `groups` holds each one's places."""
        norms, losses, aux = _in_order([(part.by_parameter, part.losses, part.aux) for part in parts], groups)
        ways = {name: " | ".join(dict.fromkeys(part.computed_as[name] for part in parts)) for name in parts[0].computed_as}
        return cls(norms, losses, aux, ways)

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
