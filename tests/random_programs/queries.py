"""psgrad's per_sample_gradients and its queries, against numbers made of the loop's gradients."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from psgrad.engine.gradients import (
    Sparse,
    per_sample_gradients,
    per_sample_square_norms,
    per_sample_weighted_sum,
)
from psgrad.engine.gradients.deferred import DeferredGradient
from psgrad.engine.gradients.terms import Dense
from tests.random_programs.backends import ramp
from tests.random_programs.modes import Case
from tests.random_programs.programs import Program

PROJECTION = Sparse(4, seed=3)
WEIGHTS = torch.tensor([0.7, -1.3, 0.4, 2.1], dtype=torch.float64)


def ours(program: Program, case: Case) -> list[Tensor]:
    """The per-sample gradients, and each query's numbers, in the order of `expected`."""
    names = [program.arguments[i].name for i in case.wanted]
    rest = [i for i in range(len(case.args)) if i not in case.wanted]
    params = {name: case.args[i] for name, i in zip(names, case.wanted, strict=True)}

    def loss(params: dict[str, Tensor], *batch: Tensor) -> Tensor:
        full: list[Tensor] = list(case.args)
        for name, i in zip(names, case.wanted, strict=True):
            full[i] = params[name]
        for x, i in zip(batch, rest, strict=True):
            full[i] = x
        return case.loss(*full)

    batch, dims = [case.args[i] for i in rest], tuple(case.dims[i] for i in rest)
    grads = per_sample_gradients(loss, params, *batch, in_dims=dims)
    weights = WEIGHTS[: len(grads)]
    found = [*grads.square_norms("parameter").values(), grads.square_norms()]
    found += [grads.gram(), grads.inner(grads), *grads.weighted_sum(weights).values()]
    found += [grads.dot({name: ramp(params[name]) for name in names}), *grads.second_moment().values()]
    found += [grads.project(PROJECTION)]
    found += [per_sample_square_norms(loss, params, *batch, in_dims=dims).square_norms()]
    clipped = per_sample_weighted_sum(loss, params, *batch, in_dims=dims, weights=lambda norms: weights)
    found += [*clipped.sums.values()]
    return [*grads.materialise().values(), *found]


def expected(
    gradients: Sequence[Tensor], tolerances: Sequence[Tensor], names: Sequence[str]
) -> list[tuple[Tensor, Tensor]]:
    """(numbers, how far from them they may be) of each query, for gradients [n, *shape] and how far from
    these they may be.
    """
    flat = [g.reshape(len(g), -1).double() for g in gradients]
    off = [t.reshape(len(t), -1).double() for t in tolerances]
    all_g, all_off = torch.cat(flat, 1), torch.cat(off, 1)
    weights = WEIGHTS[: len(all_g)]
    found = [_products(g, g, o, o) for g, o in zip(flat, off, strict=True)]
    whole = _products(all_g, all_g, all_off, all_off)
    norms = [(number.diagonal(), far.diagonal()) for number, far in (*found, whole)]
    sums = [
        ((weights @ g).reshape(x.shape[1:]), (weights.abs() @ o).reshape(x.shape[1:]))
        for g, o, x in zip(flat, off, gradients, strict=True)
    ]
    ramps = [ramp(g[0]).flatten().double() for g in gradients]
    dots = (
        sum(g @ r for g, r in zip(flat, ramps, strict=True)),
        sum(o @ r for o, r in zip(off, ramps, strict=True)),
    )
    moments = [
        (g.square().mean(0).reshape(x.shape[1:]), (2 * g.abs() * o + o * o).mean(0).reshape(x.shape[1:]))
        for g, o, x in zip(flat, off, gradients, strict=True)
    ]
    projected = _projected(gradients, names), all_off.sum(1, keepdim=True).expand(-1, 4)
    return [*norms, whole, whole, *sums, dots, *moments, projected, norms[-1], *sums]


def of_products(plain: Sequence[Tensor], moved: Sequence[Tensor]) -> dict[int, Tensor]:
    """How far rounding moves `gram` and `inner`, by their places in the results of `ours`. They are as exact
    as float64 is for the terms that they add, and the terms of one gradient may cancel. Norms are guarded.

    moved: how far rounding moves each result.
    """
    first = 2 * len(plain) + 1  # behind the gradients, the norms of each parameter, and the norms
    return {place: moved[place] for place in (first, first + 1)}


def _products(a: Tensor, b: Tensor, a_off: Tensor, b_off: Tensor) -> tuple[Tensor, Tensor]:
    return a @ b.T, a_off @ b.abs().T + a.abs() @ b_off.T + a_off @ b_off.T


def _projected(gradients: Sequence[Tensor], names: Sequence[str]) -> Tensor:
    """The projection of gradients that are there, in full."""
    dense = {
        name: DeferredGradient.of(Dense(g.double()), g.shape[1:])
        for name, g in zip(names, gradients, strict=True)
    }
    return PROJECTION.apply(dense, len(gradients[0]), gradients[0].device)
