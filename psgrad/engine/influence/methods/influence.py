"""The influence function: what one Newton step on the training loss without the example would do to the
query's loss.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal, get_args

from psgrad.engine.execution.examples import Examples
from psgrad.engine.execution.output_rows import LARGEST_OUTPUT, output_size, outputs_alike
from psgrad.engine.gradients.projections.projection import key_of
from psgrad.engine.influence.amounts import calibrated, is_affine
from psgrad.engine.influence.at_output import AtOutput
from psgrad.engine.influence.curvature.curvature_products import CurvatureKind
from psgrad.engine.influence.curvature.operator import Curvature
from psgrad.engine.influence.damping import Damping, default_damping
from psgrad.engine.influence.damping_choice import with_chosen_damping
from psgrad.engine.influence.leverage import Corrected
from psgrad.engine.influence.method import RELATIVE, Checkpoint, Fitted, Method
from psgrad.engine.influence.solvers.choice import chosen_solver
from psgrad.engine.influence.solvers.dense_solve import DenseSolve, has_inverse
from psgrad.engine.influence.solvers.gram_solve import GramSolve
from psgrad.engine.influence.solvers.iterative_solve import IterativeSolve, Limits
from psgrad.engine.influence.solvers.solve import Solve
from psgrad.errors import ConfigError, InfluenceError

# The share of the mean eigenvalue that an absolute damping, or a weight decay alone, is assumed to have.
_UNKNOWN_RATIO = 0.01

DEFAULT = 1.0
"""The damping of networks, in mean eigenvalues, unless removals do not do what they are predicted to."""
Solver = Literal["auto", "exact", "dual", "conjugate_gradient"]
Change = Literal["auto", "gradient", "output"]
_NOT_AFFINE = (
    "the model is not affine in its parameters, so that no training ends where a step of the curvature says"
)
_DAMPED = "a damping is added to the curvature, which makes scores smaller"
_NO_AMOUNTS = {
    "fisher": (
        "the empirical Fisher is no curvature of the training loss, and is as much too small as the losses"
        " are"
    ),
    "sampled": "the curvature is a sum of random rows, which is right on average alone",
}


@dataclass(frozen=True)
class Influence(Method):
    """score = g_q' (n (C + (weight_decay + lam) I))^-1 g_i, with C the mean curvature of the training loss
    and lam the damping.

    Koh and Liang, "Understanding Black-box Predictions via Influence Functions" (2017), equation 2, times
    -1/n: their sign is that of adding weight to the example, ours that of its removal.

    Attributes:
        curvature: 'gauss_newton' (sum of J_i' L_i J_i, never negative; for a softmax or least-squares loss
            also the Fisher information), 'hessian', 'fisher' (the empirical one, sum of g_i g_i'), or
            'sampled': a sum of `draws` random rows for each example, other ones at each checkpoint, whose
            mean is the Gauss-Newton matrix. With few rows dual takes little time, for large outputs, too;
            what they miss averages out over checkpoints, and does not at a single one.
        solver: 'exact' materialises C, 'dual' the inner products of its rows; 'conjugate_gradient'
            takes products with C alone. 'auto' takes exact up to 6,000 parameters, and beyond what is
            predicted to be the least work that fits into memory (solvers/choice.py). Of 'sampled' there are
            exact and dual.
        damping: lam; None for `relative_damping` times the mean eigenvalue of C. Where neither is given, lam
            is zero for a convex problem (a model that is affine in its parameters, with a weight decay or a
            curvature that has an inverse), whose scores are then amounts; for all others one mean eigenvalue,
            which ranks best on trained networks, or more where steps with it do not do what they predict
            (damping_choice.py).
        weight_decay: of training, on the mean loss; it is part of the curvature, whatever the damping.
        leverage: whether scores are corrected for what a removal does to the curvature (leverage.py). For
            gauss_newton, by exact or dual. On networks it lowers the agreement with retraining. None: where
            the damping is zero by default, for the Hessian, too, which is the same matrix there.
        change: what a step does to the query: 'gradient' to first order, 'output' as the measurement of the
            output that the step leads to, to first order in the parameters (at_output.py). It brings
            out what a large change of a confident query is. 'auto': the latter where the damping is zero by
            default, and to first order for scores by layer.
        tolerance, iterations: of conjugate_gradient, the relative residual of each query and products at
            most.
        draws, seed: of the curvature 'sampled'.
    """

    name = "influence"

    curvature: CurvatureKind = "gauss_newton"
    solver: Solver = "auto"
    damping: float | None = None
    relative_damping: float | None = None
    weight_decay: float = 0.0
    leverage: bool | None = None
    change: Change = "auto"
    tolerance: float = 1e-6
    iterations: int = 200
    draws: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        for name, kind in (("curvature", CurvatureKind), ("solver", Solver), ("change", Change)):
            if getattr(self, name) not in get_args(kind):
                allowed = ", ".join(get_args(kind))
                raise ConfigError(f"influence: {name} is {getattr(self, name)!r}; expected one of {allowed}")
        if not (self.weight_decay >= 0 and math.isfinite(self.weight_decay)):
            raise ConfigError(
                f"influence: weight_decay is {self.weight_decay}; expected that of training, not negative"
            )
        if not self.tolerance > 0 or self.iterations < 1:
            raise ConfigError(
                f"influence: tolerance {self.tolerance}, iterations {self.iterations}; expected both above 0"
            )
        self._damping(convex=False)
        if self.draws < 1 or not 0 <= self.seed < 1 << 63:
            raise ConfigError(
                f"influence: draws is {self.draws}, seed {self.seed}; expected at least one draw, and a seed"
                " from 0 to 2^63 - 1"
            )
        if self.curvature in ("fisher", "sampled"):  # as much too small as the losses are, or random
            object.__setattr__(self, "unit", RELATIVE)
            object.__setattr__(self, "predicts_removal", False)
        if self.curvature == "sampled" and self.solver == "conjugate_gradient":
            raise ConfigError(
                "influence: the conjugate_gradient solver has no sampled rows",
                hint="set solver: exact or dual, or another curvature",
            )
        if self.curvature == "hessian" and self.solver == "dual":
            raise ConfigError(
                "influence: the dual solver has no Hessian, which is no sum over rows",
                hint="set solver: exact or conjugate_gradient, or another curvature",
            )
        if self.leverage and (self.curvature != "gauss_newton" or self.solver == "conjugate_gradient"):
            raise ConfigError(
                "influence: the leverage correction takes an example out of the Gauss-Newton matrix, and"
                f" curvature is {self.curvature}, solver {self.solver}",
                hint="set curvature: gauss_newton and solver: exact or dual, or leverage: false",
            )

    def fit(self, training: Examples, checkpoint: Checkpoint) -> Fitted:
        affine, given = is_affine(training), self.damping is not None or self.relative_damping is not None
        why_not = _NO_AMOUNTS.get(self.curvature, None if affine else _NOT_AFFINE)
        convex, amounts = affine and self.curvature != "sampled" and not given, why_not is None
        seed, damping = key_of(self.seed, f"checkpoint {checkpoint.number}"), self._damping(convex)
        curvature = Curvature(training, self.curvature, self.draws, seed)
        if self.leverage and (size := output_size(training)) > LARGEST_OUTPUT:
            raise InfluenceError(
                f"the leverage correction takes the output's {size} numbers one by one; expected at most"
                f" {LARGEST_OUTPUT}",
                hint="set leverage: false",
            )
        if self.curvature == "sampled" and checkpoint.of == 1:
            checkpoint.say(
                "curvature: sampled has few random rows, whose errors average out over several checkpoints,"
                " and this is one; curvature: gauss_newton has all rows"
            )
        solver: str = self.solver
        why = "the options name it"
        if solver == "auto":
            ratio = damping.relative if damping.absolute is None and damping.relative > 0 else _UNKNOWN_RATIO
            correct = bool(self.leverage) or (convex and amounts)
            solver, why = chosen_solver(curvature, checkpoint.queries, ratio, correct)
        fitted: Solve
        if solver == "exact":
            matrix = curvature.matrix()
            if convex and amounts and not self.weight_decay and has_inverse(matrix, training):
                damping = Damping(0.0)
            fitted = DenseSolve(curvature, self.weight_decay, damping, matrix, say=checkpoint.say)
        elif solver == "dual":
            fitted = GramSolve(curvature, self.weight_decay, damping)
        else:
            limits = Limits(self.tolerance, self.iterations, checkpoint.say)
            fitted = IterativeSolve(curvature, self.weight_decay, damping, limits)
        # Other solvers keep the default, as another damping takes a solve a vector, or a larger factor.
        # So do several checkpoints: their truth is the end of the run, of which steps at one say little.
        if not (convex or checkpoint.of > 1 or given):
            if isinstance(fitted, DenseSolve):
                fitted = with_chosen_damping(fitted, DEFAULT)
            else:
                because = f"the default, which solver: {solver} does not change"
                fitted.said = replace(fitted.said, damping_because=because)
        fitted.said = replace(fitted.said, solver=solver, solver_because=why)
        return self._corrected(fitted, convex, why_not, checkpoint)

    def _corrected(self, fitted: Solve, convex: bool, why_not: str | None, checkpoint: Checkpoint) -> Fitted:
        """The fit with the corrections that it gets, and whether its scores are amounts. why_not: why they
        can't be, with any damping.
        """
        training, undamped = fitted.training, why_not is None and fitted.damping == 0
        if self.leverage and not fitted.has_leverage:
            raise InfluenceError(
                "the leverage correction needs training gradients that are combinations of the curvature's"
                " rows, and here they are not",
                hint="set leverage: false, or solver: exact",
            )
        # both corrections need the output row by row
        by_default = (
            convex and undamped and output_size(training) <= LARGEST_OUTPUT and outputs_alike(training)
        )
        leverage = by_default and fitted.has_leverage if self.leverage is None else self.leverage
        by_output = self.change == "output" or (self.change == "auto" and by_default)
        whole = Corrected(fitted, checkpoint.say) if leverage else fitted
        whole.calibrated, because = (
            calibrated(whole, self.weight_decay, checkpoint.say) if undamped else (False, why_not or _DAMPED)
        )
        fitted.said = replace(
            fitted.said,
            leverage=leverage,
            change="output" if by_output else "gradient",
            calibrated=whole.calibrated,
            calibrated_because=because,
        )
        return AtOutput(whole) if by_output else whole

    def _damping(self, convex: bool) -> Damping:
        """convex: whether the model is affine in its parameters."""
        return default_damping(
            self.damping, self.relative_damping, DEFAULT, convex=convex, weight_decay=self.weight_decay
        )
