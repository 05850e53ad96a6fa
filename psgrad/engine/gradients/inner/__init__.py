"""Inner products of the per-sample gradients of two sets of samples, without the gradients."""

from psgrad.engine.gradients.inner.products import inner_products as inner_products

__all__ = ["inner_products"]
