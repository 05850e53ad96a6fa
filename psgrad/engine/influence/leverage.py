"""The matrix to invert with its damping, and the one-step leverage correction: what the removal of an example
does to the curvature.

Without example i the Gauss-Newton matrix H loses J_i' L_i J_i. One Newton step on what is left leads to
H_-i^-1 g_i = H^-1 J_i' (I - L_i M_i)^-1 r_i, with M_i = J_i H^-1 J_i' and g_i = J_i' r_i. So a score is
corrected by another gradient of the example: that of its output times (I - L_i M_i)^-1 r_i. If the model is
linear and the loss quadratic (ridge regression) it is exact.

With L_i = S_i S_i' that vector is r_i + S_i w_i, w_i = (I - S_i' M_i S_i)^-1 S_i' M_i r_i, which takes a
symmetric matrix.

M_i takes as many solves as example i's output has numbers. Where only products with the inverse are
available, it is estimated by random vectors. Of vectors x = H^-1 (G' z + sqrt(mu) e), z and e standard normal
and H = G'G + mu I, the mean of x x' is H^-1. So k solves give all M_i at once, as the mean of (J_i x) (J_i
x)': symmetric, never negative, and with a relative error of about sqrt(2 / k). The examples of the largest
leverage, where this error would matter, are solved exactly.

Source: Pregibon, "Logistic Regression Diagnostics" (1981), section 4, for one output; blocks for several
follow by Woodbury's identity.
"""

from __future__ import annotations

import copy
import math
from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Self

import torch

from psgrad.engine.execution.examples import Examples
from psgrad.engine.execution.output_rows import JacobianRows, gauss_newton_rows, jacobian_rows, output_factors
from psgrad.engine.influence.curvature.curvature_products import Curvature
from psgrad.engine.influence.curvature.kronecker_fitting import fisher_rows
from psgrad.engine.influence.method import Fitted, Per, Preconditioned, ScoreBlock, SelfBlock
from psgrad.engine.influence.solvers.direct import combinations
from psgrad.errors import ConfigError, InfluenceError
from psgrad.ragged import Block


@dataclass(frozen=True)
class Damping:
    """lam of (H_S / n + lam I), in units of the curvature of the mean loss.

    absolute: lam; None for `relative` times the mean eigenvalue.
    """

    absolute: float | None = None
    relative: float = 0.1

    def __post_init__(self) -> None:
        for name, value in (("damping", self.absolute), ("relative_damping", self.relative)):
            if value is not None and not (value >= 0 and math.isfinite(value)):
                raise ConfigError(
                    f"{name} is {value}; expected a number that is not negative: it is added to every"
                    " eigenvalue of the curvature",
                )

    def resolve(self, mean_eigenvalue: float) -> float:
        """lam, for a curvature of the mean loss with this mean eigenvalue (its trace over the number of
        parameters).
        """
        if self.absolute is not None:
            return self.absolute
        if not math.isfinite(mean_eigenvalue) or mean_eigenvalue < 0:
            raise InfluenceError(
                f"the curvature's mean eigenvalue is {mean_eigenvalue:.3g}, so no damping can be taken"
                " from it; expected a mean eigenvalue above zero",
                hint=(
                    "a Hessian with more negative than positive curvature: the checkpoint is not near a"
                    " minimum; set curvature: gauss_newton, or an absolute damping"
                ),
            )
        return self.relative * mean_eigenvalue


def default_damping(
    damping: float | None, relative: float | None, default: float, *, convex: bool, weight_decay: float
) -> Damping:
    """The damping of the options; without one, none for a convex objective with a weight decay, and else
    `default` mean eigenvalues.

    convex: whether the model is affine in its parameters. Its curvature and its weight decay are all of its
        objective's curvature, and have an inverse, so that any damping would belong to another objective. A
        network's own curvature is indefinite, and a damping that is much larger than its weight decay ranks
        better (docs/explanation/influence.md).
    """
    if convex and weight_decay > 0 and damping is None and relative is None:
        return Damping(0.0)
    return Damping(damping, default if relative is None else relative)


TITLES: dict[Curvature, str] = {
    "gauss_newton": "Gauss-Newton matrix",
    "hessian": "Hessian",
    "fisher": "empirical Fisher",
    "sampled": "sampled Gauss-Newton matrix",
}


