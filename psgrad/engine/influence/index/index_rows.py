"""Training gradients as rows of k numbers: how they are computed, and the interface that methods on rows use.

For TRAK a row is the gradient of the margin: the model's output as one number that the loss is a function of.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import torch

from psgrad.engine.execution.chunk_replay import replayable
from psgrad.engine.execution.examples import Examples
from psgrad.engine.execution.ranks import Arrays, Processes
from psgrad.engine.gradients import (
    PerSampleGradients,
    ProjectedGradients,
    SquareNorms,
    per_sample_projections,
)
from psgrad.engine.gradients.projections.projector import Projector
from psgrad.engine.transforms import grad_and_value
from psgrad.errors import InfluenceError

# The relative, squared part of the loss's slope that the margin may leave unexplained.
_UNEXPLAINED = 1e-4


def margin(output: Any, target: Any) -> torch.Tensor:
    """f of one sample: of logits [c] and a label, z_y - logsumexp(z without y), the log odds of the label; of
    one number, that number.

    Park et al., "TRAK: Attributing Model Behavior at Scale" (2023), section 3. A label outside the classes
    (one to ignore) has margin zero everywhere, and no gradient.

    Raises InfluenceError for any other output.
    """
    if not isinstance(output, torch.Tensor):
        raise _no_margin(f"the model returned an object of type {type(output).__name__}")
    if output.numel() == 1:
        return output.sum()
    if (
        output.dim() != 1
        or not isinstance(target, torch.Tensor)
        or target.numel() != 1
        or target.is_floating_point()
    ):
        of = (
            f" and a {str(target.dtype).removeprefix('torch.')} target {list(target.shape)}"
            if isinstance(target, torch.Tensor)
            else ""
        )
        raise _no_margin(f"one sample has an output {list(output.shape)}{of}")
    here = torch.arange(len(output), device=output.device) == target.reshape(())
    odds = (output * here).sum() - output.masked_fill(here, -torch.inf).logsumexp(0)
    return odds * here.any()


def _no_margin(arrived: str) -> InfluenceError:
    return InfluenceError(
        f"TRAK has no margin here: {arrived}; expected logits [classes] with one label, or one number",
        hint="choose another method, such as influence or ekfac",
    )


def with_margin(examples: Examples) -> Examples:
    """The same rows, differentiated by their margin; the `aux` of each has `loss`, `weight`, `slope`,
    `unexplained` [] float64.

    weight: -dl/df, for a cross entropy 1 - p_y, so that the gradient of the loss is -weight * the gradient of
    the margin. It is found from the slopes of loss and margin in the model's output; unexplained: the square
    of what is left of the loss's slope, whose square is `slope`. All is computed in float64: p_y rounds to
    one in float32 where a sample is learnt.
    """
    criterion = examples.objective.criterion

    def summary(output: torch.Tensor, target: Any) -> dict[str, torch.Tensor]:
        z = output.double()
        slope, loss = _slope(criterion, z, target)
        rise, _ = _slope(margin, z, target)
        square = rise.square().sum()
        weight = -(slope * rise).sum() / torch.where(square > 0, square, torch.ones_like(square))
        return {
            "loss": loss,
            "weight": weight,
            "slope": slope.square().sum(),
            "unexplained": (slope + weight * rise).square().sum(),
        }

    return replace(examples, objective=examples.objective.with_scalar(margin, summary))


def _slope(
    function: Callable[[Any, Any], torch.Tensor], output: torch.Tensor, target: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    gradient_and_value: tuple[torch.Tensor, torch.Tensor] = grad_and_value(lambda z: function(z, target))(
        output
    )
    return gradient_and_value


def require_explained(aux: dict[str, torch.Tensor], numbers: torch.Tensor) -> None:
    """Raises InfluenceError unless the loss of these samples, rows `numbers` [k], is a function of their
    margin alone.
    """
    rest, slope = aux["unexplained"], aux["slope"]
    wrong = rest > _UNEXPLAINED * slope + torch.finfo(torch.float64).eps
    if bool(wrong.any()):
        row = int(wrong.nonzero()[0])
        raise InfluenceError(
            f"TRAK: the loss of row {int(numbers[row])} is no function of its margin, which leaves"
            f" {(rest / slope).sqrt()[row].item():.0%} of its slope, as with label smoothing",
            hint="choose another method, such as influence or ekfac",
        )


Differentiated = Literal["loss", "margin"]  # what was differentiated
# Numbers of a block that is read or multiplied at once.
BLOCK = 1 << 22


@dataclass(frozen=True)
class RowBlock:
    """The rows start, ..., stop - 1, on the CPU.

    rows: [b, k], P times the gradient of the loss or of the margin; zeros where a gradient is not finite.
    loss, square_norm: [b] float64, of the loss and its whole gradient; NaN where a gradient is not finite.
    weight: [b] float64, -dl/df: the gradient of the loss is that of the margin times -weight; None for rows
    of the loss.
    """

    start: int
    stop: int
    rows: torch.Tensor
    loss: torch.Tensor
    square_norm: torch.Tensor
    weight: torch.Tensor | None = None

    @property
    def to_loss(self) -> torch.Tensor:
        """[b] float64: the factor by which a row becomes that of the loss."""
        return torch.ones(len(self.rows), dtype=torch.float64) if self.weight is None else -self.weight

    @property
    def finite(self) -> torch.Tensor:
        """[b] bool."""
        return self.square_norm.isfinite()


class RowSource(Protocol):
    """All n training examples' rows at one checkpoint, in any storage.

    of: what was differentiated. projector: how.
    """

    of: Differentiated
    projector: Projector

    def __len__(self) -> int: ...

    @property
    def finite(self) -> int:
        """How many rows have a finite gradient; second moments are sums over these."""

    def blocks(self, first: int = 0, step: int = 1) -> Iterator[RowBlock]:
        """The rows in order, some at a time: of all blocks number `first`, `first + step`, ..."""

    def losses_and_square_norms(self) -> tuple[torch.Tensor, torch.Tensor]:
        """[n] float64 both, of whole gradients of the loss, NaN where one is not finite."""

    def moment(self, of: Differentiated) -> torch.Tensor:
        """[k, k] float64: the sum over the rows of P g g' P', g the gradient of the loss or of the margin."""


class RowPass:
    """The rows of examples, chunk by chunk.

    of: what is differentiated. source: the examples as they are differentiated.
    """

    def __init__(self, examples: Examples, projector: Projector, of: Differentiated) -> None:
        self.projector, self.of = projector, of
        self.source = with_margin(examples) if of == "margin" else examples

    def blocks(self, start: int = 0, stop: int | None = None) -> Iterator[RowBlock]:
        """The blocks of the examples start, ..., stop - 1 (to the last one if None), in one pass.

        Raises InfluenceError where `of` is 'margin' and the loss is not a function of a margin.
        """
        for place, columns in self._columns(start, stop):
            weight = columns.get("weight")
            if weight is not None:
                numbers = self.source.numbers_of(torch.arange(place.start, place.stop))
                require_explained(columns, numbers)
                columns["square_norm"] = columns["square_norm"] * weight.square()
            rows = columns["rows"]
            finite = rows.isfinite().all(1) & columns["square_norm"].isfinite() & columns["loss"].isfinite()
            values: dict[str, Any] = {
                name: columns[name].where(finite, torch.nan) for name in ("loss", "square_norm")
            }
            if weight is not None:
                values["weight"] = weight.where(finite, 0.0)
            rows = rows.where(finite.unsqueeze(1), torch.zeros((), dtype=rows.dtype))
            yield RowBlock(place.start, place.stop, rows, **values)

    def _columns(self, start: int, stop: int | None) -> Iterator[tuple[slice, dict[str, torch.Tensor]]]:
        """The columns of each chunk; where memory is short, no more than one parameter's gradient is kept."""
        projection, recompute = self.projector.projection, self.source.stream.recompute
        if projection is None or recompute is None or not recompute.on:
            return self.source.each(self._projected, start, stop)
        return self.source.each(self._of_one_pass, start, stop, self._projections)

    @replayable("rows")
    def _projections(self, *arguments: Any, **options: Any) -> ProjectedGradients:
        assert self.projector.projection is not None
        return per_sample_projections(*arguments, projection=self.projector.projection, **options)

    def _projected(self, gradients: PerSampleGradients) -> dict[str, torch.Tensor]:
        return self._with_loss(self.projector(gradients), gradients)

    def _of_one_pass(self, found: ProjectedGradients) -> dict[str, torch.Tensor]:
        return self._with_loss(found.rows, found.norms)

    def _with_loss(
        self, rows: torch.Tensor, gradients: PerSampleGradients | SquareNorms
    ) -> dict[str, torch.Tensor]:
        more = gradients.aux if self.of == "margin" else {"loss": gradients.losses.double()}
        return {"rows": rows, "square_norm": gradients.square_norms(), **more}


