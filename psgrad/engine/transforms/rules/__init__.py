"""The rules, one file per operator family. Importing the package fills the table of registry.py."""

from psgrad.engine.transforms.rules import (
    attention,
    convolution,
    elementwise,
    embedding,
    factories,
    indexing,
    losses,
    matmul,
    normalization,
    pooling,
    reductions,
    scatter,
    views,
)

__all__ = [
    "attention",
    "convolution",
    "elementwise",
    "embedding",
    "factories",
    "indexing",
    "losses",
    "matmul",
    "normalization",
    "pooling",
    "reductions",
    "scatter",
    "views",
]
