"""The one-step leverage correction: what removing an example does to the curvature, too.

Without example i the Gauss-Newton matrix H loses J_i' L_i J_i. One Newton step on what is left leads to
H_-i^-1 g_i = H^-1 J_i' (I - L_i M_i)^-1 r_i, with M_i = J_i H^-1 J_i' and g_i = J_i' r_i. So a score is corrected by another gradient of
the example: that of its output times (I - L_i M_i)^-1 r_i. Where the model is linear and the loss quadratic (ridge regression) it is exact.

With L_i = S_i S_i' that vector is r_i + S_i w_i, w_i = (I - S_i' M_i S_i)^-1 S_i' M_i r_i, which takes a symmetric matrix.

Source: Pregibon, "Logistic Regression Diagnostics" (1981), section 4, for one output; blocks for several follow by Woodbury's identity.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from psgrad.engine.examples import Examples
from psgrad.engine.gradients.loading import Batch
from psgrad.engine.influence.curvature.rows import jacobian_rows
from psgrad.engine.objective import Objective

# A leverage nearer to one than this leaves the problem without the example with no solution, as far as float64 can tell.
_NEAREST = 1e-10


@dataclass(frozen=True)
class Leverage:
    """Of n examples, float64 on the CPU.

    weights: w_i [n, R]. pull: S_i' M_i r_i [n, R]. extra: [n], what the correction adds to the influence on the own loss. largest: [n], the
    largest eigenvalue of L_i M_i: zero for an example that the fit does not lean on, one for one without which the problem has no solution,
    whose numbers here are NaN.
    """

    weights: torch.Tensor
    pull: torch.Tensor
    extra: torch.Tensor
    largest: torch.Tensor

    @classmethod
    def of(cls, own: torch.Tensor, pull: torch.Tensor) -> Leverage:
        """own: S_i' M_i S_i [n, R, R]. pull: S_i' M_i r_i [n, R]."""
        largest = torch.linalg.eigvalsh(own)[:, -1]
        gone = largest >= 1 - _NEAREST
        identity = torch.eye(own.shape[1], dtype=own.dtype, device=own.device)
        left = torch.where(gone.reshape(-1, 1, 1), identity, identity - own)
        weights = torch.linalg.solve(left, pull.unsqueeze(2)).squeeze(2)
        weights = torch.where(gone.unsqueeze(1), torch.nan, weights)
        return cls(weights.cpu(), pull.cpu(), (weights * pull).sum(1).cpu(), largest.cpu())

    @classmethod
    def through(cls, products: torch.Tensor, root: torch.Tensor, gradient: torch.Tensor) -> Leverage:
        """products: M_i [n, C, C]. root: S_i [n, C, R]. gradient: r_i [n, C]."""
        towards = root.transpose(1, 2) @ products
        return cls.of(towards @ root, (towards @ gradient.unsqueeze(2)).squeeze(2))

    @property
    def gone(self) -> torch.Tensor:
        """[n]: whether there is no solution without the example."""
        return self.weights.isnan().any(1)

    def tell(self, training: Examples, say: Callable[[str], None]) -> None:
        """Say which training examples have no corrected score."""
        rows = training.numbers_of(self.gone.nonzero().flatten()).tolist()
        if rows:
            named = ", ".join(map(str, rows[:8])) + (f" and {len(rows) - 8} more" if len(rows) > 8 else "")
            say(
                f"without row {named} the training problem has no solution (its leverage is one), so its corrected scores are NaN; "
                "a damping or a weight decay gives it one"
            )


def output_products(training: Examples, half: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """M_i = J_i H^-1 J_i' [n, C, C] float64 on the CPU. half: [k, p] to vectors [k, any] whose inner products are those through H^-1."""
    rows = jacobian_rows(training)

    def products(gradients: Any) -> dict[str, torch.Tensor]:
        halves = half(rows.flat.join(gradients.materialise()))
        halves = halves.reshape(-1, rows.per_sample, halves.shape[1])
        return {"products": halves @ halves.transpose(1, 2)}

    return torch.cat([found["products"] for _, found in rows.each(products)])


def with_cotangents(training: Examples, cotangents: torch.Tensor) -> Examples:
    """The same rows, with the product of the output and `cotangents` [n, C] as what is differentiated."""

    def read(start: int, stop: int) -> Batch:
        return _Given(training.read(start, stop).inputs, cotangents[start:stop])

    def product(output: torch.Tensor, cotangent: torch.Tensor) -> torch.Tensor:
        return (output.reshape(-1) * cotangent).sum()

    objective = Objective(training.objective.model, product, autocast=training.objective.autocast)
    objective.params = training.params
    return Examples(objective, read, training.count, training.options, training.numbers)


@dataclass(frozen=True)
class _Given:
    inputs: tuple[torch.Tensor, ...]
    target: torch.Tensor
