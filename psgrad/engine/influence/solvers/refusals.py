"""What all iterative solvers refuse, in one wording."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from psgrad.errors import InfluenceError

if TYPE_CHECKING:
    from psgrad.engine.influence.curvature.spectrum import Ritz

# Of the largest eigenvalue, what may be rounding of the lowest.
ROUNDING = 1e-9


def assert_finite(rhs: torch.Tensor) -> None:
    """Raises InfluenceError where a right-hand side [k, p] is not finite."""
    bad = (~torch.isfinite(rhs).all(1)).nonzero().squeeze(1).tolist()
    if bad:
        raise InfluenceError(
            f"{len(bad)} of {len(rhs)} right-hand sides are not finite, the first of them number {bad[0]}",
            cause="a query whose loss or gradient is not finite",
            next_step="leave that query out",
        )


def not_finite() -> InfluenceError:
    return InfluenceError(
        "products with the curvature are not finite",
        cause="a training example whose gradient is not finite, or numbers beyond the type's range",
        next_step="look for such examples with `psgrad analyze`; engine.dtype: float64",
    )


def negative_curvature(ritz: Ritz) -> InfluenceError:
    """ritz: of the damped matrix, its extremes."""
    lowest, bound = float(ritz.values[0]), float(ritz.bounds[0])
    return InfluenceError(
        f"the damped curvature is not positive definite: its lowest eigenvalue is {lowest:.3g}, to within {bound:.1g}",
        expected="eigenvalues above zero: the system has no minimum, and influence no meaning, along directions of negative curvature",
        cause="the Hessian of a model that is not at a minimum of its loss, or of a loss that is not convex",
        next_step=f"raise the damping by {1.1 * (bound - lowest):.3g} or more, or use curvature: gauss_newton",
    )
