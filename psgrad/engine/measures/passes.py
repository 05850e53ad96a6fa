"""Passes over the samples after the first one: the second pass of measures that compare each sample with all,
and the pass of a single measure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from psgrad.engine.execution.chunk_measure import Columns
from psgrad.engine.execution.examples import Examples, QueryColumns
from psgrad.engine.execution.loading import ChangedRows, numbered
from psgrad.engine.execution.objective import Objective
from psgrad.engine.execution.streaming import Stream
from psgrad.engine.gradients.projections.projection import key_of, normals, signs, streams, words_at
from psgrad.engine.measures.measure import Arrays, Measure, OwnPass
from psgrad.errors import MeasureError, TransformError, one_line


def second_pass(measures: Sequence[Measure], examples: Examples) -> OwnPass:
    """The pass in which measures that compare each sample with all compute columns of its gradient again."""
    again = [QueryColumns(measure.columns_again, measure.needs_factors) for measure in measures]

    def run(rows: range, chunk_size: int) -> Iterator[Columns]:
        stream = examples.sized(chunk_size).stream
        return stream.run(rows.stop, again, start=rows.start, materialise=True)

    return OwnPass("samples-again", run)


Inputs = tuple[torch.Tensor, ...]
Ask = Callable[[Inputs, torch.Tensor | None, torch.Tensor], Arrays]
"""(inputs, each [k, ...], target [k, ...] or None, rows [k] int64) to name -> [k, ...]."""


def plain_objective(examples: Examples) -> Objective:
    """The model and the loss of these examples, without what measures keep of outputs."""
    return examples.objective.with_summary(None)


def row_pass(examples: Examples, ask: Ask, chunk_size: int, rows: range) -> Iterator[Columns]:
    """The columns of `ask` for these rows, `chunk_size` at a time, fewer if memory runs out. Raises what
    Stream.run does.

    Rows that differ in length are passed without padding, as the result may be about positions.
    """
    objective = plain_objective(examples)
    options = {
        **examples.options,
        "chunk_size": chunk_size,
        "memory": None,
        "capture": "off",
        "counts": None,  # they are not the run's chunks
    }
    unpadded = ChangedRows(numbered(examples.rows), lambda block, _: block.without_padding())
    stream = Stream(objective.loss_of_numbered, examples.params, unpadded, **options)

    def compute(loss: Any, params: Any, inputs: Inputs, target: torch.Tensor | None, **_: Any) -> Arrays:
        return ask(inputs[:-1], target, inputs[-1])

    return stream.run(rows.stop, [QueryColumns(lambda found: found)], compute, rows.start)


def refusing(measure: Measure, columns: Iterator[Columns], needs: str) -> Iterator[Columns]:
    """`columns`, with a MeasureError where the model can't be transformed as the measure needs it."""
    try:
        yield from columns
    except TransformError as error:
        raise MeasureError(
            f"the measure {measure.name} needs {needs}, which this model does not give: {error.message}",
            hint=one_line(f"take {measure.name} out of analyze.measures", error.hint and f"or: {error.hint}"),
        ) from error


def random_signs(
    seed: int, name: str, rows: torch.Tensor, size: int, first: int = 0, count: int = 1
) -> torch.Tensor:
    """[k, count, size] of -1 and 1, float32: the vectors number first, first + 1, ... of each row,
    independent of the other rows.
    """
    return _random((signs, 64), key_of(seed, name), rows, size, range(first, first + count))


def random_normals(
    seed: int, name: str, rows: torch.Tensor, size: int, first: int = 0, count: int = 1
) -> torch.Tensor:
    """[k, count, size] standard normal numbers, float32, of 16 bits each; as `random_signs`."""
    return _random((normals, 4), key_of(seed, name), rows, size, range(first, first + count))


def _random(
    kind: tuple[Callable[[torch.Tensor], torch.Tensor], int],
    key: int,
    rows: torch.Tensor,
    size: int,
    vectors: range,
) -> torch.Tensor:
    """kind: a function of words, and how many numbers it makes of each."""
    made, per_word = kind
    words = -(-size // per_word)
    numbers = torch.arange(vectors.start * words, vectors.stop * words, device=rows.device)
    some = words_at(streams(key, rows).unsqueeze(1), numbers)
    return made(some.view(-1, words)).view(len(rows), len(vectors), words * per_word)[..., :size]
