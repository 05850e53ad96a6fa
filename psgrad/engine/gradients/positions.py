"""How much each position of a sample, such as a token, contributes to the squared norm of its gradient."""

from __future__ import annotations

import math

import torch

from psgrad.engine.gradients.queries import PerSampleGradients
from psgrad.engine.gradients.terms import blocks


def position_products(gradients: PerSampleGradients, positions: int) -> torch.Tensor:
    """[n, t] float64: the inner product of what each position contributes to a gradient with the whole
    gradient, summed over the parameters.

    A weight that is applied at `positions` places of a sample has a gradient that is a sum over them,
    g = sum over t of g_t. The inner products <g_t, g> of all positions sum to the squared norm |g|^2; a
    position that is against the others has a negative one. Parameters that are applied elsewhere (a head on
    one pooled vector) and those whose factors are not kept (biases, scales of norms) have no part in it:
    their squared norm is what is missing.

    Args:
        gradients: of n samples, from `per_sample_gradients(..., settle=False)`, which keeps all factors.
        positions: t, how many a sample has.

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
