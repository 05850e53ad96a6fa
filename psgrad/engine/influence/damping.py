"""How much is added to every eigenvalue of a curvature before it is inverted."""

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
                raise ConfigError(
                    f"{name} is {value}", expected="a number that is not negative: it is added to every eigenvalue of the curvature"
                )

    def resolve(self, mean_eigenvalue: float) -> float:
        """lam, for a curvature of the mean loss with this mean eigenvalue (its trace over the number of parameters)."""
        if self.absolute is not None:
            return self.absolute
        if not math.isfinite(mean_eigenvalue) or mean_eigenvalue < 0:
            raise InfluenceError(
                f"the curvature's mean eigenvalue is {mean_eigenvalue:.3g}, so no damping can be taken from it",
                expected="a mean eigenvalue above zero",
                cause="a Hessian with more negative than positive curvature: the checkpoint is not near a minimum",
                next_step="set curvature: gauss_newton, or an absolute damping",
            )
        return self.relative * mean_eigenvalue
