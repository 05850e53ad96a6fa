"""A pass of a measure's own: something computed of each chunk of samples by a function that knows which rows they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from psgrad.engine.examples import Examples
from psgrad.engine.gradients.loading import Batch
from psgrad.engine.gradients.projections.entries import key_of, normals, signs, streams, words_at
from psgrad.engine.gradients.streaming import Columns, Stream
from psgrad.engine.measures.measure import Arrays, Measure
from psgrad.engine.objective import Objective
from psgrad.errors import MeasureError, TransformError

Inputs = tuple[torch.Tensor, ...]
Ask = Callable[[Inputs, torch.Tensor | None, torch.Tensor], Arrays]
"""(inputs, each [k, ...], target [k, ...] or None, rows [k] int64) to name -> [k, ...]."""


def plain_objective(examples: Examples) -> Objective:
    """The model and the loss of these examples, without what measures keep of outputs."""
    return examples.with_scalar(examples.objective.criterion).objective


def row_pass(examples: Examples, ask: Ask, chunk_size: int, start: int) -> Iterator[Columns]:
    """What `ask` says of the rows start, ..., n - 1, `chunk_size` at a time, fewer where memory runs out. Raises what Stream.run does."""
    objective = plain_objective(examples)
    options = {**examples.options, "chunk_size": chunk_size, "memory": None, "capture": "off", "compile": "none"}
    loss = _WithoutRows(objective)
    stream = Stream(loss, examples.params, lambda first, stop: _numbered(examples.read(first, stop), first, stop), **options)

    def way(loss: Any, params: Any, inputs: Inputs, target: torch.Tensor | None, **_: Any) -> Arrays:
        return ask(inputs[:-1], target, inputs[-1])

    return stream.run(len(examples), [_AsTheyAre()], way, start)


def refusing(measure: Measure, columns: Iterator[Columns], needs: str) -> Iterator[Columns]:
    """The same columns; MeasureError where the model can't be transformed as the measure needs it."""
    try:
        yield from columns
    except TransformError as error:
        raise MeasureError(
            f"the measure {measure.name} needs {needs}, which can't be had of this model: {error.arrived}",
            expected=error.expected,
            cause=error.cause,
            next_step=f"take {measure.name} out of analyze.measures" + (f"; or: {error.next_step}" if error.next_step else ""),
        ) from error


def random_signs(seed: int, name: str, rows: torch.Tensor, size: int, first: int = 0, count: int = 1) -> torch.Tensor:
    """[k, count, size] of -1 and 1, float32: the vectors number first, first + 1, ... of each row, whatever the other rows are."""
    return _random(signs, 64, seed, name, rows, size, first, count)


def random_normals(seed: int, name: str, rows: torch.Tensor, size: int, first: int = 0, count: int = 1) -> torch.Tensor:
    """[k, count, size] standard normal numbers, float32, of 16 bits each; as `random_signs`."""
    return _random(normals, 4, seed, name, rows, size, first, count)


def _random(
    made: Callable[[torch.Tensor], torch.Tensor], per_word: int, seed: int, name: str, rows: torch.Tensor, size: int, first: int, count: int
) -> torch.Tensor:
    words = -(-size // per_word)
    numbers = torch.arange(first * words, (first + count) * words, device=rows.device)
    some = words_at(streams(key_of(seed, name), rows).unsqueeze(1), numbers)
    return made(some.view(-1, words)).view(len(rows), count, words * per_word)[..., :size]


class _WithoutRows:
    """The loss of one sample whose last input is its row's number."""

    def __init__(self, objective: Objective) -> None:
        self.objective = objective

    def __call__(self, params: Any, inputs: Inputs, target: Any) -> Any:
        return self.objective.loss(params, inputs[:-1], target)


@dataclass(frozen=True)
class _Numbered:
    inputs: Inputs
    target: torch.Tensor | None


def _numbered(batch: Batch, start: int, stop: int) -> _Numbered:
    return _Numbered((*batch.inputs, torch.arange(start, stop)), batch.target)


class _AsTheyAre:
    """A measure whose columns were computed on the way."""

    needs_factors = True

    def columns(self, found: Arrays) -> Arrays:
        return found

    def keep(self) -> None:
        """Nothing is gathered."""
