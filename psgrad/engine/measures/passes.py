"""Passes over the samples after the first one: the second pass of measures that compare each sample with all,
and the pass of a single measure.

The second pass takes gradients that the first one left in memory, if there was space for them, and computes
the others again. The chunks are the same in both cases, so the numbers are the same to the last bit, also if
a run was interrupted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from psgrad.engine.execution.chunk_measure import Columns, on_the_cpu
from psgrad.engine.execution.examples import Examples
from psgrad.engine.execution.memory import is_out_of_memory
from psgrad.engine.execution.objective import Objective
from psgrad.engine.execution.streaming import Stream
from psgrad.engine.free_memory import free_memory
from psgrad.engine.gradients import PerSampleGradients
from psgrad.engine.gradients.projections.projection import key_of, normals, signs, streams, words_at
from psgrad.engine.measures.measure import Arrays, Measure
from psgrad.engine.transforms.private_torch import storage_key
from psgrad.errors import MeasureError, TransformError, one_line
from psgrad.ragged import Block

# The free memory divided by this is for gradients that are kept for the second pass.
_SHARE = 4


class SecondPass(Measure):
    """Runs beside the measures of the first pass, keeps its gradients, and makes the second pass.

    Args:
        measures: those that need a second pass (`looks_twice`).
        stream: of the samples' gradients. If it has a memory limit for a chunk, no more is kept.
    """

    needs_factors = True

    def __init__(self, measures: Sequence[Measure], stream: Stream) -> None:
        self.measures, self.stream = measures, stream
        self._kept: dict[int, PerSampleGradients] = {}  # by the chunk's first row
        self._left: int | None = None  # bytes
        self._chunk: PerSampleGradients | None = None
        self._runs: list[tuple[int, int, int]] = []  # chunks of one size: (first row, size, how many)
        self._reached = 0
        stream.at_need.append(self._give_back)

    def columns(self, gradients: PerSampleGradients) -> Arrays:
        self._chunk = gradients
        return {}

    def keep(self) -> None:
        if self._chunk is None:
            return
        size, start = len(self._chunk), self._reached
        first, last, times = self._runs[-1] if self._runs else (0, 0, 0)
        if (last, first + last * times) == (size, start):
            self._runs[-1] = (first, size, times + 1)
        else:
            self._runs.append((start, size, 1))
        self._reached += size
        if self._left is None:
            self._left = (
                self.stream.memory
                if self.stream.memory is not None
                else free_memory(self.stream.device) // _SHARE
            )
        self._left -= _bytes(self._chunk)
        if self._left >= 0:
            self._kept[start] = self._chunk
        else:
            self._left = 0  # the first ones stay
        self._chunk = None

    def begin(self, row: int) -> None:
        """The next chunk of the first pass begins at this row."""
        self._reached = row

    def chunks(self) -> list[range]:
        """The chunks of the first pass, in order."""
        return [
            range(row, row + size)
            for first, size, times in sorted(self._runs)
            for row in range(first, first + size * times, size)
        ]

    def state(self) -> Arrays:
        return {"chunks": torch.tensor(self._runs, dtype=torch.int64).reshape(-1, 3)}

    def restore(self, state: Arrays) -> None:
        self._runs = [(first, size, times) for first, size, times in state["chunks"].tolist()]
        first, size, times = self._runs[-1]
        self._reached = first + size * times

    def merge(self, state: Arrays) -> None:
        self._runs = sorted(
            [*self._runs, *((first, size, times) for first, size, times in state["chunks"].tolist())]
        )

    def run(self, rows: range) -> Iterator[Columns]:
        """The columns of the second pass for these rows, which begin and end where chunks of the first pass
        did. The stream's chunk size is another one afterwards.
        """
        measures = [_InSecondPass(measure) for measure in self.measures]
        for size, first, last in self._pieces(rows):
            gradients = self._kept.pop(first, None)
            values = None if gradients is None else self._columns_of_stored(gradients, measures)
            if values is not None:
                yield Columns(first, last, values)
                continue
            self.stream.fix_chunk_size(size)
            yield from self.stream.run(last, measures, start=first, materialise=True)

    def _pieces(self, rows: range) -> Iterator[tuple[int, int, int]]:
        """(chunk size, first row, last row + 1): stored chunks one by one, those in between in runs of one
        size.
        """
        for start, size, times in self._runs:
            waiting: int | None = None
            end = min(start + size * times, rows.stop)
            for first in range(start, end, size):
                if first + size <= rows.start:
                    continue
                if first in self._kept and first >= rows.start:
                    if waiting is not None:
                        yield size, waiting, first
                        waiting = None
                    yield size, first, first + size
                elif waiting is None:
                    waiting = max(first, rows.start)
            if waiting is not None:
                yield size, waiting, end

    def _columns_of_stored(
        self, gradients: PerSampleGradients, measures: Sequence[_InSecondPass]
    ) -> Arrays | None:
        """The columns of a kept chunk; None if memory ran out."""
        values: Arrays = {}
        try:
            for measure in measures:
                values |= measure.columns(gradients)
            values = on_the_cpu(values)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
        else:
            for measure in measures:
                measure.keep()
            return values
        self._give_back()  # outside the handler, whose traceback holds tensors
        return None

    def _give_back(self) -> None:
        self._kept.clear()
        self._chunk, self._left = None, 0


class _InSecondPass:
    """A measure in its second pass, with the interface of a stream's measure."""

    def __init__(self, measure: Measure) -> None:
        self.columns, self.keep, self.needs_factors = (
            measure.columns_again,
            measure.keep,
            measure.needs_factors,
        )


def _bytes(gradients: PerSampleGradients) -> int:
    """The bytes of these gradients: whole storages, each once, as several factors may be views of one."""
    factors = [factor for gradient in gradients.gradients.values() for factor in gradient.factors]
    storages = [factor.untyped_storage() for factor in factors]
    return sum({storage_key(storage): storage.nbytes() for storage in storages}.values())


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
    loss = _WithoutRows(objective)
    stream = Stream(
        loss,
        examples.params,
        partial(_numbered, examples),
        **options,
    )

    def compute(loss: Any, params: Any, inputs: Inputs, target: torch.Tensor | None, **_: Any) -> Arrays:
        return ask(inputs[:-1], target, inputs[-1])

    return stream.run(rows.stop, [_PassColumns()], compute, rows.start)


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


class _WithoutRows:
    """The loss of one sample whose last input is its row's number."""

    def __init__(self, objective: Objective) -> None:
        self.objective = objective

    def __call__(self, params: Any, inputs: Inputs, target: Any) -> Any:
        return self.objective.loss(params, inputs[:-1], target)


def _numbered(examples: Examples, start: int, stop: int) -> Block:
    """The rows start, ..., stop - 1 with their numbers [k] as one more input."""
    return examples.read(start, stop).with_inputs(after=[torch.arange(start, stop)]).without_padding()


class _PassColumns:
    """Returns the columns that the pass itself computed."""

    needs_factors = True

    def columns(self, found: Arrays) -> Arrays:
        return found

    def keep(self) -> None:
        """Nothing is gathered."""
