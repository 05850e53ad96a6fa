"""A named sample axis: collectives by which a mapped function reads other samples.

    vmap(loss, axis_name="samples")        # inside: pmean(x, "samples") is the mean of x over all samples

A collective is linear, and its transpose is a collective. The transpose of `psum` is `psum`; the transpose of
`all_gather` gives each sample the sum of all samples' cotangents of its row. So with `grad` *inside* `vmap`,
cotangents also go from sample to sample. The gradient of sample i is the derivative of the *sum of all
samples' losses* in sample i's copy of the values, parameters included. The sum of these gradients over the
samples is the gradient of the summed loss in the shared parameters. A single one is not the gradient of that
sample's loss, because the loss depends on other samples.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from psgrad.engine.transforms import diagnostics
from psgrad.engine.transforms.batching import BatchLevel
from psgrad.engine.transforms.calls import (
    Call,
    Cotangents,
    Flat,
    TapedCall,
    dispatch_call,
    own_values,
    without_adoption,
)
from psgrad.engine.transforms.forward import ForwardLevel
from psgrad.engine.transforms.operators import aten
from psgrad.engine.transforms.private_torch import tree_map
from psgrad.engine.transforms.reverse import GradLevel
from psgrad.engine.transforms.state import state
from psgrad.errors import TransformError


def psum(x: Any, axis_name: str) -> Any:
    """The sum over the samples of each tensor of a pytree: the same for all samples."""
    return _collective(_Sum, x, axis_name)


def pmean(x: Any, axis_name: str) -> Any:
    """The mean over the samples of each tensor of a pytree."""
    size = axis_size(axis_name)
    return tree_map(lambda total: total / size, psum(x, axis_name))


def pmax(x: Any, axis_name: str) -> Any:
    """The maximum over the samples, element by element; samples with equal maxima share its cotangent."""
    return tree_map(lambda rows: rows.amax(0), all_gather(x, axis_name))


def pmin(x: Any, axis_name: str) -> Any:
    """The minimum over the samples, element by element; samples with equal minima share its cotangent."""
    return tree_map(lambda rows: rows.amin(0), all_gather(x, axis_name))


def all_gather(x: Any, axis_name: str) -> Any:
    """All samples' values, [n, *shape], for each tensor of a pytree: the same for all samples, without
    copies.
    """
    return _collective(_Gather, x, axis_name)


def axis_index(axis_name: str, device: torch.device | str | None = None) -> torch.Tensor:
    """The index of the sample, int64 [], on `device`, or where new tensors are made."""
    level = axis_level(axis_name)
    with without_adoption(level):
        return level.lift(torch.arange(level.size, device=device))


def axis_size(axis_name: str) -> int:
    """The number of samples."""
    return axis_level(axis_name).size


def axis_level(name: str) -> BatchLevel:
    """The innermost vmap that gave its axis this name."""
    scope = [
        level
        for level in reversed(state.stack)
        if isinstance(level, BatchLevel) and level.axis_name is not None
    ]
    for level in scope:
        if level.axis_name == name:
            return level
    raise TransformError(
        f"no axis named {name!r} is in scope{diagnostics.where()}",
        expected=(
            f"one of the axes in scope: {', '.join(repr(level.axis_name) for level in scope)}"
            if scope
            else "a vmap with axis_name=... around this call; there is none"
        ),
        next_step=f"name it where the function is mapped: vmap(f, axis_name={name!r})",
    )


def _collective(kind: Callable[[BatchLevel], _Collective], tree: Any, axis_name: str) -> Any:
    level = axis_level(axis_name)

    def of_one(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            raise TransformError(
                f"a collective over axis {axis_name!r} was given a {type(x).__name__}{diagnostics.where()}",
                expected="tensors",
            )
        return dispatch_call(kind(level), [x])[0]

    return tree_map(of_one, tree)


class _Collective(Call):
    """A linear function of one tensor of all samples of `level`. Subclasses define it and its transpose."""

    batches = True

    def __init__(self, level: BatchLevel, axis: int = 0) -> None:
        """axis: the axis with one entry for each sample, in the result of `_Gather` and the argument of its
        transpose. Each inner vmap adds one axis in front of it.
        """
        super().__init__(f"a collective over axis {level.axis_name!r}")
        self.level, self.axis = level, axis

    def of_samples(self, physical: torch.Tensor) -> torch.Tensor:
        """The result at the level, from the value with the sample axis in front."""
        raise NotImplementedError

    def transposed(self) -> _Collective:
        raise NotImplementedError

    def run(self, args: Flat) -> Flat:
        raise TransformError(
            f"{self.name} is evaluated after its vmap has ended",
            cause="a vjp_fn that was made inside the mapped function is called outside of it",
            next_step="call it inside the mapped function",
        )

    def batch(self, level: BatchLevel, args: Flat) -> Flat:
        (x,) = args
        if level is self.level:
            with without_adoption(level):
                return [self.of_samples(level.batch.physical(level.content(x)))]
        x = level.content(x)
        if not level.owns(x):
            return dispatch_call(self, [x], below=level)
        return [
            level.lift(y)
            for y in dispatch_call(type(self)(self.level, self.axis + 1), [x.below()], below=level)
        ]

    def differentiate(self, level: GradLevel, values: Flat, needed: list[int]) -> TapedCall:
        back = self.transposed()

        def pull(cotangents: Cotangents) -> Cotangents:
            return dispatch_call(back, cotangents)

        return TapedCall(own_values(level, dispatch_call(self, values, below=level), self.name), pull)

    def push(self, level: ForwardLevel, values: Flat, tangents: Flat) -> tuple[Flat, Flat]:
        return dispatch_call(self, values, below=level), dispatch_call(self, tangents, below=level)


class _Sum(_Collective):
    def of_samples(self, physical: torch.Tensor) -> torch.Tensor:
        return aten.sum.dim_IntList(physical, [0])

    def transposed(self) -> _Collective:
        return self


class _Gather(_Collective):
    """Each sample gets all samples' values, along a new axis."""

    def of_samples(self, physical: torch.Tensor) -> torch.Tensor:
        return physical.movedim(0, self.axis)

    def transposed(self) -> _Collective:
        return _SumOfRows(self.level, self.axis)


class _SumOfRows(_Collective):
    """Each sample gets the sum over all samples of the row with its index."""

    def of_samples(self, physical: torch.Tensor) -> torch.Tensor:
        return self.level.lift(aten.sum.dim_IntList(physical, [0]).movedim(self.axis, 0))

    def transposed(self) -> _Collective:
        return _Gather(self.level, self.axis)
