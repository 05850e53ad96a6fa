"""Solvers: products with the inverse of a curvature."""
