"""Matrices of second derivatives, and what stands in for them."""
