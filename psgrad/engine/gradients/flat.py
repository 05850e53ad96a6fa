"""Parameter-shaped vectors as rows of one matrix, for linear algebra, and back."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from psgrad.engine.gradients.deferred import DeferredGradient
from psgrad.engine.gradients.queries import PerSampleGradients
from psgrad.engine.gradients.terms import Dense

Vectors = dict[str, torch.Tensor]


class Flat:
    """The order of parameters along the columns of a matrix.

    Attributes:
        shapes: name -> shape, in order.
        columns: name -> its columns.
        size: p, the number of entries of all parameters.
    """

    def __init__(self, params: Mapping[str, torch.Tensor]) -> None:
        self.shapes = {name: parameter.shape for name, parameter in params.items()}
        self.columns: dict[str, slice] = {}
        self.size = 0
        for name, shape in self.shapes.items():
            start, self.size = self.size, self.size + math.prod(shape)
            self.columns[name] = slice(start, self.size)

    def join(self, vectors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """[k, p] of k vectors, name -> [k, *shape]."""
        return torch.cat([vectors[name].reshape(len(vectors[name]), -1) for name in self.shapes], dim=1)

    def split(self, matrix: torch.Tensor) -> Vectors:
        """name -> [k, *shape] of a matrix [k, p]: views."""
        return {
            name: matrix[:, self.columns[name]].reshape(len(matrix), *shape)
            for name, shape in self.shapes.items()
        }


def as_gradients(vectors: Mapping[str, torch.Tensor]) -> PerSampleGradients:
    """k vectors, name -> [k, *shape], as per-sample gradients, for queries such as
    `gradients.inner(as_gradients(v))`.
    """
    first = next(iter(vectors.values()))
    deferred = {name: DeferredGradient.of(Dense(value), value.shape[1:]) for name, value in vectors.items()}
    return PerSampleGradients.of(deferred, first.new_zeros(len(first)), {})
