"""Losses times a power of two, so that cotangents in float16 neither vanish nor overflow, and gradients
divided by it in float32: both are exact.

A sample's power does not depend on the samples beside it. It is START, or the next one at which the sample's
gradient is finite and large enough.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from psgrad.engine.transforms.rules.casts import with_scaled_cotangent

START = 12
"""Exponent of two. The cotangents of a loss of about one are far from both ends of float16 then."""
_STEP, _LEAST, _MOST = 12, -36, 72
# Scaled norms below it may have lost digits: float16 has all of its digits from 2^-14 on, and a norm is that
# of many numbers.
_SMALL = 2.0**-6

Loss = Callable[..., Any]


def scaled(loss: Loss, exponent: int) -> Loss:
    """`loss(params, ...)`, with the same gradients, from cotangents that are 2^exponent times as large.

    loss: returns a number, or a pair of it and something else.
    """

    def found(params: Any, *args: Any) -> Any:
        down = {name: with_scaled_cotangent(each, 2.0**-exponent) for name, each in params.items()}
        result = loss(down, *args)
        if isinstance(result, tuple):
            return with_scaled_cotangent(result[0], 2.0**exponent), *result[1:]
        return with_scaled_cotangent(result, 2.0**exponent)

    return found


def each_at_its_scale(compute: Callable[[int, Tensor | None], Any], norms_at: NormsAt) -> Any:
    """What `compute` finds of all samples, each with losses times the power of two that it needs.

    Args:
        compute: of an exponent beside START and the samples [k], None for all, to gradients or norms of them.
        norms_at: of the same to the norms [k] alone.
    """
    result = compute(0, None)
    norms = _norms(result)
    if norms is None:
        return result
    exponents = _exponents(norms, norms_at)
    groups = [(exponents == each).nonzero()[:, 0] for each in exponents.unique().tolist()]
    if not exponents.any():
        return result
    parts = [compute(int(exponents[group[0]]), group) for group in groups]
    return type(result).of_groups(parts, groups)


NormsAt = Callable[[int, Tensor], Tensor]


def _norms(result: Any) -> Tensor | None:
    """[n], of gradients, norms or projections; None for another result."""
    found = getattr(result, "norms", result)
    return found.square_norms().sqrt() if hasattr(found, "square_norms") else None


def _exponents(norms: Tensor, norms_at: NormsAt) -> Tensor:
    """int64 [n]: beside START, the exponent of each sample. norms: those at START."""
    found = torch.zeros(len(norms), dtype=torch.int64, device=norms.device)
    down = (~norms.isfinite()).nonzero()[:, 0]
    up = (norms * 2.0**START < _SMALL).nonzero()[:, 0]
    for exponent in range(-_STEP, _LEAST - START - 1, -_STEP):
        if not len(down):
            break
        finite = norms_at(exponent, down).isfinite()
        found[down[finite]] = exponent
        down = down[~finite]
    for exponent in range(_STEP, _MOST - START + 1, _STEP):
        if not len(up):
            break
        norms = norms_at(exponent, up)
        up, norms = up[norms.isfinite()], norms[norms.isfinite()]
        found[up] = exponent
        up = up[norms * 2.0 ** (START + exponent) < _SMALL]
    return found