@dataclass(frozen=True)
class InverseProblem:
    """n (C + (weight_decay + lam) I), C the mean curvature of the training set, lam the damping.

    leverage: whether scores are corrected for what a removal does to the curvature. say: called with messages
    for a person. draws, seed: of the sampled Gauss-Newton matrix, the rows of each example, and what they are
    drawn by.
    """

    training: Examples
    curvature: Curvature
    weight_decay: float
    damping: Damping
    leverage: bool
    say: Callable[[str], None]
    draws: int = 1
    seed: int = 0

    @property
    def title(self) -> str:
        return TITLES[self.curvature]

    def rows(self) -> Examples:
        """The rows whose gradients' outer products add up to n C: for all curvatures but the Hessian."""
        if self.curvature == "gauss_newton":
            return gauss_newton_rows(self.training)
        if self.curvature == "sampled":
            return fisher_rows(self.training, self.draws, self.seed)
        return self.training

    def damped(self, damping: float | None, relative: float | None) -> InverseProblem:
        """This problem with another damping. It gives no messages, as the first fit has given them."""
        return replace(
            self,
            damping=Damping(damping) if relative is None else Damping(damping, relative),
            say=lambda _: None,
        )

    def shift(self, mean_eigenvalue: float) -> tuple[float, dict[str, Any]]:
        """n (weight_decay + lam), and facts. mean_eigenvalue: of C."""
        damping = self.damping.resolve(mean_eigenvalue)
        facts = {
            "curvature": self.curvature,
            "damping": damping,
            "mean_eigenvalue": mean_eigenvalue,
            "weight_decay": self.weight_decay,
            "leverage": self.leverage,
        }
        return len(self.training) * (self.weight_decay + damping), facts


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
        """Calls `say` with the training examples that have no corrected score."""
        rows = training.numbers_of(self.gone.nonzero().flatten()).tolist()
        if rows:
            named = ", ".join(map(str, rows[:8])) + (f" and {len(rows) - 8} more" if len(rows) > 8 else "")
            say(
                f"without row {named} the training problem has no solution (its leverage is one), so its"
                " corrected scores are NaN; a damping or a weight decay gives it one"
            )


