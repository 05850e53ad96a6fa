"""Deferred per-sample gradients: `per_sample_gradients` and its queries."""

from psgrad.engine.gradients.per_sample import per_sample_gradients as per_sample_gradients
from psgrad.engine.gradients.per_sample import per_sample_square_norms as per_sample_square_norms
from psgrad.engine.gradients.queries import PerSampleGradients as PerSampleGradients
from psgrad.engine.gradients.queries import SquareNorms as SquareNorms
from psgrad.engine.gradients.weighted_sums import WeightedSum as WeightedSum
from psgrad.engine.gradients.weighted_sums import per_sample_weighted_sum as per_sample_weighted_sum

__all__ = [
    "PerSampleGradients",
    "SquareNorms",
    "WeightedSum",
    "per_sample_gradients",
    "per_sample_square_norms",
    "per_sample_weighted_sum",
]
