"""The loss's derivatives in the model's output, sample by sample, and a square root of the second ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from psgrad.engine.transforms import grad, hessian, vmap
from psgrad.errors import InfluenceError

# A second derivative below zero by no more than this share of the sample's largest one is rounding. So is one
# below zero by no more than some rounding errors of a number of order one: where a probability is nearly one,
# the second derivative is a difference of such.
_ROUNDING = 1e-7
_CANCELLED = 64 * torch.finfo(torch.float64).eps


@dataclass(frozen=True)
class OutputDerivatives:
    """The derivatives of k samples' losses in the output's C numbers, float64.

    gradient: [k, C]. hessian: [k, C, C].
    """

    gradient: torch.Tensor
    hessian: torch.Tensor

    @classmethod
    def of(
        cls,
        criterion: Callable[[Any, Any], torch.Tensor],
        outputs: torch.Tensor,
        target: torch.Tensor | None,
        weights: torch.Tensor | None = None,
    ) -> OutputDerivatives:
        """outputs: [k, *shape], target: [k, ...]. weights: [k], of the losses; None for ones. In float64
        whatever the model's type, for a loss that takes float64.
        """

        def derivatives(outputs: torch.Tensor, target: torch.Tensor | None) -> OutputDerivatives:
            def loss(flat: torch.Tensor, target: torch.Tensor | None) -> torch.Tensor:
                return criterion(flat.reshape(outputs.shape[1:]), target)

            flat, dims = outputs.reshape(len(outputs), -1), (0, None if target is None else 0)
            gradient, second = (
                vmap(grad(loss), in_dims=dims)(flat, target),
                vmap(hessian(loss), in_dims=dims)(flat, target),
            )
            gradient, second = gradient.double(), 0.5 * (second + second.transpose(1, 2)).double()
            if weights is None:
                return cls(gradient, second)
            each = weights.double().reshape(-1, 1)
            return cls(each * gradient, each.unsqueeze(2) * second)

        wide = target.double() if target is not None and target.is_floating_point() else target
        try:
            return derivatives(outputs.double(), wide)
        except RuntimeError:
            if outputs.dtype == torch.float64:
                raise
            return derivatives(outputs, target)  # a loss that holds tensors of the model's type

    def root(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(S, c): S [k, C, C] with S S' = the Hessian, and the shortest c [k, C] for which S c comes nearest
        to the gradient.

        S is the lower triangular root, that of Cholesky, which is unique: passes whose outputs differ by
        rounding have the same rows but for rounding. Eigenvectors times roots of eigenvalues would change
        their signs from pass to pass, and all directions where eigenvalues are equal.

        rows: [k], which samples these are. Raises InfluenceError, with the row, where the loss is not finite
        or not convex in the output.
        """
        finite = self.hessian.flatten(1).isfinite().all(1) & self.gradient.isfinite().all(1)
        if not bool(finite.all()):
            row = int(rows[~finite][0])
            raise InfluenceError(
                f"at row {row} the loss has derivatives in the model's output that are not finite",
                hint="an output or a target that is not finite; leave the row out",
            )
        values, vectors = torch.linalg.eigh(self.hessian)
        largest = values.abs().amax(1, keepdim=True)
        negative = (values < -_ROUNDING * largest - _CANCELLED * largest.max().clamp(min=1)).any(1)
        if bool(negative.any()):
            place = int(negative.nonzero()[0])
            raise InfluenceError(
                f"at row {int(rows[place])} the loss is not convex in the model's output: its second"
                f" derivative there is {float(values[place, 0]):.3g} in one direction, and"
                f" {float(largest[place]):.3g} at most; expected a loss that is convex in the output"
                " (cross-entropy, squared error), which the Gauss-Newton curvature is made of",
                hint="set curvature: fisher or hessian (of ekfac, fisher: empirical)",
            )
        kept = values > _ROUNDING**2 * largest
        roots = torch.where(kept, values, 0).sqrt()
        along = (vectors.transpose(1, 2) @ self.gradient.unsqueeze(2)).squeeze(2)
        shortest = torch.where(kept, along / torch.where(kept, roots, 1), 0)
        return _triangular(vectors * roots.unsqueeze(1), shortest, _ROUNDING * largest.sqrt())


def _triangular(
    root: torch.Tensor, coefficients: torch.Tensor, least: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(S, c): the lower triangular S [k, C, C] with S S' = R R' and a positive diagonal, of a root R, and the
    c [k, C] for which S c is R times the coefficients [k, C]; columns no longer than `least` [k, 1] are zero.
    """
    turn, upper = torch.linalg.qr(root.transpose(1, 2))
    diagonal, largest = upper.diagonal(dim1=1, dim2=2), upper.gather(2, upper.abs().argmax(2, keepdim=True))
    negligible = diagonal.abs() <= _ROUNDING * largest.abs().squeeze(2)  # of a matrix of lower rank
    sign = torch.where(negligible, largest.squeeze(2), diagonal).sign()
    sign = sign * (torch.linalg.vector_norm(upper, dim=2) > least)
    turned = (turn.transpose(1, 2) @ coefficients.unsqueeze(2)).squeeze(2)
    return (upper * sign.unsqueeze(2)).transpose(1, 2), turned * sign
