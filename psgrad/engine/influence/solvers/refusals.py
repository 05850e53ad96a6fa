"""What all iterative solvers refuse, in one wording."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from psgrad.errors import InfluenceError

if TYPE_CHECKING:
    from psgrad.engine.influence.curvature.spectrum import Ritz

# Of the largest eigenvalue, what may be rounding of the lowest.
ROUNDING = 1e-9
# Of the largest eigenvalue, what a damping adds that leaves an inverse half its digits.
_ENOUGH = 1e-8


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


def assert_invertible(smallest: float, largest: float, size: int) -> None:
    """Raises InfluenceError where a positive semidefinite matrix [size, size] with these extreme eigenvalues, its damping included, has
    no inverse with any digits. smallest: or anything above it."""
    if smallest > size * torch.finfo(torch.float64).eps * largest:
        return
    enough = f"raise the damping by {_ENOUGH * largest:.1e} or more" if largest > 0 else "look at `parameters`"
    raise InfluenceError(
        f"the damped curvature is singular: its smallest eigenvalue is {smallest:.3g} and its largest {largest:.3g}",
        expected="a positive definite matrix, whose inverse scores are made with",
        cause="directions in the parameters that no training example's output depends on, and hardly any damping or weight decay",
        next_step=enough,
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
