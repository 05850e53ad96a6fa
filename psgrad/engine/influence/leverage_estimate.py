"""Estimates of the leverage of training examples by random vectors, where only products with the inverse of
the curvature are available.

M_i = J_i H^-1 J_i' takes as many solves as example i's output has numbers. Of vectors x = H^-1 (G' z +
sqrt(mu) e), z and e standard normal and H = G'G + mu I, the mean of x x' is H^-1. So k solves give all M_i at
once, as the mean of (J_i x) (J_i x)': symmetric, never negative, and with a relative error of about sqrt(2 /
k). The examples of the largest leverage, where this error would matter, are solved exactly.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from psgrad.engine.execution.examples import Examples
from psgrad.engine.execution.output_rows import JacobianRows, gauss_newton_rows, jacobian_rows
from psgrad.engine.influence.leverage import Leverage, output_products
from psgrad.engine.influence.solvers.direct import combinations

Inverse = Callable[[torch.Tensor], torch.Tensor]  # [k, p] to [k, p], float64

# The number of random vectors, and the fewest of an estimate; and right-hand sides of examples that are
# solved for.
_VECTORS, _FEWEST, _SOLVED = 256, 32, 256
# Blocks of vectors that are alive at once, and the part of the free memory that they may take.
_ALIVE, _SHARE = 4, 4


def vectors_that_fit(training: Examples) -> int:
    """How many random vectors are taken: as many as fit into memory, and none where these are too few."""
    room = training.room() // (_SHARE * _ALIVE * 8 * training.flat.size)
    return min(_VECTORS, room) if room >= _FEWEST else 0


def estimated_leverage(
    training: Examples, inverse: Inverse, shift: float, root: torch.Tensor, gradient: torch.Tensor, seed: int
) -> tuple[Leverage, int, int]:
    """(the leverage of all n examples, how many of them were solved for, how many random vectors stand for
    the others).

    inverse: products with H^-1, [k, p] to [k, p]. shift: mu. root [n, C, R], gradient [n, C]: as
    `output_factors` has them.
    """
    count = max(vectors_that_fit(training), _FEWEST)
    vectors = _normal_vectors(training, inverse, shift, count, seed)
    products = output_products(
        training, lambda rows: rows.double() @ vectors.t().to(rows.device) / count**0.5
    )
    largest, rows = Leverage.through(products, root, gradient).largest, jacobian_rows(training)
    solved = largest.argsort(descending=True)[: max(1, _SOLVED // rows.per_sample)]
    products[solved] = _solved_products(rows, inverse, solved.tolist())
    return Leverage.through(products, root, gradient), len(solved), count


def _normal_vectors(
    training: Examples, inverse: Inverse, shift: float, count: int, seed: int
) -> torch.Tensor:
    """[count, p] float64: normal vectors whose covariance is the inverse."""
    generator, rows = torch.Generator().manual_seed(seed), gauss_newton_rows(training)
    weights = torch.randn(len(rows), count, generator=generator, dtype=torch.float64)
    right = combinations(rows, weights)
    right.add_(torch.randn(right.shape, generator=generator, dtype=torch.float64), alpha=shift**0.5)
    return inverse(right.to(training.device))


def _solved_products(rows: JacobianRows, inverse: Inverse, places: list[int]) -> torch.Tensor:
    """M_i [k, C, C] float64 on the CPU of the examples at these places."""
    own = torch.cat(
        [rows.flat.join(rows.gradients(place, place + 1).materialise()).double() for place in places]
    )
    solved = inverse(own).reshape(len(places), rows.per_sample, -1)
    return (own.reshape(solved.shape) @ solved.transpose(1, 2)).cpu()
