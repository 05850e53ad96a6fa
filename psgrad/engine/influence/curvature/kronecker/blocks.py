"""A block of the curvature that is diagonal in the product of two bases, with eigenvalues that were measured there."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from psgrad.engine.flat import Vectors
from psgrad.engine.gradients.queries import PerSampleGradients
from psgrad.engine.influence.curvature.kronecker.bases import Basis


@dataclass(frozen=True)
class Block:
    """(right kron left) diag(values) (right kron left)^T, the mean-form curvature of one weight and its bias.

    Attributes:
        basis: the bases, and how the parameters lie as matrices [g, a, b].
        values: [g, a, b] float64, the mean over samples of the squares of their gradients' elements in these bases.
    """

    basis: Basis
    values: torch.Tensor

    @property
    def label(self) -> str:
        return self.basis.label

    def precondition(self, gradients: PerSampleGradients, factor: torch.Tensor) -> Vectors:
        """name -> [k, *shape]: gradients whose elements in the bases are multiplied by `factor` [g, a, b], in float64."""
        parts = []
        for _, rotated in self.basis.rotated(gradients, torch.float64):
            found = self.basis.vectors(self.basis.rotate_back(rotated * factor))
            parts.append({name: value.to(gradients.gradients[name].dtype) for name, value in found.items()})
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}

    def weighted_squares(self, gradients: PerSampleGradients, weights: list[torch.Tensor]) -> list[torch.Tensor]:
        """For each of the weights [g, a, b] the sums [n] float64 of the gradients' squared elements in the bases times them."""
        outer = self.basis.outer(gradients)
        if outer is not None:
            left, right = (factor.double().square() for factor in outer)
            return [(torch.einsum("nga,gab->ngb", left, each) * right).sum((1, 2)) for each in weights]
        parts = []
        for _, rotated in self.basis.rotated(gradients):
            squares = rotated.double().square().flatten(1)
            parts.append(squares @ torch.stack([each.reshape(-1) for each in weights], 1))
        return list(torch.cat(parts).unbind(1))


def sum_of_squares(basis: Basis, gradients: PerSampleGradients) -> torch.Tensor:
    """[g, a, b] float64: the sum over samples of the squares of their gradients' elements in the bases."""
    outer = basis.outer(gradients)
    if outer is not None:
        left, right = (factor.double().square().transpose(0, 1) for factor in outer)
        return torch.bmm(left.transpose(1, 2), right)
    total = torch.zeros(basis.size, dtype=torch.float64, device=gradients.losses.device)
    for _, rotated in basis.rotated(gradients):
        total += rotated.square().sum(0, dtype=torch.float64)
    return total
