"""Kronecker-factored curvature, from the factors that deferred gradients keep: blocks that are diagonal in a product of two bases."""

from psgrad.engine.influence.curvature.kronecker.blocks import Block as Block
from psgrad.engine.influence.curvature.kronecker.fitting import fit_blocks as fit_blocks
from psgrad.engine.influence.curvature.kronecker.sampled import fisher_rows as fisher_rows
