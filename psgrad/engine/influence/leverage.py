"""The one-step leverage correction: what the removal of an example does to the curvature.

Without example i the Gauss-Newton matrix H loses J_i' L_i J_i. One Newton step on what is left leads to
H_-i^-1 g_i = H^-1 J_i' (I - L_i M_i)^-1 r_i, with M_i = J_i H^-1 J_i' and g_i = J_i' r_i. So a score is
corrected by another gradient of the example: that of its output times (I - L_i M_i)^-1 r_i. If the model is
linear and the loss quadratic (ridge regression) it is exact.

With L_i = S_i S_i' that vector is r_i + S_i w_i, w_i = (I - S_i' M_i S_i)^-1 S_i' M_i r_i, which takes a
symmetric matrix.

Source: Pregibon, "Logistic Regression Diagnostics" (1981), section 4, for one output; blocks for several
follow by Woodbury's identity.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

from psgrad.engine.execution.examples import Examples
from psgrad.engine.execution.loading import ChangedRows
from psgrad.engine.execution.output_rows import output_factors
from psgrad.engine.influence.fit_facts import FitFacts
from psgrad.engine.influence.method import Fitted, Preconditioned, ScoreBlock, SelfBlock
from psgrad.engine.influence.solvers.solve import Solve

# If a leverage is nearer to one than this, the problem without the example has no solution in float64.
_NEAREST = 1e-10


@dataclass(frozen=True)
class Leverage:
    """The leverage of n examples, float64 on the CPU.

    weights: w_i [n, R]. pull: S_i' M_i r_i [n, R]. extra: [n], what the correction adds to the influence on
    the own loss. largest: [n], the largest eigenvalue of L_i M_i: zero for an example that does not change
    the fit, one for an example without which the problem has no solution, whose numbers here are NaN.
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

    @property
    def gone(self) -> torch.Tensor:
        """[n]: whether there is no solution without the example."""
        return self.weights.isnan().any(1)

    def tell(self, training: Examples, say: Callable[[str], None]) -> None:
        """Calls `say` with the training examples that have no corrected score."""
        rows = training.numbers_of(self.gone.nonzero().flatten()).tolist()
        if rows:
            named = ", ".join(map(str, rows[:8])) + (f" and {len(rows) - 8} more" if len(rows) > 8 else "")
            say(
                f"without row {named} the training problem has no solution (its leverage is one), so its"
                " corrected scores are NaN; a damping or a weight decay gives it one"
            )


def with_cotangents(training: Examples, cotangents: torch.Tensor) -> Examples:
    """The training examples with the product of the output and `cotangents` [n, C] in place of the loss."""

    rows = ChangedRows(training.rows, lambda block, rows: block.with_target(cotangents[rows]))

    def product(output: torch.Tensor, cotangent: torch.Tensor) -> torch.Tensor:
        return (output.reshape(-1) * cotangent).sum()

    return replace(training, objective=training.objective.with_scalar(product), rows=rows)


class Corrected(Fitted):
    """decrements: [n], twice what each removal's own step lowers the objective without it by, as far as the
    loss's gradient in the output is in the span of its second derivatives. largest: the largest eigenvalue of
    any example's L_i M_i, which the facts have, too.

    An example without which the training problem has no solution is reported by `say`, and its scores are
    NaN.
    """

    def __init__(self, plain: Solve, say: Callable[[str], None]) -> None:
        training = plain.training
        root, coefficients, gradient = output_factors(training)
        self.plain = plain
        self.leverage = Leverage.of(*plain.leverage(root, gradient))
        self.decrements = (coefficients * self.leverage.pull).sum(1) + self.leverage.extra
        self.leverage.tell(training, say)
        weights = self.leverage.weights.nan_to_num(0.0)
        self.removed = plain.on(
            with_cotangents(training, gradient + (root @ weights.unsqueeze(2)).squeeze(2)), weights
        )
        self.largest = float(self.leverage.largest.max())
        self.has_self_influence = plain.has_self_influence

    @property
    def facts(self) -> FitFacts:
        return replace(self.plain.facts, largest_leverage=self.largest)

    def solver(self) -> Preconditioned | None:
        return self.plain

    def scores(self, queries: Examples) -> Iterator[ScoreBlock]:
        return map(self.marked, self.removed.scores(queries))

    def marked(self, block: ScoreBlock) -> ScoreBlock:
        """The block with NaN for examples without a score."""
        gone = self.leverage.gone[block.start : block.stop].unsqueeze(1)
        return replace(block, scores=block.scores.masked_fill(gone, torch.nan))

    def self_influence(self) -> Iterator[SelfBlock]:
        # The removed part's norms are how far parameters move; its blocks need not be cut where those of the
        # whole are.
        norms = torch.cat([block.preconditioned_norm for block in self.removed.self_influence()]).masked_fill(
            self.leverage.gone, torch.nan
        )
        for block in self.plain.self_influence():
            rows = slice(block.start, block.stop)
            own = block.self_influence + self.leverage.extra[rows]
            yield replace(block, self_influence=own, preconditioned_norm=norms[rows])