class RowsInMemory:
    """The rows of a training set, kept as they were made: n * k numbers."""

    def __init__(self, examples: Examples, projector: Projector, of: Differentiated) -> None:
        self.projector, self.of, self._processes = projector, of, examples.processes
        self._blocks = list(RowPass(examples, projector, of).blocks())
        self._count = len(examples)
        self._moments: dict[Differentiated, torch.Tensor] = {}

    def __len__(self) -> int:
        return self._count

    @property
    def finite(self) -> int:
        return sum(int(block.finite.sum()) for block in self._blocks)

    def blocks(self, first: int = 0, step: int = 1) -> Iterator[RowBlock]:
        return iter(self._blocks[first::step])

    def losses_and_square_norms(self) -> tuple[torch.Tensor, torch.Tensor]:
        losses, squares = ([getattr(b, name) for b in self._blocks] for name in ("loss", "square_norm"))
        return torch.cat(losses), torch.cat(squares)

    def moment(self, of: Differentiated) -> torch.Tensor:
        if not self._moments:
            self._moments = moments(self, self._processes)
        return self._moments[of]


def moments(source: RowSource, processes: Processes) -> dict[Differentiated, torch.Tensor]:
    """The sum over the rows of P g g' P' [k, k] float64, for the gradients of the loss, and of the margin
    where the rows are of that. Each process sums over its share of the blocks.

    Raises InfluenceError where no row is finite.
    """
    k = source.projector.width
    kinds: tuple[Differentiated, ...] = ("loss", "margin") if source.of == "margin" else ("loss",)
    result: Arrays = {kind: torch.zeros(k, k, dtype=torch.float64) for kind in kinds}
    result["finite"] = torch.tensor(0)

    def own() -> None:
        for block in source.blocks(processes.rank, processes.size):
            rows = block.rows.double()
            result["finite"] += block.finite.sum()
            if source.of == "margin":
                result["margin"].addmm_(rows.t(), rows)
                rows = rows * block.to_loss.unsqueeze(1)
            result["loss"].addmm_(rows.t(), rows)

    def add(other: Arrays) -> None:
        for kind, value in other.items():
            result[kind] += value

    processes.together("second moments", own)
    whole = processes.reduce("second moments", lambda: result, add)
    if not int(whole["finite"]):
        raise InfluenceError(
            "no training example has a finite gradient",
            hint="look at the data and the checkpoint",
        )
    return {kind: whole[kind] for kind in kinds}
