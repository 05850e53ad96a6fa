"""Deferred per-sample gradients: `per_sample_gradients` and its queries."""

from psgrad.engine.gradients.per_sample import PerSampleGradients as PerSampleGradients
from psgrad.engine.gradients.per_sample import SquareNorms as SquareNorms
from psgrad.engine.gradients.per_sample import per_sample_gradients as per_sample_gradients
from psgrad.engine.gradients.per_sample import per_sample_square_norms as per_sample_square_norms

__all__ = ["PerSampleGradients", "SquareNorms", "per_sample_gradients", "per_sample_square_norms"]
