"""Differentially private updates from parts that compose: a clipping value, a noise value and a source of gradients."""
