"""Measures: what is computed from deferred gradients sample by sample, one file for each family."""
