"""Which form of a per-sample gradient is kept: its factors, or its value where that is smaller."""

from __future__ import annotations

import math

import torch

from psgrad.engine.gradients.placed import DeferredGradient, Placed
from psgrad.engine.gradients.terms import Dense, Term, accumulating_dtype


def settled(gradient: DeferredGradient) -> DeferredGradient:
    """The same gradient, written out where its value takes no more room than its factors.

    Only where its norm is found by writing it out anyhow, so that nothing is lost: the value costs what the sum over all samples does,
    and every later query then reads the value. Never for a weight that is larger than what the samples say about it.
    """
    if gradient.dtype != accumulating_dtype(gradient.dtype):  # a value in halves would have lost digits that factors in halves have
        return gradient
    if len(gradient.terms) != 1 or not _written_out_is_smaller(gradient.terms[0].term, gradient.dtype):
        return gradient
    return gradient.with_terms([Placed.plain(Dense(gradient.materialise(), written_out=True))])


def _written_out_is_smaller(term: Term, dtype: torch.dtype) -> bool:
    if isinstance(term, Dense) or not term.samples:
        return False
    own = [factor for factor in term.factors if factor.stride(0)]  # the others are one tensor for all samples
    kept = sum(factor.shape[1:].numel() * factor.element_size() for factor in own)
    return term.describe() == "materialise" and math.prod(term.shape) * dtype.itemsize <= kept
