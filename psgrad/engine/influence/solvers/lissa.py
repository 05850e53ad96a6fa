"""LiSSA: the inverse as a series, one product with the matrix a term."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import torch

from psgrad.engine.influence.solvers.spectrum import (
    ROUNDING,
    TOLD_SECONDS,
    Apply,
    assert_finite,
    duration_words,
    extremes,
    negative_curvature,
    random_block,
)
from psgrad.errors import InfluenceError

# The factor of the scale above the estimated largest eigenvalue, which Lanczos estimates from below.
_MARGIN = 1.05
# The residual is computed after each such number of terms; if it has grown by this factor, the series
# diverges.
_LOOK, _GROWTH = 10, 100.0
# Computations of the residual over which it must fall, and the factor of the allowed time after which the
# solve ends.
_STALLED, _LATE = 20, 2.0


def lissa(
    apply: Apply,
    rhs: torch.Tensor,
    *,
    tolerance: float = 1e-6,
    iterations: int = 5000,
    seconds: float | None = None,
    clock: Callable[[], float] = time.perf_counter,
    scale: float | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> tuple[torch.Tensor, dict[str, Any]]:
    """Solve A x = b for k right-hand sides by x <- x + (b - A x) / scale, A symmetric positive definite.

    Args:
        apply: A with its damping times each of some vectors, [k, p] to [k, p] float64.
        rhs: [k, p].
        tolerance: of |b - A x| / |b|, for every right-hand side.
        iterations: at most.
        seconds: what it may take; the number of terms is predicted from the spectrum, and their time from the
            first. None for any time. clock: in seconds; the same on all processes that solve together.
        scale: above half of A's largest eigenvalue; None for a little more than the largest that Lanczos
            finds.
        say: called with a message if the tolerance is not reached: terms or time are used up, or the residual
            no longer falls.

    Returns x [k, p] float64 and facts: iterations, relative_residual_max and _median (of the x returned),
    converged, unconverged, scale, ritz_min, ritz_max. It takes about log(1 / tolerance) times A's condition
    number in products, and no randomness: the terms are those of Agarwal, Bullins and Hazan, "Second-order
    stochastic optimization for machine learning in linear time" (2017), with the whole training set in each.
    With A = H + lam I, x / scale is the x of x <- b + (1 - d) x - H x / scale in Koh and Liang (2017) for the
    damping lam = scale * d: here it is lam that is given.

    Raises InfluenceError where the series diverges, where it is predicted to take longer than `seconds`, and
    where A is found not to be positive definite.
    """
    rhs = rhs.double()
    assert_finite(rhs)
    ritz = extremes(apply, random_block(1, rhs.shape[1], seed=0, device=rhs.device)[0])
    lowest, highest = float(ritz.values[0]), float(ritz.values[-1])
    if lowest < -ROUNDING * abs(highest):
        raise negative_curvature(ritz)
    scale = _MARGIN * (highest + float(ritz.bounds[-1])) if scale is None else scale
    size = torch.linalg.vector_norm(rhs, dim=1)
    size = torch.where(size > 0, size, 1.0)
    x, residual, used = torch.zeros_like(rhs), rhs, 0
    relative = torch.linalg.vector_norm(residual, dim=1) / size
    begun = clock()
    best, why = [float(relative.max())], f"after {iterations} iterations"
    while used < iterations and bool((relative > tolerance).any()):
        x = x + residual / scale
        residual = rhs - apply(x)
        used += 1
        relative = torch.linalg.vector_norm(residual, dim=1) / size
        spent = clock() - begun if used == 1 or (seconds is not None and used % _LOOK == 0) else 0.0
        if used == 1:
            needed = min(iterations, _terms(lowest, scale, tolerance))
            if spent * needed > TOLD_SECONDS:
                say(
                    f"LiSSA takes {needed:,} products with the curvature for every query, predicted to take"
                    f" {duration_words(spent * needed)}; influence.method.solver: conjugate_gradient takes"
                    " far fewer"
                )
            if seconds is not None and spent * needed > seconds:
                raise _too_long(needed, spent * needed, seconds, scale / max(lowest, 1e-300))
        if used % _LOOK:
            continue
        worst = float(relative.max())
        if not worst < _GROWTH * min(best):
            raise InfluenceError(
                f"LiSSA diverges: after {used} iterations the relative residual is {worst:.3g}",
                expected=(
                    f"a scale above half the largest eigenvalue, which is about {highest:.3g}; it is"
                    f" {scale:.3g}"
                ),
                next_step="leave out the scale; or solver: conjugate_gradient, which needs none",
            )
        best.append(worst)
        if len(best) > _STALLED and worst >= best[-1 - _STALLED]:
            why = f"it falls no more, as products are rounded to that, and after {used} iterations"
            break
        if seconds is not None and spent > _LATE * seconds:
            why = f"after {used} iterations, which took {spent:.0f} seconds,"
            break
    unconverged = int((relative > tolerance).sum())
    if unconverged:
        say(
            f"LiSSA did not converge: {why} the relative residual of {unconverged} of {len(rhs)} right-hand"
            f" sides is above {tolerance:g}, of the worst {float(relative.max()):.2g}; solver:"
            " conjugate_gradient takes far fewer products"
        )
    facts = {
        "iterations": used,
        "relative_residual_max": float(relative.max()) if len(relative) else 0.0,
        "relative_residual_median": float(relative.median()) if len(relative) else 0.0,
        "converged": unconverged == 0,
        "unconverged": unconverged,
        "scale": scale,
        "ritz_min": lowest,
        "ritz_max": highest,
    }
    return x, facts


def _terms(lowest: float, scale: float, tolerance: float) -> int:
    """How many terms reduce the residual along an eigenvector of the lowest eigenvalue to the tolerance."""
    share = min(max(lowest / scale, 1e-15), 0.5)
    return math.ceil(math.log(1 / min(tolerance, 0.5)) / -math.log1p(-share))


def _too_long(terms: int, predicted: float, seconds: float, condition: float) -> InfluenceError:
    return InfluenceError(
        f"LiSSA is predicted to take {terms:,} products with the curvature for every query, about"
        f" {duration_words(predicted)}",
        expected=f"at most {duration_words(seconds)}, where the options name no number of iterations",
        cause=f"a condition number of {condition:.2g}, by which the number of products grows",
        next_step=(
            "set solver: conjugate_gradient, which takes far fewer products; or a larger damping, a larger"
            f" tolerance, or iterations: {terms}, which are then taken however long that is"
        ),
    )
