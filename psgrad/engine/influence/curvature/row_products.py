"""Products with a Gauss-Newton matrix or an empirical Fisher from its rows, computed once and kept: G v = sum over rows of j (j'v) / n.

No product runs the model again. What is kept are factors, or rows written out where products with those are less work (row_blocks.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from psgrad.engine.examples import Examples
from psgrad.engine.flat import Flat
from psgrad.engine.gradients import PerSampleGradients
from psgrad.engine.gradients.memory import free_memory
from psgrad.engine.gradients.terms.base import block_bytes
from psgrad.engine.influence.curvature.products import CurvatureProducts
from psgrad.engine.influence.curvature.row_blocks import Part, part_of
from psgrad.engine.influence.curvature.rows import gauss_newton_rows
from psgrad.errors import InfluenceError

Rows = Mapping[str, Part]

# Intermediates of a product, as a multiple of the block size of the device: its matrices want to be large.
_BLOCKS = 8
# Of the free memory, what rows may take.
_SHARE = 3


class RowProducts(CurvatureProducts):
    """Products with the mean over n samples of sums of j j' over each one's rows j, plus a weight decay.

    Args:
        flat: the order of the parameters. count: n.
        chunks: of each chunk of samples the rows in each parameter; one in which all rows are zero is left out.
        weight_decay: what is added to the diagonal.
    """

    how = "rows kept"

    def __init__(self, flat: Flat, count: int, chunks: list[Rows], weight_decay: float = 0.0) -> None:
        super().__init__(flat, count, weight_decay)
        self.chunks = chunks

    @classmethod
    def of(cls, training: Examples, curvature: str, weight_decay: float = 0.0) -> RowProducts | None:
        """Those of a training set's 'gauss_newton' or 'fisher'; None where the rows don't fit in memory.

        Raises InfluenceError where the loss is not convex in the output.
        """
        source: Examples
        budget = free_memory(training.device) // _SHARE
        if curvature == "gauss_newton":
            try:
                exact = gauss_newton_rows(training)
            except InfluenceError:  # the output is large, or no tensor
                return None
            source, rows = replace(exact, settle=False), exact.per_sample
        else:
            source, rows = training, 1
        if rows * training.flat.size * next(iter(training.params.values())).element_size() > budget:
            return None
        found: list[Rows] = []

        def keep(gradients: PerSampleGradients) -> dict[str, torch.Tensor]:
            parts = {name: part_of(gradient, rows) for name, gradient in gradients.gradients.items() if gradient.terms}
            found.append(_without_zeros(parts))
            return {}

        chunks: list[Rows] = []
        kept = 0
        for done, _ in source.each(keep):
            chunks.append(found.pop())
            found.clear()  # of attempts that ran out of memory
            kept += sum(part.bytes for part in chunks[-1].values())
            if kept * len(source) > budget * done.stop:
                return None
        return cls(training.flat, len(training), chunks, weight_decay)

    def apply(self, block: torch.Tensor) -> torch.Tensor:
        vectors = block.double().t()
        parts = {(name, part.form): part for rows in self.chunks for name, part in rows.items()}  # chunks may differ in the form
        arranged = {(name, form): part.arrange(vectors[self.flat.columns[name]]) for (name, form), part in parts.items()}
        totals = {kind: torch.zeros_like(value) for kind, value in arranged.items()}
        for rows in self.chunks:
            for samples in _pieces(rows, vectors):
                along = torch.stack([part.inner(arranged[name, part.form], samples) for name, part in rows.items()]).sum(0)
                for name, part in rows.items():
                    part.add_back(totals[name, part.form], along, samples)
        result = self.weight_decay * vectors
        for (name, form), total in totals.items():
            result[self.flat.columns[name]] += parts[name, form].restore(total) / self.count
        return result.t()

    def mean_eigenvalue(self) -> tuple[float, float]:
        return float(self.diagonal().mean()) - self.weight_decay, 0.0

    def diagonal(self) -> torch.Tensor:
        total = torch.full((self.flat.size,), self.weight_decay, dtype=torch.float64)
        for rows in self.chunks:
            for name, part in rows.items():
                total[self.flat.columns[name]] += part.diagonal().reshape(-1).cpu() / self.count
        return total


def _without_zeros(rows: Rows) -> Rows:
    """The same without those that are zero for all samples: a softmax's curvature has one eigenvalue of zero."""
    if not rows:
        return rows
    alive = torch.stack([part.alive() for part in rows.values()]).any(0)
    if not bool(alive.any()):  # samples to be ignored, all of them
        return {}
    return rows if bool(alive.all()) else {name: part.only(alive) for name, part in rows.items()}


def _pieces(rows: Rows, vectors: torch.Tensor) -> list[slice]:
    """The samples of a chunk, as slices whose intermediates of a product with vectors [p, k] are of a good size."""
    count = max((part.samples for part in rows.values()), default=0)
    room = vectors.element_size() * sum(part.room(vectors.shape[1]) for part in rows.values())
    step = max(1, _BLOCKS * block_bytes(vectors.device) // max(room, 1))
    return [slice(start, min(start + step, count)) for start in range(0, count, step)]
