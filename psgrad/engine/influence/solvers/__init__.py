"""Ways to multiply by the inverse of a curvature."""
