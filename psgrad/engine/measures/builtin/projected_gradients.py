"""The random projection of each sample's gradient to few numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from psgrad.engine.free_memory import free_host_memory
from psgrad.engine.gradients import PerSampleGradients
from psgrad.engine.gradients.projections.projector import Projector
from psgrad.engine.measures.measure import Arrays, Gathered, Measure, Setting
from psgrad.engine.measures.projected import COLUMN, FiniteProjections
from psgrad.errors import MeasureError

# The share of the memory that is free before a run for rows that are kept to its end.
_SHARE = 0.5
# A pass holds its rows in pieces, and then once more as a whole.
_COPIES = 2


@dataclass
class ProjectedGradients(Measure):
    """A row of few numbers for each sample, for other measures and for the detectors of outliers.

    Options:
        dimension: columns of the projection; 1 / sqrt(dimension) is the error of a cosine. If a gradient has
            no more numbers than that, nothing is projected.
        kind: 'sparse' (a few instructions for each number), 'rademacher' or 'gaussian' (`dimension` products
            for each number), or 'none', all numbers of all parameters. There is no two-sided projection: its
            error differs from layer to layer, and does not follow from the number of columns.
        save: whether the rows are written to measures/projected_gradients.safetensors, [samples, dimension].
    """

    dimension: int = 256
    kind: Literal["sparse", "rademacher", "gaussian", "none"] = "sparse"
    save: bool = False

    name: ClassVar[str] = COLUMN
    title: ClassVar[str] = "Projected gradients"
    formula: ClassVar[str] = "P g_i, with E[<P g_i, P g_j>] = <g_i, g_j>"
    unit: ClassVar[str] = "{loss} per unit of parameter"
    source: ClassVar[str] = (
        "Achlioptas: Database-friendly random projections (2003), theorem 1.1; sparse: Kane, Nelson: Sparser"
        " Johnson-Lindenstrauss transforms (2014), section 3"
    )
    cost: ClassVar[str] = (
        "one pass over the numbers of each gradient ('sparse'), or `dimension` products for each number; "
        "4 bytes x samples x dimension of memory"
    )
    needs_factors = True

    def __post_init__(self) -> None:
        if self.dimension < 1:
            raise ValueError(f"got {self.dimension} as dimension, expected at least 1 column")

    def prepare(self, setting: Setting) -> None:
        params = setting.examples.params
        self._projector = Projector(self.kind, self.dimension, setting.seed, 0, params)
        self._parameters = setting.examples.flat.size
        number = max((parameter.dtype for parameter in params.values()), key=lambda dtype: dtype.itemsize)
        each = self._projector.width * max(number.itemsize, 4)
        needed, free = _COPIES * each * len(setting), free_host_memory()
        if needed > _SHARE * free:
            fitting = int(self._projector.width * _SHARE * free / needed)
            raise MeasureError(
                f"{self.name}: {len(setting):,} rows of {self._projector.width:,} numbers take"
                f" {needed / 2**30:.3g} GiB, and {free / 2**30:.3g} GiB of memory are free",
                expected=f"at most half of the free memory: up to {fitting:,} columns",
                next_step=(
                    f"set dimension: {max(1, fitting)} or less of {self.name}"
                    if fitting
                    else "look at fewer samples (--limit), or use a machine with more memory"
                ),
            )

    def columns(self, gradients: PerSampleGradients) -> Arrays:
        return {COLUMN: self._projector(gradients)}

    def gather(self, rows: Mapping[str, torch.Tensor]) -> Gathered:
        projected = FiniteProjections.of(rows, self._parameters)
        norms = rows["grad_norm"][projected.places]
        counted = norms > 0
        squares = torch.linalg.vector_norm(projected.rows, dim=1, dtype=torch.float64)[counted].square()
        off = squares / norms[counted].square() - 1
        numbers = {
            "dimension": projected.rows.shape[1],
            "kind": "none" if projected.exact else self.kind,
            "parameters": self._parameters,
            "square_norm_error": float(off.square().mean().sqrt()) if len(off) else None,
            "expected_square_norm_error": 2**0.5 * projected.noise,
        }
        return Gathered(numbers=numbers, arrays={COLUMN: rows[COLUMN]} if self.save else {})
