"""Deferred per-sample gradients: `per_sample_gradients` and its queries."""

from psgrad.engine.gradients.per_sample import ProjectedGradients as ProjectedGradients
from psgrad.engine.gradients.per_sample import per_sample_gradients as per_sample_gradients
from psgrad.engine.gradients.per_sample import per_sample_projections as per_sample_projections
from psgrad.engine.gradients.per_sample import per_sample_square_norms as per_sample_square_norms
from psgrad.engine.gradients.projections import Projection as Projection
from psgrad.engine.gradients.projections import Sparse as Sparse
from psgrad.engine.gradients.projections import TwoSided as TwoSided
from psgrad.engine.gradients.queries import PerSampleGradients as PerSampleGradients
from psgrad.engine.gradients.queries import SquareNorms as SquareNorms
from psgrad.engine.gradients.weighted_sums import WeightedSum as WeightedSum
from psgrad.engine.gradients.weighted_sums import per_sample_weighted_sum as per_sample_weighted_sum

__all__ = [
    "PerSampleGradients",
    "ProjectedGradients",
    "Projection",
    "Sparse",
    "SquareNorms",
    "TwoSided",
    "WeightedSum",
    "per_sample_gradients",
    "per_sample_projections",
    "per_sample_square_norms",
    "per_sample_weighted_sum",
]
