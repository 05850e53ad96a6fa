"""The influence function: what one Newton step on the training loss without the example would do to the
query's loss.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from psgrad.engine.execution.examples import Examples
from psgrad.engine.execution.output_rows import LARGEST_OUTPUT, gauss_newton_rows, output_size, outputs_alike
from psgrad.engine.execution.row_grams import inner_product_operations
from psgrad.engine.gradients.projections.projection import key_of
from psgrad.engine.influence.amounts import calibrated, is_affine
from psgrad.engine.influence.at_output import AtOutput
from psgrad.engine.influence.curvature.curvature_products import CurvatureProducts
from psgrad.engine.influence.curvature.kronecker_blocks import KroneckerRoots
from psgrad.engine.influence.curvature.kronecker_fitting import fisher_rows, fit_blocks
from psgrad.engine.influence.damping_choice import with_chosen_damping
from psgrad.engine.influence.inverses import ByKernel, ByMatrix, ByProducts, Solve
from psgrad.engine.influence.leverage import TITLES, Corrected, Damping, InverseProblem, default_damping
from psgrad.engine.influence.method import RELATIVE, Checkpoint, Fitted, Method
from psgrad.engine.influence.solvers.conjugate_gradient import (
    Diagonal,
    Preconditioner,
    conjugate_gradient,
    nystroem,
)
from psgrad.engine.influence.solvers.solver_costs import LARGEST, Work, solved_products, tell_of_time
from psgrad.errors import ConfigError, InfluenceError

# Parameters up to which the curvature is materialised in any case: 288 MB, and seconds for its
# factor.
LARGEST_MATRIX = 6000
# Values that are assumed where they are not known yet: the share of the mean eigenvalue that an absolute
# damping, or a weight decay alone, has; and the number of queries.
_UNKNOWN_RATIO, _QUERIES = 0.01, 100

DEFAULT = 1.0
"""The damping of networks, in mean eigenvalues, unless removals do not do what they are predicted to."""
_SOLVERS = ("auto", "exact", "dual", "conjugate_gradient")
_PRECONDITIONERS = ("auto", "none", "diagonal", "nystroem", "ekfac")
# From this number of queries on, which share a Krylov space, a preconditioner of that rank costs more
# products than it saves. Measured on digits.
_MANY_QUERIES = 100
_RANK, _ITERATIONS = 200, 200  # where the options don't say
_NOT_AFFINE = (
    "the model is not affine in its parameters, so that no training ends where a step of the curvature says"
)
_DAMPED = "a damping is added to the curvature, which makes scores smaller"
_OTHER_CURVATURE = (
    "the empirical Fisher is no curvature of the training loss, and is as much too small as the losses are"
)
_RANDOM_ROWS = "the curvature is a sum of random rows, which is right on average alone"
# The residual of the solves by which conjugate gradients estimate the leverage.
ROUGH = 1e-3
# Solvers of sampled rows.
_OF_FEW_ROWS = ("exact", "dual")
# Products with single vectors by which conjugate gradients estimate the ends of the spectrum first.
_BEFORE_SOLVING = 40


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
            predicted to be the least work that fits into memory (solvers/solver_costs.py). Of 'sampled' there
            are exact and dual.
        damping: lam; None for `relative_damping` times the mean eigenvalue of C. Where neither is given, lam
            is zero for a convex problem (a model that is affine in its parameters, with a weight decay or a
            curvature that has an inverse), whose scores are then amounts; for all others one mean eigenvalue,
            which ranks best on trained networks, or more where steps with it do not do what they predict
            (damping_choice.py).
        weight_decay: of training, on the mean loss; it is part of the curvature, whatever the damping.
        leverage: whether scores are corrected for what a removal does to the curvature (leverage.py). For
            gauss_newton, by exact, dual or conjugate_gradient, which estimates it. On networks it lowers the
            agreement with retraining. None: where the damping is zero by default, for the Hessian, too, which
            is the same matrix there.
        change: what a step does to the query: 'gradient' to first order, 'output' as the measurement of the
            output that the step leads to, to first order in the parameters (at_output.py). It brings
            out what a large change of a confident query is. 'auto': the latter where the damping is zero by
            default, and to first order for scores by layer.
        tolerance, iterations: of conjugate_gradient, the relative residual of each query and products at
            most; None for 200.
        preconditioner: of conjugate_gradient, 'none', 'diagonal', 'nystroem', 'ekfac' (blocks by Kronecker
            factors), or 'auto', which is nystroem for less than a hundred queries.
        rank: of the Nystroem preconditioner; None for 200.
        draws: of the curvature 'sampled'.
        seed: of what is drawn.
    """

    name = "influence"

    curvature: Literal["gauss_newton", "hessian", "fisher", "sampled"] = "gauss_newton"
    solver: Literal["auto", "exact", "dual", "conjugate_gradient"] = "auto"
    damping: float | None = None
    relative_damping: float | None = None
    weight_decay: float = 0.0
    leverage: bool | None = None
    change: Literal["auto", "gradient", "output"] = "auto"
    tolerance: float = 1e-6
    iterations: int | None = None
    preconditioner: Literal["auto", "none", "diagonal", "nystroem", "ekfac"] = "auto"
    rank: int | None = None
    draws: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        for name, value, allowed in (
            ("curvature", self.curvature, tuple(TITLES)),
            ("solver", self.solver, _SOLVERS),
            ("change", self.change, ("auto", "gradient", "output")),
            ("preconditioner", self.preconditioner, _PRECONDITIONERS),
        ):
            if value not in allowed:
                raise ConfigError(f"influence: {name} is {value!r}; expected one of {', '.join(allowed)}")
        if not (self.weight_decay >= 0 and math.isfinite(self.weight_decay)):
            raise ConfigError(
                f"influence: weight_decay is {self.weight_decay}; expected that of training, not negative"
            )
        if not self.tolerance > 0 or any(
            given is not None and given < 1 for given in (self.rank, self.iterations)
        ):
            raise ConfigError(
                f"influence: tolerance {self.tolerance}, iterations {self.iterations}, rank {self.rank};"
                " expected all of them above zero",
            )
        if not 0 <= self.seed < 1 << 63:
            raise ConfigError(f"influence: seed is {self.seed}; expected a whole number from 0 to 2^63 - 1")
        self._damping(convex=False)
        if self.draws < 1:
            raise ConfigError(
                f"influence: draws is {self.draws}; expected at least one random row for each training"
                " example",
            )
        if self.curvature == "sampled" and self.solver not in ("auto", *_OF_FEW_ROWS):
            raise ConfigError(
                f"influence: the {self.solver} solver has no sampled rows; expected solver: exact or dual"
                " with curvature: sampled",
            )
        if self.curvature in ("fisher", "sampled"):  # as much too small as the losses are, or random
            object.__setattr__(self, "unit", RELATIVE)
            object.__setattr__(self, "predicts_removal", False)
        if self.curvature == "hessian" and self.solver == "dual":
            raise ConfigError(
                "influence: the dual solver has no Hessian; expected curvature: gauss_newton or fisher,"
                " which are sums over rows",
                hint="set solver: exact or conjugate_gradient, or another curvature",
            )
        if self.leverage and self.curvature != "gauss_newton":
            raise ConfigError(
                "influence: the leverage correction takes an example out of the Gauss-Newton matrix, and"
                f" curvature is {self.curvature}",
                hint="set curvature: gauss_newton, or leverage: false",
            )

    def fit(self, training: Examples, checkpoint: Checkpoint) -> Fitted:
        affine = is_affine(training)
        convex = (
            affine and self.curvature != "sampled" and self.damping is None and self.relative_damping is None
        )
        why_not = self._why_no_amounts(affine)
        amounts = why_not is None
        damping = self._damping(convex)
        solver, why = self._choice(
            training, checkpoint.queries, bool(self.leverage) or (convex and amounts), damping
        )
        if self.leverage and output_size(training) > LARGEST_OUTPUT:
            raise InfluenceError(
                f"the leverage correction takes the output's {output_size(training)} numbers one by one;"
                f" expected an output of at most {LARGEST_OUTPUT} numbers",
                hint="set leverage: false",
            )
        if self.curvature == "sampled" and checkpoint.of == 1:
            checkpoint.say(
                "curvature: sampled has few random rows, whose errors average out over several checkpoints,"
                " and this is one; curvature: gauss_newton has all rows"
            )
        problem = InverseProblem(
            training,
            self.curvature,
            self.weight_decay,
            damping,
            bool(self.leverage),
            checkpoint.say,
            self.draws,
            key_of(self.seed, f"checkpoint {checkpoint.number}"),
        )
        fitted: ByMatrix | ByKernel | ByProducts
        if solver == "exact":
            fitted = ByMatrix.fit(problem)
            if convex and amounts and not self.weight_decay:
                fitted = fitted.undamped() or fitted
        elif solver == "dual":
            fitted = ByKernel.fit(problem)
        else:
            rough = replace(self, tolerance=max(self.tolerance, ROUGH))
            fitted = ByProducts.fit(
                problem,
                self._solve(training, checkpoint),
                rough._solve(training, checkpoint),
                self.seed,
            )
        # Other solvers keep the default, as another damping takes a solve a vector, or a larger factor.
        # So do several checkpoints: their truth is the end of the run, of which steps at one say little.
        if convex or checkpoint.of > 1 or self.damping is not None or self.relative_damping is not None:
            pass
        elif isinstance(fitted, ByMatrix):
            fitted = with_chosen_damping(fitted, DEFAULT, self.weight_decay)
        else:
            fitted.facts["damping_because"] = f"the default, which solver: {solver} does not change"
        undamped = amounts and fitted.facts["damping"] == 0
        # both corrections need the output row by row
        by_default = (
            convex and undamped and output_size(training) <= LARGEST_OUTPUT and outputs_alike(training)
        )
        corrected = self.leverage
        if corrected is None:
            corrected = by_default and fitted.has_leverage()
        by_output = self.change == "output" or (self.change == "auto" and by_default)
        fitted.problem = replace(fitted.problem, leverage=corrected)
        change = "output" if by_output else "gradient"
        fitted.facts = {
            "solver": solver,
            "solver_because": why,
            **fitted.facts,
            "leverage": corrected,
            "change": change,
        }
        whole = Corrected(fitted, automatic=self.leverage is None) if corrected else fitted
        result = (
            calibrated(whole, self.weight_decay, checkpoint.say) if undamped else (False, why_not or _DAMPED)
        )
        whole.calibrated, whole.facts["calibrated_because"] = result
        whole.facts["calibrated"] = whole.calibrated
        return AtOutput(whole, automatic=self.change == "auto") if by_output else whole

    def _damping(self, convex: bool) -> Damping:
        """convex: whether the model is affine in its parameters."""
        return default_damping(
            self.damping, self.relative_damping, DEFAULT, convex=convex, weight_decay=self.weight_decay
        )

    def _why_no_amounts(self, affine: bool) -> str | None:
        """Why scores are not amounts, with any damping; None if they may be."""
        if self.curvature == "fisher":
            return _OTHER_CURVATURE
        if self.curvature == "sampled":
            return _RANDOM_ROWS
        return None if affine else _NOT_AFFINE

    def _choice(
        self, training: Examples, queries: int | None, correct: bool, damping: Damping
    ) -> tuple[str, str]:
        """The solver, and why. correct: whether scores are to be corrected for leverage, which not all
        solvers can.
        """
        if self.solver != "auto":
            return self.solver, "the options name it"
        size, sampled = training.flat.size, self.curvature == "sampled"
        rows = None if self.curvature == "hessian" else training
        if sampled:
            rows = fisher_rows(training, self.draws, self.seed)
        elif self.curvature == "gauss_newton":
            outputs = output_size(training)
            if not outputs_alike(training):
                return "conjugate_gradient", "outputs of rows that differ in length differ in size"
            if outputs > LARGEST_OUTPUT:
                return (
                    "conjugate_gradient",
                    f"an output of {outputs} numbers is too large for the other solvers",
                )
            rows = gauss_newton_rows(training)
        if size <= LARGEST_MATRIX and not sampled:
            return "exact", f"{size:,} parameters are at most {LARGEST_MATRIX:,}"
        work = Work(
            size,
            len(training) if rows is None or not sampled else len(rows),
            None if rows is None else len(rows),
            0.0 if rows is None or len(rows) > LARGEST else inner_product_operations(rows),
            _QUERIES if queries is None else queries,
            damping.relative if damping.absolute is None and damping.relative > 0 else _UNKNOWN_RATIO,
            training.free_bytes(),
            products=not sampled,
        )
        if work.operations():
            return work.least(correct)
        raise InfluenceError(
            f"{work.rows:,} sampled rows of {size:,} parameters have no solver here: a square matrix of"
            f" the one or of the other is too large; expected at most {LARGEST:,} of either, and memory"
            " for three matrices of that size",
            hint="take fewer draws, or influence.method.name: ekfac",
        )

    # -- conjugate gradients ---------------------------------------------------------------------------------

    def _solve(self, training: Examples, checkpoint: Checkpoint) -> Solve:
        """The solver that takes products."""

        def solve(
            products: CurvatureProducts, damping: float, rhs: torch.Tensor, spectrum: bool
        ) -> tuple[torch.Tensor, dict[str, Any]]:
            if spectrum:
                solved = solved_products(len(rhs))
                tell_of_time(products, rhs, _BEFORE_SOLVING, solved, training, checkpoint.say)
            return conjugate_gradient(
                products.damped(damping),
                rhs,
                tolerance=self.tolerance,
                iterations=_ITERATIONS if self.iterations is None else self.iterations,
                preconditioner=self._preconditioner(products, damping, rhs, training),
                room=training.free_bytes,
                spectrum=spectrum,
                say=checkpoint.say,
            )

        return solve

    def _preconditioner(
        self, products: CurvatureProducts, damping: float, rhs: torch.Tensor, training: Examples
    ) -> Preconditioner | None:
        if self.preconditioner == "ekfac":
            # of a large output the gradients themselves: they resemble the curvature, which is enough here
            by_gradients = self.curvature == "fisher" or output_size(training) > LARGEST_OUTPUT
            rows = training if by_gradients else fisher_rows(training, None, self.seed)
            blocks = fit_blocks(rows, len(training))
            return KroneckerRoots(training.flat, blocks, damping + self.weight_decay)
        # a Hessian need not be positive, as a Nystroem factor must be
        few = len(rhs) < _MANY_QUERIES and self.curvature != "hessian"
        if self.preconditioner == "nystroem" or (self.preconditioner == "auto" and few):
            rank = min(_RANK, rhs.shape[1]) if self.rank is None else self.rank
            return nystroem(
                products.apply, rhs.shape[1], damping, rank=rank, seed=self.seed, device=rhs.device
            )
        if self.preconditioner == "diagonal":
            diagonal = products.diagonal()
            if diagonal is None:
                raise InfluenceError(
                    f"the diagonal of the {TITLES[self.curvature]} can't be computed here: products come from"
                    f" {products.how}",
                    hint="set preconditioner: nystroem",
                )
            return Diagonal((diagonal + damping).to(rhs))
        return None
