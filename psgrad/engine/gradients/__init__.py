"""Deferred per-sample gradients: `per_sample_gradients` and its queries."""

from psgrad.engine.gradients.per_sample import per_sample_gradients as per_sample_gradients
from psgrad.engine.gradients.per_sample import per_sample_square_norms as per_sample_square_norms
from psgrad.engine.gradients.queries import PerSampleGradients as PerSampleGradients
from psgrad.engine.gradients.queries import SquareNorms as SquareNorms

__all__ = ["PerSampleGradients", "SquareNorms", "per_sample_gradients", "per_sample_square_norms"]
