"""The rows of a dataset with a model and the scalar that is differentiated: training examples, or queries.

Where several processes share the rows, all of them make the same passes in the same order. Each computes its
share of the rows of a pass, and has the results of all rows afterwards.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, Generic, TypeVar

import torch

from psgrad.engine.execution.chunk_measure import ChunkMeasure
from psgrad.engine.execution.chunk_replay import replayable
from psgrad.engine.execution.loading import ChosenRows, Rows
from psgrad.engine.execution.objective import Objective
from psgrad.engine.execution.ranks import Arrays, OneProcess, Processes, RowPart
from psgrad.engine.execution.streaming import Stream
from psgrad.engine.free_memory import free_memory
from psgrad.engine.gradients import PerSampleGradients, SquareNorms
from psgrad.engine.gradients.flat import Flat, Vectors
from psgrad.engine.gradients.terms import accumulating
from psgrad.engine.transforms import vmap
from psgrad.engine.transforms.private_torch import tree_flatten, tree_map, tree_unflatten

# Most bytes and chunks that a process computes before it sends its columns to the others; one chunk at least.
_ROUND_BYTES, _ROUND_CHUNKS = 1 << 25, 16

Tree = TypeVar("Tree")


@dataclass(frozen=True)
class Examples:
    """n rows, a model, and the scalar of each row that is differentiated: the training loss, or the
    measurement of a query.

    Attributes:
        objective: model and scalar; `objective.params` are the parameters that scores are about.
        rows: these rows, n of them. Never read twice at once.
        options: of the Stream that takes them chunk by chunk (chunk_size, memory, randomness, capture,
            say).
        numbers: [n], which rows of their dataset they are, for messages; None where they are rows 0 to n - 1.
        processes: those that share the rows of each pass.
        watch: called as a pass goes on, where this process begins and after each chunk, with how many rows it
            has done since the call before (0 at first) and how many there are.

    Numbers depend on neither chunks nor processes, but for rounding. Passes over the same examples may not be
    interleaved, and a query makes no pass itself.
    """

    objective: Objective
    rows: Rows
    options: Mapping[str, Any] = field(default_factory=dict)
    numbers: torch.Tensor | None = None
    processes: Processes = field(default_factory=OneProcess)
    watch: Callable[[int, int], None] = lambda rows, of: None

    def __len__(self) -> int:
        return self.count

    @property
    def count(self) -> int:
        """n."""
        return len(self.rows)

    @property
    def params(self) -> Vectors:
        """name -> parameter."""
        return self.objective.params

    @cached_property
    def flat(self) -> Flat:
        """The order of the parameters in a matrix [k, p]."""
        return Flat(self.params)

    @property
    def device(self) -> torch.device:
        return self.stream.device

    @cached_property
    def stream(self) -> Stream:
        return Stream(self.objective.loss, self.params, self.rows, **self.options)

    def gradients(self, samples: Sequence[int]) -> PerSampleGradients:
        """The deferred gradients of these samples, all at once, computed by this process."""
        return self.stream.gradients(samples)

    def numbers_of(self, rows: torch.Tensor) -> torch.Tensor:
        """[k]: which rows of the dataset these are, rows [k] counted among the examples."""
        return rows if self.numbers is None else self.numbers.to(rows.device)[rows]

    def with_scalar(self, criterion: Callable[[Any, Any], torch.Tensor]) -> Examples:
        """These examples with another scalar of (output, target) in place of the loss."""
        return replace(self, objective=self.objective.with_scalar(criterion))

    def at(self, rows: torch.Tensor) -> Examples:
        """Some of these examples, rows [k] counted among them."""
        return replace(self, rows=ChosenRows(self.rows, rows), numbers=self.numbers_of(rows))

    def sized(self, chunk_size: int) -> Examples:
        """These examples, `chunk_size` rows at a time."""
        return replace(self, options={**self.options, "chunk_size": chunk_size, "memory": None})

    def each(
        self,
        query: Callable[[Any], dict[str, torch.Tensor]],
        start: int = 0,
        stop: int | None = None,
        compute: Callable[..., Any] | None = None,
    ) -> Iterator[tuple[slice, dict[str, torch.Tensor]]]:
        """For each chunk of the rows start, ..., stop - 1 (to the last one if None), in order: its rows, and
        the results of `query` for its gradients, name -> [k, ...], on the CPU.

        compute: what is computed of a chunk in place of its gradients, as in Stream.run.
        """
        return self.run(QueryColumns(query), compute, start, stop)

    def norms(self) -> Iterator[tuple[slice, dict[str, torch.Tensor]]]:
        """For each chunk its rows, `loss` [k], `square_norm` [k], both float64, and what the objective's
        summary says (a prediction).

        A pass that is cheaper than `each`.
        """

        def columns(gradients: PerSampleGradients | SquareNorms) -> dict[str, torch.Tensor]:
            norms = {"loss": gradients.losses.double(), "square_norm": gradients.square_norms()}
            return norms | {name: accumulating(column) for name, column in gradients.aux.items()}

        return self.run(QueryColumns(columns, needs_factors=False))

    def fold(self, query: Callable[[Any], Tree], compute: Callable[..., Any] | None = None) -> Tree:
        """The sum over the chunks of the results of `query` for each chunk's gradients: a pytree of tensors,
        which stay on the device.

        compute: what is computed of a chunk and shown to `query`, as in Stream.run; None for the gradients.
        """
        summing: _ChunkSum[Tree] = _ChunkSum(query)

        def own_sum() -> Tree:
            for _ in self.of_own_rows(summing, compute):
                pass
            if summing.total is not None:
                return summing.total
            for _ in self._computed(
                summing, compute, 0, self._pass(compute)[2]
            ):  # no row is this process's: zeros
                pass
            assert summing.total is not None, "no rows"
            zeros: Tree = tree_map(torch.zeros_like, summing.total)
            return zeros

        return self.summed(self.processes.together("a sum over rows", own_sum))

    def gather(self, measure: ChunkMeasure, compute: Callable[..., Any] | None = None) -> None:
        """Let a measure keep what it gathers of this process's share of the rows."""

        def own_rows() -> None:
            for _ in self.of_own_rows(measure, compute):
                pass

        self.processes.together("a pass", own_rows)

    def outputs(self) -> Iterator[tuple[slice, dict[str, torch.Tensor]]]:
        """For each chunk its rows and the model's `output` [k, ...]: a forward pass. The output must be one
        tensor a sample.
        """

        return self.run(QueryColumns(lambda output: {"output": output}), self._outputs)

    @replayable("rows")
    def _outputs(self, loss: Any, params: Vectors, inputs: Any, target: Any, **options: Any) -> torch.Tensor:
        predict = vmap(self.objective.predict, in_dims=(None, 0), randomness=options["randomness"])
        return predict(params, inputs)  # type: ignore[no-any-return]

    def losses(self) -> Iterator[tuple[slice, dict[str, torch.Tensor]]]:
        """For each chunk its rows, `loss` [k], float64, and what the objective's summary says: a forward
        pass.
        """

        def columns(found: tuple[torch.Tensor, dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
            losses, summary = found
            return {"loss": losses.double()} | {name: accumulating(each) for name, each in summary.items()}

        return self.run(QueryColumns(columns), losses_of)

    def materialise(self) -> torch.Tensor:
        """[n, p]: every gradient materialised, on the CPU."""
        return torch.cat(
            [
                found["rows"]
                for _, found in self.each(lambda gradients: {"rows": self.flat.join(gradients.materialise())})
            ]
        )

    def run(
        self,
        measure: ChunkMeasure,
        compute: Callable[..., Any] | None = None,
        start: int = 0,
        stop: int | None = None,
    ) -> Iterator[tuple[slice, dict[str, torch.Tensor]]]:
        """The columns of all rows, in order, on each process; a measure gathers of its process's share."""
        stop = self.count * self._pass(compute)[2] if stop is None else stop
        if self.processes.size == 1:
            yield from self._computed(measure, compute, start, stop)
            return
        step = chunk = self.agreed_chunk(compute)
        while start < stop:
            ends = self._round(compute, start, stop, step)
            own = slice(*ends[self.processes.rank : self.processes.rank + 2])
            columns = self.processes.together("rows", partial(self._joined, measure, compute, own))
            taken = 0
            for first, last, part in zip(
                ends, ends[1:], self.processes.gathered("columns", columns), strict=False
            ):
                if last > first:
                    taken += sum(value.numel() * value.element_size() for value in part.values())
                    yield slice(first, last), part
            at_once = _ROUND_BYTES * (ends[-1] - start) // max(taken, 1)
            step = max(chunk, min(at_once, _ROUND_CHUNKS * chunk) // chunk * chunk)
            start = ends[-1]

    def free_bytes(self) -> int:
        """Bytes that are free on the device: on all processes as many as on the first one."""
        return self.processes.agreed("free memory", lambda: [free_memory(self.device)])[0]

    def seconds(self) -> float:
        """A clock that shows the same on all processes."""
        return self.processes.agreed("time", lambda: [time.perf_counter_ns()])[0] / 1e9

    def everywhere(self, own: bool) -> bool:
        """Whether something is so on each process."""
        found = self.processes.gathered("a condition", {"own": torch.tensor(own)})
        return all(bool(each["own"]) for each in found)

    def own_rows(self, compute: Callable[..., Any] | None = None) -> range:
        """This process's share of the rows of a pass that sums."""
        each = self._pass(compute)[2]
        own = RowPart.of(self.processes.rank + 1, self.processes.size, self.count, 1).rows
        return range(own.start * each, own.stop * each)

    def _pass(self, compute: Callable[..., Any] | None) -> tuple[Stream, Callable[..., Any] | None, int]:
        """The stream of a pass, what it computes of a chunk, and how many rows a sample has in it."""
        return self.stream, compute, 1

    def _computed(
        self, measure: ChunkMeasure, compute: Callable[..., Any] | None, start: int, stop: int
    ) -> Iterator[tuple[slice, dict[str, torch.Tensor]]]:
        """The columns of these rows, computed by this process."""
        stream, how, each = self._pass(compute)
        self.watch(0, self.count)
        for columns in stream.run(stop // each, [measure], how, start // each):
            self.watch(columns.stop - columns.start, self.count)
            yield slice(columns.start * each, columns.stop * each), columns.values

    def of_own_rows(
        self, measure: ChunkMeasure, compute: Callable[..., Any] | None = None
    ) -> Iterator[tuple[slice, dict[str, torch.Tensor]]]:
        """As `run`, of this process's share of the rows; to be called in `processes.together`."""
        own = self.own_rows(compute)
        return self._computed(measure, compute, own.start, own.stop)

    def _joined(self, measure: ChunkMeasure, compute: Callable[..., Any] | None, rows: slice) -> Arrays:
        """The columns of some rows in one piece; none of no rows."""
        parts = [columns for _, columns in self._computed(measure, compute, rows.start, rows.stop)]
        return {name: torch.cat([part[name] for part in parts]) for name in (parts[0] if parts else ())}

    def _round(self, compute: Callable[..., Any] | None, start: int, stop: int, step: int) -> list[int]:
        """Where the next rows of each process begin, and where the last one's end: `step` rows for each, and
        fewer where few are left.
        """
        size, each = self.processes.size, self._pass(compute)[2]
        rows = min(step, -(-(stop - start) // (size * each)) * each)
        return [min(start + rows * rank, stop) for rank in range(size + 1)]

    def agreed_chunk(self, compute: Callable[..., Any] | None = None) -> int:
        """How many rows are computed at once: on all processes as many as on the first one."""
        stream, _, each = self._pass(compute)
        if stream not in self._sized:
            self._sized.append(stream)
            self.processes.together("a first chunk", lambda: stream.choose_chunk_size(self.count))
            stream.fix_chunk_size(*self.processes.agreed("chunk size", stream.chunk_facts))
        return stream.chunk_size * each

    @cached_property
    def _sized(self) -> list[Stream]:
        return []

    def summed(self, own: Tree) -> Tree:
        """The sum of the processes' pytrees of tensors, all of the same shapes, on each process."""
        if self.processes.size == 1:
            return own
        leaves, tree = tree_flatten(own)
        sums = {str(place): leaf for place, leaf in enumerate(leaves)}

        def add(other: Arrays) -> None:
            for name, value in other.items():
                sums[name] = sums[name] + value.to(sums[name].device)

        found = self.processes.reduce("a sum", lambda: sums, add)
        whole = [found[str(place)].to(leaf.device) for place, leaf in enumerate(leaves)]
        return tree_unflatten(whole, tree)  # type: ignore[no-any-return]


@replayable("rows")
def losses_of(loss: Any, params: Vectors, inputs: Any, target: Any, **options: Any) -> Any:
    """The losses of a chunk's samples, and their summaries: a forward pass, for Stream.run."""
    dims = (None, 0, None if target is None else 0)
    return vmap(loss, in_dims=dims, randomness=options["randomness"])(params, inputs, target)


class QueryColumns:
    """A measure of a stream whose columns are the answers of one query."""

    def __init__(self, query: Callable[[Any], dict[str, torch.Tensor]], needs_factors: bool = True) -> None:
        self.columns, self.needs_factors = query, needs_factors

    def keep(self) -> None:
        """Nothing is gathered."""


class _ChunkSum(Generic[Tree]):
    """A measure that adds up a query's results for each chunk, once the chunk is done."""

    needs_factors = True

    def __init__(self, query: Callable[[Any], Tree]) -> None:
        self.total: Tree | None = None
        self._query = query
        self._chunk: Tree | None = None

    def columns(self, gradients: Any) -> dict[str, torch.Tensor]:
        self._chunk = self._query(gradients)
        return {}

    def keep(self) -> None:
        self.total = self._chunk if self.total is None else tree_map(torch.add, self.total, self._chunk)
        self._chunk = None
