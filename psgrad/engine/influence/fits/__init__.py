"""The influence function, fitted: one file for each way to multiply by the inverse of the curvature."""
