"""Which form of a per-sample gradient is kept: its factors, or its value where that is smaller."""

from __future__ import annotations

import math

import torch

from psgrad.engine.gradients.placed import DeferredGradient, Placed
from psgrad.engine.gradients.queries import PerSampleGradients
from psgrad.engine.gradients.terms import Dense, Term, accumulating_dtype

# How much more room than its factors a value may take that is contracted again and again: a convolution's norms, sums and inner products
# take as long as writing it out each, and a tenth of that where it is there. Measured on the CNN of configs/digits.yaml.
_ROOM_FOR_MANY = 2.0


def settled_for_many(gradients: PerSampleGradients) -> PerSampleGradients:
    """The same gradients for many queries: written out also where that takes up to twice the room."""
    found = {name: settled(gradient, _ROOM_FOR_MANY) for name, gradient in gradients.gradients.items()}
    return PerSampleGradients(found, gradients.losses, gradients.aux)


def settled(gradient: DeferredGradient, room: float = 1) -> DeferredGradient:
    """The same gradient, written out where its value takes no more than `room` times what its factors do.

    Only where its norm is found by writing it out anyhow, so that nothing is lost: the value costs what the sum over all samples does,
    and every later query then reads the value. Never for a weight that is larger than what the samples say about it.
    """
    if gradient.dtype != accumulating_dtype(gradient.dtype):  # a value in halves would have lost digits that factors in halves have
        return gradient
    if len(gradient.terms) != 1 or not _written_out_is_smaller(gradient.terms[0].term, gradient.dtype, room):
        return gradient
    return gradient.with_terms([Placed.plain(Dense(gradient.materialise(), written_out=True))])


def _written_out_is_smaller(term: Term, dtype: torch.dtype, room: float) -> bool:
    if isinstance(term, Dense) or not term.samples:
        return False
    own = [factor for factor in term.factors if factor.stride(0)]  # the others are one tensor for all samples
    kept = sum(factor.shape[1:].numel() * factor.element_size() for factor in own)
    return term.describe() == "materialise" and math.prod(term.shape) * dtype.itemsize <= room * kept
