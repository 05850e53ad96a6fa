"""The ends of the spectrum of the Hessian of each sample's loss, by Lanczos."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch

from psgrad.engine.gradients.streaming import Columns
from psgrad.engine.measures.hessians import SampleHessians
from psgrad.engine.measures.krylov import extreme_eigenvalues
from psgrad.engine.measures.measure import Arrays, Measure, OwnPass, Setting
from psgrad.engine.measures.row_passes import Inputs, random_normals, refusing, row_pass


@dataclass
class HessianTopEigenvalue(Measure):
    """The largest eigenvalue with its sign, as in work on sharpness, not the largest magnitude. The same iterations give the lowest one;
    the largest magnitude is the larger of both. The first vector is drawn for each sample from the number of its row.

    A Ritz value never exceeds the largest eigenvalue (except for rounding). An eigenvalue lies within the residual of it. If the residual
    is large compared with the value, more iterations are needed.

    Options:
        iterations: Lanczos steps for each sample, at least 2: products with its Hessian, and vectors that are kept.
    """

    iterations: int = 20

    name: ClassVar[str] = "hessian_top_eigenvalue"
    title: ClassVar[str] = "Largest eigenvalue of the Hessian"
    formula: ClassVar[str] = "max_v v' (d2 l / d theta2) v over unit vectors v, by Lanczos with full reorthogonalisation"
    unit: ClassVar[str] = "{loss} per squared unit of parameter"
    source: ClassVar[str] = (
        "Lanczos iteration: Parlett, The Symmetric Eigenvalue Problem (1998), chapter 13, residual bound theorem 4.5.1; as sharpness: "
        "Cohen et al.: Gradient Descent on Neural Networks Typically Occurs at the Edge of Stability (2021), section 2"
    )
    cost: ClassVar[str] = (
        "a pass of its own; for each iteration about three times the pass for gradients; iterations x p numbers are kept for each sample"
    )
    meanings: ClassVar[dict[str, str]] = {
        "hessian_top_eigenvalue": "largest curvature of the sample's loss in any direction ({loss} per squared unit of parameter)",
        "hessian_top_residual": "within this distance of hessian_top_eigenvalue lies an eigenvalue of the Hessian (the same unit)",
        "hessian_lowest_eigenvalue": "lowest curvature in any direction, mostly negative (the same unit)",
        "hessian_lowest_residual": "within this distance of hessian_lowest_eigenvalue lies an eigenvalue of the Hessian (the same unit)",
    }

    def __post_init__(self) -> None:
        if self.iterations < 2:
            raise ValueError(f"got {self.iterations} iterations, expected at least 2: one tells nothing of the ends of a spectrum")

    def prepare(self, setting: Setting) -> None:
        self._examples, self._seed = setting.examples, setting.seed
        self._hessians = SampleHessians(setting.examples)

    def passes(self) -> Sequence[OwnPass]:
        return [OwnPass("hessian-top-eigenvalue", self._run)]

    def _run(self, start: int, chunk_size: int) -> Iterator[Columns]:
        size = self._hessians.chunk_size(chunk_size, vectors=1, kept=self.iterations + 4)
        return refusing(self, row_pass(self._examples, self._ends, size, start), "second derivatives")

    def _ends(self, inputs: Inputs, target: torch.Tensor | None, rows: torch.Tensor) -> Arrays:
        starts = random_normals(self._seed, self.name, rows, self._hessians.size)[:, 0].to(self._hessians.dtype)
        ends = extreme_eigenvalues(partial(self._hessians.products, inputs, target), starts, self.iterations)
        return {
            "hessian_top_eigenvalue": ends.highest,
            "hessian_top_residual": ends.highest_residual,
            "hessian_lowest_eigenvalue": ends.lowest,
            "hessian_lowest_residual": ends.lowest_residual,
        }
