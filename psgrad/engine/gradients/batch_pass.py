"""One forward and one backward pass over a batch of samples, which hands over each parameter's gradient as
soon as it is complete.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch

from psgrad import random_state
from psgrad.engine.gradients.deferral import WeightDeferral, deferred_in
from psgrad.engine.gradients.deferred import DeferredGradient, merged, term_of
from psgrad.engine.transforms.batching import BatchLevel
from psgrad.engine.transforms.grad import cotangents_and_value
from psgrad.engine.transforms.levels import Divergence, WriteCounts
from psgrad.engine.transforms.trees import flatten, map_leaves, unflatten
from psgrad.engine.transforms.vmap import flat_in_dims, mapped_size
from psgrad.errors import TransformError


class Collector(Protocol):
    """What is made of the gradients of one pass."""

    def add(self, name: str, gradient: DeferredGradient) -> None:
        """Take a parameter's gradient when the backward pass completes it."""

    def result(self, losses: torch.Tensor, aux: Any) -> Any:
        """What was made of all gradients. losses: [n]."""


class SamplesDisagree(Exception):
    """Samples disagree on a branch, and the batch was not to be split. groups: the places [k] of the samples
    of each outcome.
    """

    def __init__(self, groups: list[torch.Tensor]) -> None:
        super().__init__("samples disagree on a branch")
        self.groups = groups


class BatchPass:
    """One forward and one backward pass over a batch; one over the samples of each outcome of a branch where
    they disagree on it.

    Args:
        counted: see `per_sample_weighted_sum`; None for all.

    The others are those of `per_sample_gradients`.
    """

    def __init__(
        self,
        loss: Callable[..., Any],
        params: Mapping[str, torch.Tensor],
        batch: tuple[Any, ...],
        in_dims: Any,
        has_aux: bool,
        randomness: str,
        counted: torch.Tensor | None = None,
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
        self.size = mapped_size(self.flat, self.dims, title)
        self.level = BatchLevel(self.size, randomness, WeightDeferral())
        self.level.counted = counted
        self.watch = WriteCounts(self.flat)
        self.states = random_state.states() if randomness == "same" else None

    def run(self, consume: Callable[[str, DeferredGradient], None]) -> tuple[torch.Tensor, Any]:
        """(losses [n], aux). Calls `consume` with the name and the gradient of each parameter when it is
        complete.
        """
        level, names = self.level, list(self.params)

        def complete(number: int, cotangent: torch.Tensor | None) -> None:
            consume(names[number], _gradient(level, self.params[names[number]], cotangent))

        in_front = [x.movedim(d, 0) if d else x for x, d in zip(self.flat, self.dims, strict=True)]
        with level.body(attach=False):
            traced = [x if d is None else level.lift(x) for x, d in zip(in_front, self.dims, strict=True)]
            arguments = (dict(self.params), *unflatten(traced, self.structure))
            found = cotangents_and_value(
                self.loss, (0,), arguments, {}, self.has_aux, level.of_shared, complete
            )
            aux = map_leaves(
                lambda x: level.batch.physical(x) if isinstance(x, torch.Tensor) else x, found.aux
            )
            return level.batch.physical(found.value), aux

    def collected(self, make: Callable[[BatchPass], Collector]) -> tuple[list[Any], list[torch.Tensor]]:
        """What a collector made of the gradients of each pass, and the places [k] of the samples of each.
        make: the collector for a pass.
        """
        collector = make(self)
        try:
            losses, aux = self.run(collector.add)
        except Divergence as divergence:
            groups = self._groups(divergence)
        else:
            return [collector.result(losses, aux)], [torch.arange(self.size, device=losses.device)]
        del collector
        results: list[Any] = []
        places: list[torch.Tensor] = []
        for group in groups:
            if self.states is not None:  # one draw for all samples, in any group
                random_state.restore(self.states)
            again = BatchPass(self.loss, self.params, self.batch_of(group), **self.settings)
            some, among = again.collected(make)
            results += some
            places += [group[each] for each in among]
        return results, places

    def _groups(self, divergence: Divergence) -> list[torch.Tensor]:
        """The places [k] of the samples of each outcome of a branch on which they disagree."""
        if divergence.level is not self.level:
            raise divergence
        if self.watch.was_written():
            raise TransformError(
                f"samples disagree on a branch{divergence.where}, after the loss had written into the batch",
                hint="write into a clone, because the loss runs again for the samples of each outcome",
            )
        groups = divergence.groups(
            next(x.device for x, d in zip(self.flat, self.dims, strict=True) if d is not None)
        )
        if self.level.counted is not None:
            raise SamplesDisagree(groups) from None
        return groups

    def batch_of(self, rows: torch.Tensor) -> tuple[Any, ...]:
        """The batch with these samples [k] in place of its own."""
        chosen = [
            x if d is None else x.index_select(d, rows) for x, d in zip(self.flat, self.dims, strict=True)
        ]
        return tuple(unflatten(chosen, self.structure))


def _gradient(level: BatchLevel, parameter: torch.Tensor, cotangent: torch.Tensor | None) -> DeferredGradient:
    shape = parameter.shape
    if cotangent is None:  # the loss does not depend on the parameter
        return DeferredGradient((), shape, parameter.dtype, parameter.device)
    value = deferred_in(level.batch, cotangent)
    if value is None:
        value = DeferredGradient.of(term_of(level.batch, cotangent), shape)
    return value.with_terms(merged(value.terms)) if len(value.terms) > 1 else value
