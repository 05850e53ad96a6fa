"""Products of the training set's mean curvature with blocks of vectors: all that iterative solvers ask of a matrix of any size."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar, Literal

import torch

from psgrad.engine.examples import Examples
from psgrad.engine.flat import Flat

Curvature = Literal["gauss_newton", "hessian", "fisher"]
Apply = Callable[[torch.Tensor], torch.Tensor]


class CurvatureProducts(ABC):
    """A symmetric matrix [p, p]: the mean over n samples of a curvature of their loss, plus a weight decay on the diagonal.

    Attributes:
        how: where its products come from, in words for a manifest.
        flat: the order of the parameters. count: n. weight_decay: as given.
    """

    how: ClassVar[str]

    def __init__(self, flat: Flat, count: int, weight_decay: float = 0.0) -> None:
        self.flat, self.count, self.weight_decay = flat, count, weight_decay

    @abstractmethod
    def apply(self, block: torch.Tensor) -> torch.Tensor:
        """[k, p] float64: the matrix, with its weight decay, times each of k vectors [k, p]. Sums over samples are in float64."""

    def damped(self, damping: float) -> Apply:
        """Products with the matrix plus `damping` on its diagonal."""
        return lambda block: self.apply(block) + damping * block

    @abstractmethod
    def mean_eigenvalue(self) -> tuple[float, float]:
        """The mean of the eigenvalues without the weight decay, that is the trace over p, and its standard error: 0 where it is exact."""

    def diagonal(self) -> torch.Tensor | None:
        """[p] float64 with the weight decay, on the CPU; None where it can't be had for the price of some products."""
        return None


def curvature_products(
    training: Examples, curvature: Curvature = "gauss_newton", *, weight_decay: float = 0.0, seed: int = 0
) -> CurvatureProducts:
    """Products with the mean curvature of the training set, the cheapest way.

    curvature: 'gauss_newton' (the loss's second derivatives in the output, pulled back to the parameters), 'fisher' (of the labels that
    there are: the mean of g g' over per-sample gradients g) or 'hessian'. seed: of the random signs behind an estimated trace.

    Gauss-Newton and Fisher keep their rows where these fit in memory; else, and for a Hessian, each product runs over the data.
    """
    from psgrad.engine.influence.curvature.pass_products import PassProducts
    from psgrad.engine.influence.curvature.row_products import RowProducts

    found = RowProducts.of(training, curvature, weight_decay) if curvature != "hessian" else None
    return found if found is not None else PassProducts(training, curvature, weight_decay, seed)
