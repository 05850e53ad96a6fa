"""Deferred per-sample gradients: `per_sample_gradients` and its queries."""

from psgrad.engine.gradients.per_sample import PerSampleGradients as PerSampleGradients
from psgrad.engine.gradients.per_sample import per_sample_gradients as per_sample_gradients

__all__ = ["PerSampleGradients", "per_sample_gradients"]
