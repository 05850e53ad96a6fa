"""Influence by products with the curvature, which is never written out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from psgrad.engine.flat import Vectors
from psgrad.engine.influence.curvature.products import CurvatureProducts, curvature_products
from psgrad.engine.influence.fits.setting import Setting
from psgrad.engine.influence.method import Preconditioned

# (products, lam, right-hand sides [k, p], whether the spectrum is to be told) to the solutions of (C + (weight_decay + lam) I) x = b and
# the solver's facts.
Solve = Callable[[CurvatureProducts, float, torch.Tensor, bool], tuple[torch.Tensor, dict[str, Any]]]


class ByProducts(Preconditioned):
    """Scores through a solver that asks for products alone.

    facts: besides `damping` and `mean_eigenvalue`, its standard error, where products come from (`products_by`), and the solver's own,
    once there are scores. Raises InfluenceError as the solver does.
    """

    has_self_influence = False

    def __init__(self, setting: Setting, products: CurvatureProducts, solve: Solve) -> None:
        super().__init__(setting.training)
        self.setting, self.products, self.solve = setting, products, solve
        mean, error = products.mean_eigenvalue()
        shift, facts = setting.shift(mean)
        self.damping = shift / len(setting.training) - setting.weight_decay
        self.facts = {**facts, "mean_eigenvalue_error": error, "products_by": products.how}

    @classmethod
    def fit(cls, setting: Setting, solve: Solve, seed: int) -> ByProducts:
        """seed: of an estimated trace."""
        return cls(setting, curvature_products(setting.training, setting.curvature, weight_decay=setting.weight_decay, seed=seed), solve)

    def with_damping(self, *, damping: float | None = None, relative: float | None = None) -> ByProducts:
        """The same curvature with another damping: an absolute one, or one relative to the mean eigenvalue."""
        fitted = ByProducts(self.setting.damped(damping, relative), self.products, self.solve)
        fitted.facts = {**self.setting.chosen(self.facts), **fitted.facts}
        return fitted

    def precondition(self, vectors: Vectors) -> Vectors:
        flat = self.training.flat
        found, facts = self.solve(self.products, self.damping, flat.join(vectors).double(), "ritz_min" not in self.facts)
        self.facts.update(_worst(self.facts, facts))
        return flat.split(found / len(self.training))


def _worst(before: dict[str, Any], facts: dict[str, Any]) -> dict[str, Any]:
    """A solver's facts, with the worst of this call and of those before where there is a worst."""
    largest = ("iterations", "relative_residual_max")
    kept = {name: max(before.get(name, 0), facts[name]) for name in largest if name in facts}
    return {**facts, **kept, **({"converged": before.get("converged", True) and facts["converged"]} if "converged" in facts else {})}