def output_products(training: Examples, half: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """M_i = J_i H^-1 J_i' [n, C, C] float64 on the CPU. half: [k, p] to vectors [k, any] whose inner products
    are those through H^-1.
    """
    rows = jacobian_rows(training)

    def products(gradients: Any) -> dict[str, torch.Tensor]:
        halves = half(rows.flat.join(gradients.materialise()))
        halves = halves.reshape(-1, rows.per_sample, halves.shape[1])
        return {"products": halves @ halves.transpose(1, 2)}

    return torch.cat([part["products"] for _, part in rows.each(products)])


def with_cotangents(training: Examples, cotangents: torch.Tensor) -> Examples:
    """The training examples with the product of the output and `cotangents` [n, C] in place of the loss."""

    def read(start: int, stop: int) -> Block:
        return training.read(start, stop).with_target(cotangents[start:stop])

    def product(output: torch.Tensor, cotangent: torch.Tensor) -> torch.Tensor:
        return (output.reshape(-1) * cotangent).sum()

    return replace(training, objective=training.objective.with_scalar(product), read=read)


class Invertible(Preconditioned):
    """A fit whose scores can be corrected."""

    problem: InverseProblem

    def has_leverage(self) -> bool:
        """Whether the rows' leverage can be computed."""
        return True

    @abstractmethod
    def leverage(self, root: torch.Tensor, gradient: torch.Tensor) -> Leverage:
        """The leverage of all n examples. root [n, C, R], gradient [n, C]: as `output_factors` has them."""

    @abstractmethod
    def refitted(self, problem: InverseProblem) -> Self:
        """The inverse of this curvature with the damping of `problem`."""

    def on(self, training: Examples, weights: torch.Tensor) -> Self:
        """This inverse for the same n examples with other gradients. weights [n, R]: those of `Leverage`, by
        which the gradients differ.
        """
        other = copy.copy(self)
        other.training = training
        return other

    def with_damping(self, *, damping: float | None = None, relative: float | None = None) -> Self:
        """The inverse of this curvature with another damping: an absolute one, or one relative to the mean
        eigenvalue.
        """
        fitted = self.refitted(self.problem.damped(damping, relative))
        facts = {name: fact for name, fact in self.facts.items() if name in ("solver", "solver_because")}
        fitted.facts = {**facts, **fitted.facts}
        return fitted


class Corrected(Fitted):
    """decrements: [n], twice what each removal's own step lowers the objective without it by, as far as the
    loss's gradient in the output is in the span of its second derivatives. facts: those of the fit, and
    `largest_leverage`, the largest eigenvalue of any example's L_i M_i.

    An example without which the training problem has no solution is reported, and its scores are NaN.

    automatic: whether the correction goes with the damping that a default chose: with another damping there
    is none.
    """

    def __init__(self, plain: Invertible, *, automatic: bool = False) -> None:
        self.automatic = automatic
        training = plain.training
        root, coefficients, gradient = output_factors(training)
        self.plain = plain
        self.leverage = plain.leverage(root, gradient)
        self.decrements = (coefficients * self.leverage.pull).sum(1) + self.leverage.extra
        self.leverage.tell(training, plain.problem.say)
        weights = self.leverage.weights.nan_to_num(0.0)
        self.removed = plain.on(
            with_cotangents(training, gradient + (root @ weights.unsqueeze(2)).squeeze(2)), weights
        )
        self.facts = plain.facts  # not copied, as solvers add to them while they solve
        self.facts["largest_leverage"] = float(self.leverage.largest.max())
        self.calibrated, self.has_self_influence = plain.calibrated, plain.has_self_influence

    def solver(self) -> Preconditioned | None:
        return self.plain

    def with_damping(self, *, damping: float | None = None, relative: float | None = None) -> Fitted:
        """As that of the fit."""
        plain = self.plain.with_damping(damping=damping, relative=relative)
        if not self.automatic:
            return Corrected(plain)
        plain.facts["leverage"] = False
        return plain

    def scores(self, queries: Examples, per: Per = "total") -> Iterator[ScoreBlock]:
        return map(self.marked, self.removed.scores(queries, per))

    def marked(self, block: ScoreBlock) -> ScoreBlock:
        """The block with NaN for examples without a score."""
        gone = self.leverage.gone[block.start : block.stop].unsqueeze(1)
        return replace(
            block, scores={label: value.masked_fill(gone, torch.nan) for label, value in block.scores.items()}
        )

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


Inverse = Callable[[torch.Tensor], torch.Tensor]  # [k, p] to [k, p], float64

# The number of random vectors, and the fewest of an estimate; and right-hand sides of examples that are
# solved for.
_VECTORS, _FEWEST, _SOLVED = 256, 32, 256
# Blocks of vectors that are alive at once, and the part of the free memory that they may take.
_ALIVE, _SHARE = 4, 4


def vectors_that_fit(training: Examples) -> int:
    """How many random vectors are taken: as many as fit into memory, and none where these are too few."""
    room = training.free_bytes() // (_SHARE * _ALIVE * 8 * training.flat.size)
    return min(_VECTORS, room) if room >= _FEWEST else 0


def estimated_leverage(
    training: Examples, inverse: Inverse, shift: float, root: torch.Tensor, gradient: torch.Tensor, seed: int
) -> tuple[Leverage, int, int]:
    """(the leverage of all n examples, how many of them were solved for, how many random vectors stand for
    the others).

    inverse: products with H^-1, [k, p] to [k, p]. shift: mu. root [n, C, R], gradient [n, C]: as
    `output_factors` has them.
    """
    count = max(vectors_that_fit(training), _FEWEST)
    vectors = _normal_vectors(training, inverse, shift, count, seed)
    products = output_products(
        training, lambda rows: rows.double() @ vectors.t().to(rows.device) / count**0.5
    )
    largest, rows = Leverage.through(products, root, gradient).largest, jacobian_rows(training)
    solved = largest.argsort(descending=True)[: max(1, _SOLVED // rows.per_sample)]
    products[solved] = _solved_products(rows, inverse, solved.tolist())
    return Leverage.through(products, root, gradient), len(solved), count


def _normal_vectors(
    training: Examples, inverse: Inverse, shift: float, count: int, seed: int
) -> torch.Tensor:
    """[count, p] float64: normal vectors whose covariance is the inverse."""
    generator, rows = torch.Generator().manual_seed(seed), gauss_newton_rows(training)
    weights = torch.randn(len(rows), count, generator=generator, dtype=torch.float64)
    right = combinations(rows, weights)
    right.add_(torch.randn(right.shape, generator=generator, dtype=torch.float64), alpha=shift**0.5)
    return inverse(right.to(training.device))


def _solved_products(rows: JacobianRows, inverse: Inverse, places: list[int]) -> torch.Tensor:
    """M_i [k, C, C] float64 on the CPU of the examples at these places."""
    own = torch.cat(
        [rows.flat.join(rows.gradients(place, place + 1).materialise()).double() for place in places]
    )
    solved = inverse(own).reshape(len(places), rows.per_sample, -1)
    return (own.reshape(solved.shape) @ solved.transpose(1, 2)).cpu()
