"""The spectrum of the gradients' covariance: in how many directions do samples pull apart?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from psgrad.engine.gradients import PerSampleGradients
from psgrad.engine.influence.solvers.dual import kernel
from psgrad.engine.measures.measure import Arrays, Gathered, Measure, Setting
from psgrad.engine.measures.projected import COLUMN, Projected
from psgrad.engine.measures.sums import shared_sums

# Rows that are taken into float64 at once.
_ROWS = 16384
# A trace below so many roundings of the mean squared norm is none: the gradients are all the same.
_ROUNDINGS = 16


@dataclass
class CovarianceSpectrum(Measure):
    """The largest eigenvalues of the covariance of the samples' gradients, with their shares of its trace.

    For few samples the eigenvalues are exact: those of the samples' inner products, which are the same except for zeros. They are also
    exact if projected_gradients keeps the whole gradient. Otherwise they are those of the projected gradients' covariance. Such an
    eigenvalue, if it is separate from the others, has a `standard_error` of sqrt(2 / dimension) of itself, and is too large by about
    `lift`, the sum of the other eigenvalues divided by the dimension. Eigenvalues near or below trace / dimension (`floor`) cannot be
    separated from the rest. The trace is always that of the whole gradients, computed from their norms and their mean.

    Options:
        top: how many eigenvalues are listed.
        exact_up_to: the largest number of samples for which all inner products are computed.
    """

    top: int = 20
    exact_up_to: int = 1024

    name: ClassVar[str] = "covariance_spectrum"
    title: ClassVar[str] = "Spectrum of the gradients' covariance"
    formula: ClassVar[str] = (
        "eigenvalues of S = sum_i (g_i - mean) (g_i - mean)' / (n - 1); share: eigenvalue / tr S; effective rank: (tr S)^2 / tr S^2"
    )
    unit: ClassVar[str] = "squared {loss} per squared unit of parameter"
    source: ClassVar[str] = (
        "Jastrzebski et al.: The Break-Even Point on Optimization Trajectories of Deep Neural Networks (2020), section 3; projected: "
        "Johnson, Lindenstrauss (1984)"
    )
    cost: ClassVar[str] = (
        "the summed gradient (one for all measures that use it) and an eigendecomposition of dimension x dimension; for up to exact_up_to "
        "samples all inner products"
    )
    needs: ClassVar[tuple[str, ...]] = (COLUMN,)
    needs_factors = True

    def __post_init__(self) -> None:
        if self.top < 1:
            raise ValueError(f"got {self.top} as top, expected at least 1 eigenvalue")
        if self.exact_up_to < 0:
            raise ValueError(f"got {self.exact_up_to} as exact_up_to, expected a number of samples, or 0 for never")

    def prepare(self, setting: Setting) -> None:
        self._setting = setting
        self._sums = shared_sums(setting, self) if len(setting) > self.exact_up_to else None  # else all inner products are taken
        self.needs_factors = self._sums is not None

    def columns(self, gradients: PerSampleGradients) -> Arrays:
        if self._sums is not None:
            self._sums.add(gradients)
        return {}

    def keep(self) -> None:
        if self._sums is not None:
            self._sums.keep()

    def state(self) -> Arrays:
        return {} if self._sums is None else self._sums.state(self)

    def restore(self, state: Arrays) -> None:
        if self._sums is not None:
            self._sums.restore(self, state)

    def gather(self, rows: Mapping[str, torch.Tensor]) -> Gathered:
        examples = self._setting.examples
        found = Projected.of(rows, examples.flat.size)
        n = len(found.places)
        if n < 2:
            return Gathered(numbers={"samples": n, "trace": None, "effective_rank": None, "method": "undefined for fewer than two samples"})
        total = float(rows["grad_norm"][found.places].square().sum())
        if self._sums is None:
            products = kernel(examples).cpu()[found.places][:, found.places]
            values, method, noise = _eigenvalues(_centred(products)), "exact, by the samples' inner products", 0.0
            trace = float(values.sum()) / (n - 1)
        else:
            values = _eigenvalues_of(found.rows)
            method, noise = ("exact, by whole gradients" if found.exact else "by random projection"), found.noise
            trace = (total - n * self._sums.square_mean()) / (n - 1)
        values = values / (n - 1)
        rounding = _ROUNDINGS * torch.finfo(next(iter(examples.params.values())).dtype).eps * total / n
        if trace <= rounding:
            trace, values = 0.0, torch.zeros_like(values)
        numbers: dict[str, Any] = {
            "samples": n,
            "method": method,
            "trace": trace,
            "effective_rank": _effective_rank(values, trace, noise),
            "trace_by_projection": float(values.sum()) if noise else None,
            "floor": trace * noise**2 if noise else None,
        }
        shown = values[: self.top]
        shares = shown / trace if trace else torch.full_like(shown, torch.nan)
        table = {
            "rank": list(range(1, len(shown) + 1)),
            "eigenvalue": shown,
            "share": shares,
            "cumulative_share": shares.cumsum(0),
            "standard_error": 2**0.5 * noise * shown,
            "lift": (trace - shown).clamp_min(0) * noise**2,
        }
        return Gathered(numbers=numbers, tables={"spectrum": table})


def _centred(products: torch.Tensor) -> torch.Tensor:
    """[n, n]: the inner products of vectors less their mean, from those of the vectors."""
    each = products.mean(1, keepdim=True)
    return products - each - each.t() + products.mean()


def _eigenvalues(matrix: torch.Tensor) -> torch.Tensor:
    """Of a symmetric matrix without negative eigenvalues, descending."""
    return torch.linalg.eigvalsh((matrix + matrix.t()) / 2).flip(0).clamp_min(0)


def _eigenvalues_of(rows: torch.Tensor) -> torch.Tensor:
    """Of the sum of x x' over centred rows x [n, k], the first min(n, k) of them, descending."""
    mean = rows.mean(0, dtype=torch.float64)
    if len(rows) < rows.shape[1]:
        centred = rows.double() - mean
        return _eigenvalues(centred @ centred.t())
    total = rows.new_zeros(rows.shape[1], rows.shape[1], dtype=torch.float64)
    for start in range(0, len(rows), _ROWS):
        centred = rows[start : start + _ROWS].double() - mean
        total.addmm_(centred.t(), centred)
    return _eigenvalues(total)


def _effective_rank(values: torch.Tensor, trace: float, noise: float) -> float | None:
    """(tr S)^2 / tr S^2, from 1 to the rank of S: how many equal eigenvalues would give that. None where S is zero, or where the
    projection leaves no estimate of tr S^2.

    Under a projection to k columns E[tr T^2] = (1 + 1/k) tr S^2 + (tr S)^2 / k, which is solved for tr S^2.
    """
    square = (float(values.square().sum()) - (trace * noise) ** 2) / (1 + noise**2)
    return trace**2 / square if trace and square > 0 else None
