"""Training gradients as rows of k numbers: how they are made, and what their methods ask of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, Protocol

import torch

from psgrad.engine.examples import Examples
from psgrad.engine.gradients import PerSampleGradients
from psgrad.engine.influence.index.margin import require_explained, with_margin
from psgrad.engine.influence.index.projector import Projector
from psgrad.errors import InfluenceError

Of = Literal["loss", "margin"]  # what was differentiated
# Numbers of a block that is read or multiplied at once.
BLOCK = 1 << 22


@dataclass(frozen=True)
class RowBlock:
    """The rows start, ..., stop - 1, on the CPU.

    rows: [b, k], P times the gradient of the loss or of the margin; zeros where a gradient is not finite. loss, square_norm: [b]
    float64, of the loss and its whole gradient; NaN where a gradient is not finite. weight: [b] float64, -dl/df: the gradient of the
    loss is that of the margin times -weight; None for rows of the loss.
    """

    start: int
    stop: int
    rows: torch.Tensor
    loss: torch.Tensor
    square_norm: torch.Tensor
    weight: torch.Tensor | None = None

    @property
    def to_loss(self) -> torch.Tensor:
        """[b] float64: what a row is multiplied by to be that of the loss."""
        return torch.ones(len(self.rows), dtype=torch.float64) if self.weight is None else -self.weight

    def cut(self, stop: int) -> tuple[RowBlock, RowBlock | None]:
        """The rows before `stop`, and the others; None where there are none."""
        if stop >= self.stop:
            return self, None
        return self._part(self.start, stop), self._part(stop, self.stop)

    def _part(self, start: int, stop: int) -> RowBlock:
        here = slice(start - self.start, stop - self.start)
        weight = None if self.weight is None else self.weight[here]
        return RowBlock(start, stop, self.rows[here], self.loss[here], self.square_norm[here], weight)

    @property
    def finite(self) -> torch.Tensor:
        """[b] bool."""
        return self.square_norm.isfinite()


class RowSource(Protocol):
    """All n training examples' rows at one checkpoint, however they are kept.

    of: what was differentiated. projector: how.
    """

    of: Of
    projector: Projector

    def __len__(self) -> int: ...

    @property
    def finite(self) -> int:
        """How many rows have a finite gradient, which is what second moments are sums over."""

    def blocks(self) -> Iterator[RowBlock]:
        """All rows, in order, some at a time."""

    def moment(self, of: Of) -> torch.Tensor:
        """[k, k] float64: the sum over the rows of P g g' P', g the gradient of the loss or of the margin."""


def projected_rows(examples: Examples, projector: Projector, of: Of, start: int = 0) -> Iterator[RowBlock]:
    """The rows of examples start, ..., n - 1, chunk by chunk, in one pass.

    Raises InfluenceError where `of` is 'margin' and the loss is no function of one.
    """

    def both(gradients: PerSampleGradients) -> dict[str, torch.Tensor]:
        found = {"rows": projector(gradients), "square_norm": gradients.square_norms()}
        return {**found, **(gradients.aux if of == "margin" else {"loss": gradients.losses.double()})}

    source = with_margin(examples) if of == "margin" else examples
    for place, found in source.each(both, start):
        weight = found.get("weight")
        if weight is not None:
            require_explained(found, examples.numbers_of(torch.arange(place.start, place.stop)))
            found["square_norm"] = found["square_norm"] * weight.square()
        finite = found["rows"].isfinite().all(1) & found["square_norm"].isfinite() & found["loss"].isfinite()
        values: dict[str, Any] = {name: found[name].where(finite, torch.nan) for name in ("loss", "square_norm")}
        if weight is not None:
            values["weight"] = weight.where(finite, 0.0)
        rows = found["rows"].where(finite.unsqueeze(1), torch.zeros((), dtype=found["rows"].dtype))
        yield RowBlock(place.start, place.stop, rows, **values)


class RowsInMemory:
    """The rows of a training set, kept as they were made: n * k numbers."""

    def __init__(self, examples: Examples, projector: Projector, of: Of) -> None:
        self.projector, self.of = projector, of
        self._blocks = list(projected_rows(examples, projector, of))
        self._count = len(examples)

    def __len__(self) -> int:
        return self._count

    @property
    def finite(self) -> int:
        return sum(int(block.finite.sum()) for block in self._blocks)

    def blocks(self) -> Iterator[RowBlock]:
        return iter(self._blocks)

    def moment(self, of: Of) -> torch.Tensor:
        return self._moments[of]

    @cached_property
    def _moments(self) -> dict[Of, torch.Tensor]:
        return moments(self)


def moments(source: RowSource) -> dict[Of, torch.Tensor]:
    """The sum over the rows of P g g' P' [k, k] float64, for the gradients of the loss, and of the margin where the rows are of that.

    Raises InfluenceError where no row is finite.
    """
    k = source.projector.width
    found: dict[Of, torch.Tensor] = {"loss": torch.zeros(k, k, dtype=torch.float64)}
    if source.of == "margin":
        found["margin"] = torch.zeros(k, k, dtype=torch.float64)
    some = False
    for block in source.blocks():
        rows = block.rows.double()
        some |= bool(block.finite.any())
        if source.of == "margin":
            found["margin"].addmm_(rows.t(), rows)
            rows = rows * block.to_loss.unsqueeze(1)
        found["loss"].addmm_(rows.t(), rows)
    if not some:
        raise InfluenceError("no training example has a finite gradient", next_step="look at the data and the checkpoint")
    return found
