"""What a fit of an influence method says of itself, for manifest.json and the page."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class SolveFacts:
    """How conjugate gradients went. products: with one vector. unconverged: right-hand sides above the
    tolerance. ritz_min, ritz_max: the matrix's extreme eigenvalues, about, where they were estimated.
    """

    iterations: int
    products: int
    relative_residual_max: float
    relative_residual_median: float
    converged: bool
    unconverged: int
    preconditioner: str
    ritz_min: float | None = None
    ritz_max: float | None = None

    def behind(self, earlier: SolveFacts) -> SolveFacts:
        """These, with the worst of both calls where there is a worst, and the earlier call's eigenvalues."""
        return replace(
            self,
            iterations=max(earlier.iterations, self.iterations),
            relative_residual_max=max(earlier.relative_residual_max, self.relative_residual_max),
            converged=earlier.converged and self.converged,
            ritz_min=earlier.ritz_min,
            ritz_max=earlier.ritz_max,
        )


@dataclass(frozen=True)
class FitFacts:
    """Plain values; None where a method has none. A method of one's own may add fields in a subclass.

    damping, mean_eigenvalue: of the curvature, or of each of its blocks. relative_damping: the one that was
    chosen, in mean eigenvalues. damping_agreement: the correlation with each that was tried. condition: of
    what is inverted. rows: of the curvature. solved: once there are scores. columns: of projected rows.
    """

    curvature: str | None = None
    fisher: str | None = None
    blocks: Mapping[str, str] | None = None
    damping: float | Mapping[str, float] | None = None
    mean_eigenvalue: float | Mapping[str, float] | None = None
    mean_eigenvalue_error: float | None = None
    weight_decay: float | None = None
    relative_damping: float | None = None
    damping_agreement: Mapping[str, float] | None = None
    damping_because: str | None = None
    smallest_eigenvalue: float | None = None
    largest_eigenvalue: float | None = None
    condition: float | None = None
    rows: int | None = None
    products_by: str | None = None
    solver: str | None = None
    solver_because: str | None = None
    solved: SolveFacts | None = None
    leverage: bool | None = None
    largest_leverage: float | None = None
    change: str | None = None
    calibrated: bool | None = None
    calibrated_because: str | None = None
    second_moments: str | None = None
    projection: Mapping[str, Any] | None = None
    columns: int | None = None
    projection_noise: float | None = None

    def content(self) -> dict[str, Any]:
        """All that there are, by their names, those of the solves beside the others."""
        solved = {} if self.solved is None else vars(self.solved)
        values = {**vars(self), **solved, "solved": None}
        return {name: value for name, value in values.items() if value is not None}
