"""The trace of the Hessian of each sample's loss, by random probes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from psgrad.engine.gradients.streaming import Columns
from psgrad.engine.measures.hessians import SampleHessians
from psgrad.engine.measures.measure import Arrays, Measure, OwnPass, Setting
from psgrad.engine.measures.row_passes import Inputs, random_signs, refusing, row_pass

# Probes that share a pass: more only take more memory.
_AT_ONCE = 8


@dataclass
class HessianTrace(Measure):
    """Estimated by Hutchinson's method: the mean of z'Hz over vectors z of random signs, drawn for each sample from the number of its row.

    If a model has no more parameters than there are probes, unit vectors are used instead, and the trace is exact. A negative trace says
    that the loss curves downwards in more directions, or more strongly, than upwards.

    Options:
        probes: random vectors for each sample, at least 2. The standard error is divided by the square root of their number.
    """

    probes: int = 32

    name: ClassVar[str] = "hessian_trace"
    title: ClassVar[str] = "Trace of the Hessian"
    formula: ClassVar[str] = "tr(d2 l / d theta2), estimated as mean_j z_j' H z_j with z_j of random signs"
    unit: ClassVar[str] = "{loss} per squared unit of parameter, summed over the parameters"
    source: ClassVar[str] = (
        "Hutchinson: A stochastic estimator of the trace of the influence matrix for Laplacian smoothing splines (1990), section 2; "
        "for networks: Yao et al.: PyHessian (2020), section 3.2"
    )
    cost: ClassVar[str] = "a pass of its own; for each probe about three times the pass for gradients"
    meanings: ClassVar[dict[str, str]] = {
        "hessian_trace": "sum of the curvatures of the sample's loss along all parameters ({loss} per squared unit of parameter)",
        "hessian_trace_error": "standard error of hessian_trace over the probes, 0 if it is exact (the same unit)",
    }

    def __post_init__(self) -> None:
        if self.probes < 2:
            raise ValueError(f"got {self.probes} probes, expected at least 2: one alone has no standard error")

    def prepare(self, setting: Setting) -> None:
        self._examples, self._seed = setting.examples, setting.seed
        self._hessians = SampleHessians(setting.examples)
        self._exact = self._hessians.size <= self.probes

    def passes(self) -> Sequence[OwnPass]:
        return [OwnPass("hessian-trace", self._run)]

    def _run(self, start: int, chunk_size: int) -> Iterator[Columns]:
        size = self._hessians.chunk_size(chunk_size, min(_AT_ONCE, self.probes))
        return refusing(self, row_pass(self._examples, self._traces, size, start), "second derivatives")

    def _traces(self, inputs: Inputs, target: torch.Tensor | None, rows: torch.Tensor) -> Arrays:
        found = torch.cat([self._along(inputs, target, rows, first) for first in range(0, self._count, _AT_ONCE)], dim=1)
        if self._exact:
            return {"hessian_trace": found.sum(1), "hessian_trace_error": 0 * found.sum(1)}
        return {"hessian_trace": found.mean(1), "hessian_trace_error": found.std(1) / math.sqrt(self.probes)}

    @property
    def _count(self) -> int:
        return self._hessians.size if self._exact else self.probes

    def _along(self, inputs: Inputs, target: torch.Tensor | None, rows: torch.Tensor, first: int) -> torch.Tensor:
        """[k, m] float64: z'Hz for the probes number first, first + 1, ..."""
        size, count = self._hessians.size, min(_AT_ONCE, self._count - first)
        if self._exact:
            unit = torch.eye(size, device=rows.device)[first : first + count]
            probes = unit.expand(len(rows), count, size)
        else:
            probes = random_signs(self._seed, self.name, rows, size, first, count)
        return (self._hessians.products(inputs, target, probes).double() * probes).sum(2)
