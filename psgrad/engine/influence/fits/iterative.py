"""Influence by products with the curvature, which is never written out."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch

from psgrad.engine.examples import Examples
from psgrad.engine.flat import Vectors
from psgrad.engine.influence.curvature.products import CurvatureProducts, curvature_products
from psgrad.engine.influence.fits.corrected import Invertible
from psgrad.engine.influence.fits.leverage_estimate import estimated_leverage, vectors_that_fit
from psgrad.engine.influence.fits.setting import Setting
from psgrad.engine.influence.leverage import Leverage

# (products, lam, right-hand sides [k, p], whether the spectrum is to be told) to the solutions of (C + (weight_decay + lam) I) x = b and
# the solver's facts.
Solve = Callable[[CurvatureProducts, float, torch.Tensor, bool], tuple[torch.Tensor, dict[str, Any]]]


class ByProducts(Invertible):
    """Scores through a solver that asks for products alone.

    facts: besides `damping` and `mean_eigenvalue`, its standard error, where products come from (`products_by`), and the solver's own,
    once there are scores. Raises InfluenceError as the solver does.
    """

    has_self_influence = False

    def __init__(self, setting: Setting, products: CurvatureProducts, solve: Solve, rough: Solve, seed: int) -> None:
        super().__init__(setting.training)
        self.setting, self.products, self.solve, self.rough, self.seed = setting, products, solve, rough, seed
        mean, error = products.mean_eigenvalue()
        shift, facts = setting.shift(mean)
        self.damping = shift / len(setting.training) - setting.weight_decay
        self.facts = {**facts, "mean_eigenvalue_error": error, "products_by": products.how}

    @classmethod
    def fit(cls, setting: Setting, solve: Solve, rough: Solve, seed: int) -> ByProducts:
        """rough: solves to fewer digits, for what is estimated. seed: of an estimated trace, and of an estimated leverage."""
        products = curvature_products(setting.training, setting.curvature, weight_decay=setting.weight_decay, seed=seed)
        return cls(setting, products, solve, rough, seed)

    def with_damping(self, *, damping: float | None = None, relative: float | None = None) -> ByProducts:
        """The same curvature with another damping: an absolute one, or one relative to the mean eigenvalue."""
        fitted = ByProducts(self.setting.damped(damping, relative), self.products, self.solve, self.rough, self.seed)
        fitted.facts = {**self.setting.chosen(self.facts), **fitted.facts}
        return fitted

    def precondition(self, vectors: Vectors) -> Vectors:
        flat = self.training.flat
        found, facts = self.solve(self.products, self.damping, flat.join(vectors).double(), "ritz_min" not in self.facts)
        self.facts.update(_worst(self.facts, facts))
        return flat.split(found / len(self.training))

    def has_leverage(self) -> bool:
        return vectors_that_fit(self.training) > 0

    def leverage(self, root: torch.Tensor, gradient: torch.Tensor) -> Leverage:
        """Estimated for most examples (leverage_estimate.py)."""

        def inverse(block: torch.Tensor) -> torch.Tensor:
            return self.rough(self.products, self.damping, block, False)[0] / len(self.training)

        shift = len(self.training) * (self.damping + self.setting.weight_decay)
        found, exact, vectors = estimated_leverage(self.training, inverse, shift, root, gradient, self.seed)
        self.facts["leverage_by"] = f"{vectors} random vectors, and a solve for each of the {exact} examples of the largest leverage"
        return found

    def on(self, training: Examples, weights: torch.Tensor) -> ByProducts:
        other = copy.copy(self)
        other.training = training
        return other


def _worst(before: dict[str, Any], facts: dict[str, Any]) -> dict[str, Any]:
    """A solver's facts, with the worst of this call and of those before where there is a worst."""
    largest = ("iterations", "relative_residual_max")
    kept = {name: max(before.get(name, 0), facts[name]) for name in largest if name in facts}
    return {**facts, **kept, **({"converged": before.get("converged", True) and facts["converged"]} if "converged" in facts else {})}
