"""Solves by conjugate gradients, which need products with the curvature alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from psgrad.engine.gradients.flat import Vectors
from psgrad.engine.influence.curvature.operator import Curvature
from psgrad.engine.influence.damping import Damping
from psgrad.engine.influence.solvers.conjugate_gradient import conjugate_gradient, nystroem
from psgrad.engine.influence.solvers.solve import Solve
from psgrad.errors import InfluenceError

# From this number of queries on, which share a Krylov space, a preconditioner of that rank costs more
# products than it saves. Measured on digits.
_MANY_QUERIES, _RANK = 100, 200


@dataclass(frozen=True)
class Limits:
    """When conjugate gradients end: at this relative residual of each right-hand side, or after so many
    iterations. say: called with a message where the residual is not reached.
    """

    tolerance: float
    iterations: int
    say: Callable[[str], None] = lambda _: None


class IterativeSolve(Solve):
    """Scores through conjugate gradients. There is no leverage, as it would take a solve for each output of
    each example. Raises InfluenceError as conjugate gradients do.
    """

    has_self_influence, makes_passes = False, True

    def __init__(self, curvature: Curvature, weight_decay: float, damping: Damping, limits: Limits) -> None:
        self.products, self.limits = curvature.products(weight_decay), limits
        mean, error = self.products.mean_eigenvalue()
        super().__init__(curvature, weight_decay, damping, mean)
        self.said = replace(self.said, mean_eigenvalue_error=error, products_by=self.products.how)

    def precondition(self, vectors: Vectors) -> Vectors:
        flat, limits = self.training.flat, self.limits
        rhs = flat.join(vectors).double()
        near = None
        # a Hessian need not be positive, as a Nystroem factor must be
        if len(rhs) < _MANY_QUERIES and self.curvature.kind != "hessian":
            rank = min(_RANK, rhs.shape[1])
            near = nystroem(self.products.apply, rhs.shape[1], self.damping, rank=rank, device=rhs.device)
        before = self.said.solved
        solved, facts = conjugate_gradient(
            self.products.damped(self.damping),
            rhs,
            tolerance=limits.tolerance,
            iterations=limits.iterations,
            preconditioner=near,
            room=self.training.free_bytes,
            spectrum=before is None,
            say=limits.say,
        )
        self.said = replace(self.said, solved=facts if before is None else facts.behind(before))
        return flat.split(solved / len(self.training))

    @property
    def has_leverage(self) -> bool:
        return False

    def leverage(self, root: torch.Tensor, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        raise InfluenceError("conjugate_gradient has no leverage", hint="set solver: exact or dual")
