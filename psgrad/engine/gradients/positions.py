"""The contribution of each position of a sample, such as a token, to the squared norm of its gradient."""

from __future__ import annotations

import math

import torch

from psgrad.engine.gradients.queries import PerSampleGradients
from psgrad.engine.gradients.terms import blocks


def position_products(gradients: PerSampleGradients, positions: int) -> torch.Tensor:
    """[n, t] float64: the inner product of each position's contribution to a gradient with the whole
    gradient, summed over the parameters.

    If a weight is applied at `positions` positions of a sample, its gradient is a sum over them,
    g = sum over t of g_t. The inner products <g_t, g> of all positions sum to the squared norm |g|^2. The
    inner product is negative for a position that points against the others. Two kinds of parameters are left
    out, and their squared norm is missing from the sum: those with another number of positions (a head on one
    pooled vector), and those without factors (biases, scales of norms).

    Args:
        gradients: of n samples, from `per_sample_gradients(..., settle=False)`, which stores all factors.
        positions: t, the number of positions of a sample.

    A parameter's gradient is materialised for a few samples at a time.
    """
    products = torch.zeros(len(gradients), positions, dtype=torch.float64, device=gradients.losses.device)
    for gradient in gradients.gradients.values():
        if not any(placed.term.positions == positions for placed in gradient.terms):
            continue
        for block in blocks(len(gradients), 2 * math.prod(gradient.shape) * 8, gradient.device):
            some = gradient.at(block)
            whole = some.materialise().double()
            for placed in some.terms:
                if placed.term.positions == positions:
                    value = placed.layout.invert(whole, placed.term.shape, lead=1)
                    products[block] += placed.term.at(slice(None), torch.float64).position_products(value)
    return products
