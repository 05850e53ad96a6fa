"""Measures of the Hessian of each sample's loss: the ends of its spectrum, by Lanczos, and its trace, by
random probes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch

from psgrad.engine.execution.streaming import Columns
from psgrad.engine.measures.hessians import SampleHessians, extreme_eigenvalues
from psgrad.engine.measures.measure import Arrays, Measure, OwnPass, Setting
from psgrad.engine.measures.passes import Inputs, random_normals, random_signs, refusing, row_pass


@dataclass
class HessianTopEigenvalue(Measure):
    """The largest eigenvalue with its sign, as in work on sharpness, not the largest magnitude. The same
    iterations give the lowest one; the largest magnitude is the larger of both. The first vector is drawn for
    each sample from the number of its row.

    A Ritz value never exceeds the largest eigenvalue (except for rounding). An eigenvalue lies within the
    residual of it. If the residual is large compared with the value, more iterations are needed.

    Options:
        iterations: Lanczos steps for each sample, at least 2: products with its Hessian, and vectors that are
            kept.
    """

    iterations: int = 20

    name: ClassVar[str] = "hessian_top_eigenvalue"
    title: ClassVar[str] = "Largest eigenvalue of the Hessian"
    formula: ClassVar[str] = (
        "max_v v' (d2 l / d theta2) v over unit vectors v, by Lanczos with full reorthogonalisation"
    )
    unit: ClassVar[str] = "{loss} per squared unit of parameter"
    source: ClassVar[str] = (
        "Lanczos iteration: Parlett, The Symmetric Eigenvalue Problem (1998), chapter 13, residual bound"
        " theorem 4.5.1; as sharpness: Cohen et al.: Gradient Descent on Neural Networks Typically Occurs at"
        " the Edge of Stability (2021), section 2"
    )
    cost: ClassVar[str] = (
        "a pass of its own; for each iteration about three times the pass for gradients; iterations x p"
        " numbers are kept for each sample"
    )
    meanings: ClassVar[dict[str, str]] = {
        "hessian_top_eigenvalue": (
            "largest curvature of the sample's loss in any direction ({loss} per squared unit of parameter)"
        ),
        "hessian_top_residual": (
            "within this distance of hessian_top_eigenvalue lies an eigenvalue of the Hessian (the same unit)"
        ),
        "hessian_lowest_eigenvalue": "lowest curvature in any direction, mostly negative (the same unit)",
        "hessian_lowest_residual": (
            "within this distance of hessian_lowest_eigenvalue lies an eigenvalue of the Hessian (the same"
            " unit)"
        ),
    }

    def __post_init__(self) -> None:
        if self.iterations < 2:
            raise ValueError(
                f"got {self.iterations} iterations, expected at least 2: one tells nothing of the ends of a"
                " spectrum"
            )

    def prepare(self, setting: Setting) -> None:
        self._examples, self._seed = setting.examples, setting.seed
        self._hessians = SampleHessians(setting.examples)

    def passes(self) -> Sequence[OwnPass]:
        return [OwnPass("hessian-top-eigenvalue", self._run)]

    def _run(self, rows: range, chunk_size: int) -> Iterator[Columns]:
        size = self._hessians.chunk_size(chunk_size, vectors=1, kept=self.iterations + 4)
        return refusing(self, row_pass(self._examples, self._ends, size, rows), "second derivatives")

    def _ends(self, inputs: Inputs, target: torch.Tensor | None, rows: torch.Tensor) -> Arrays:
        starts = random_normals(self._seed, self.name, rows, self._hessians.size)[:, 0].to(
            self._hessians.dtype
        )
        ends = extreme_eigenvalues(partial(self._hessians.products, inputs, target), starts, self.iterations)
        return {
            "hessian_top_eigenvalue": ends.highest,
            "hessian_top_residual": ends.highest_residual,
            "hessian_lowest_eigenvalue": ends.lowest,
            "hessian_lowest_residual": ends.lowest_residual,
        }


# Probes that share a pass: more only take more memory.
_AT_ONCE = 8


@dataclass
class HessianTrace(Measure):
    """Estimated by Hutchinson's method: the mean of z'Hz over vectors z of random signs, drawn for each
    sample from the number of its row.

    If a model has no more parameters than there are probes, unit vectors are used instead, and the trace is
    exact. A negative trace says that the loss curves downwards in more directions, or more strongly, than
    upwards.

    Options:
        probes: random vectors for each sample, at least 2. The standard error is divided by the square root
            of their number.
    """

    probes: int = 32

    name: ClassVar[str] = "hessian_trace"
    title: ClassVar[str] = "Trace of the Hessian"
    formula: ClassVar[str] = "tr(d2 l / d theta2), estimated as mean_j z_j' H z_j with z_j of random signs"
    unit: ClassVar[str] = "{loss} per squared unit of parameter, summed over the parameters"
    source: ClassVar[str] = (
        "Hutchinson: A stochastic estimator of the trace of the influence matrix for Laplacian smoothing"
        " splines (1990), section 2; for networks: Yao et al.: PyHessian (2020), section 3.2"
    )
    cost: ClassVar[str] = "a pass of its own; for each probe about three times the pass for gradients"
    meanings: ClassVar[dict[str, str]] = {
        "hessian_trace": (
            "sum of the curvatures of the sample's loss along all parameters ({loss} per squared unit of"
            " parameter)"
        ),
        "hessian_trace_error": (
            "standard error of hessian_trace over the probes, 0 if it is exact (the same unit)"
        ),
    }

    def __post_init__(self) -> None:
        if self.probes < 2:
            raise ValueError(
                f"got {self.probes} probes, expected at least 2: one alone has no standard error"
            )

    def prepare(self, setting: Setting) -> None:
        self._examples, self._seed = setting.examples, setting.seed
        self._hessians = SampleHessians(setting.examples)
        self._exact = self._hessians.size <= self.probes

    def passes(self) -> Sequence[OwnPass]:
        return [OwnPass("hessian-trace", self._run)]

    def _run(self, rows: range, chunk_size: int) -> Iterator[Columns]:
        size = self._hessians.chunk_size(chunk_size, min(_AT_ONCE, self.probes))
        return refusing(self, row_pass(self._examples, self._traces, size, rows), "second derivatives")

    def _traces(self, inputs: Inputs, target: torch.Tensor | None, rows: torch.Tensor) -> Arrays:
        estimates = torch.cat(
            [self._along(inputs, target, rows, first) for first in range(0, self._count, _AT_ONCE)], dim=1
        )
        if self._exact:
            return {"hessian_trace": estimates.sum(1), "hessian_trace_error": 0 * estimates.sum(1)}
        return {
            "hessian_trace": estimates.mean(1),
            "hessian_trace_error": estimates.std(1) / math.sqrt(self.probes),
        }

    @property
    def _count(self) -> int:
        return self._hessians.size if self._exact else self.probes

    def _along(
        self, inputs: Inputs, target: torch.Tensor | None, rows: torch.Tensor, first: int
    ) -> torch.Tensor:
        """[k, m] float64: z'Hz for the probes number first, first + 1, ..."""
        size, count = self._hessians.size, min(_AT_ONCE, self._count - first)
        if self._exact:
            unit = torch.eye(size, device=rows.device)[first : first + count]
            probes = unit.expand(len(rows), count, size)
        else:
            probes = random_signs(self._seed, self.name, rows, size, first, count)
        return (self._hessians.products(inputs, target, probes).double() * probes).sum(2)
