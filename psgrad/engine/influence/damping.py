"""The damping of a curvature, and its default."""

from __future__ import annotations

import math
from dataclasses import dataclass

from psgrad.errors import ConfigError, InfluenceError


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
                raise ConfigError(f"{name} is {value}; expected a number that is not negative")

    def resolve(self, mean_eigenvalue: float) -> float:
        """lam, for a curvature of the mean loss with this mean eigenvalue (its trace over the number of
        parameters).
        """
        if self.absolute is not None:
            return self.absolute
        if not math.isfinite(mean_eigenvalue) or mean_eigenvalue < 0:
            raise InfluenceError(
                f"no damping can be taken from the curvature's mean eigenvalue, {mean_eigenvalue:.3g}",
                hint="set curvature: gauss_newton, or an absolute damping",
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
