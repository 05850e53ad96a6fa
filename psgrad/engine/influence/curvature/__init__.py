"""Matrices of second derivatives, and their approximations."""
