"""What is inverted, whichever way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from psgrad.engine.examples import Examples
from psgrad.engine.influence.curvature.products import Curvature
from psgrad.engine.influence.curvature.rows import gauss_newton_rows
from psgrad.engine.influence.damping import Damping

TITLES: dict[Curvature, str] = {"gauss_newton": "Gauss-Newton matrix", "hessian": "Hessian", "fisher": "empirical Fisher"}


@dataclass(frozen=True)
class Setting:
    """n (C + (weight_decay + lam) I), C the mean curvature of the training set, lam the damping.

    leverage: whether scores are corrected for what a removal does to the curvature. say: told what a person should hear.
    """

    training: Examples
    curvature: Curvature
    weight_decay: float
    damping: Damping
    leverage: bool
    say: Callable[[str], None]

    @property
    def title(self) -> str:
        return TITLES[self.curvature]

    def rows(self) -> Examples:
        """Whose gradients' outer products add up to n C: for all curvatures but the Hessian."""
        return gauss_newton_rows(self.training) if self.curvature == "gauss_newton" else self.training

    def damped(self, damping: float | None, relative: float | None) -> Setting:
        """The same with another damping, and with nothing to say that was said before."""
        return replace(self, damping=Damping(damping) if relative is None else Damping(damping, relative), say=lambda _: None)

    @staticmethod
    def chosen(facts: dict[str, Any]) -> dict[str, Any]:
        """Of a fit's facts those that another damping leaves as they are: which solver it was, and why."""
        return {name: facts[name] for name in ("solver", "solver_because") if name in facts}

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
