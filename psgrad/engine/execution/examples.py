"""The rows of a dataset with a model and the scalar that is differentiated: training examples, or queries."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Generic, TypeVar

import torch

from psgrad.engine.execution.loading import Read
from psgrad.engine.execution.objective import Objective
from psgrad.engine.execution.streaming import Measure, Stream
from psgrad.engine.gradients import PerSampleGradients, SquareNorms
from psgrad.engine.gradients.flat import Flat, Vectors
from psgrad.engine.gradients.terms import accumulating
from psgrad.engine.transforms import vmap
from psgrad.engine.transforms.private_torch import tree_map

Query = Callable[[PerSampleGradients], dict[str, torch.Tensor]]
Tree = TypeVar("Tree")


@dataclass(frozen=True)
class Examples:
    """n rows, a model, and the scalar of each row that is differentiated: the training loss, or the
    measurement of a query.

    Attributes:
        objective: model and scalar; `objective.params` are the parameters that scores are about.
        read: (start, stop) to these rows, counted from 0 to n - 1. Never called twice at once.
        count: n.
        options: of the Stream that takes them chunk by chunk (chunk_size, memory, randomness, capture,
            compile, say).
        numbers: [n], which rows of their dataset they are, for messages; None where they are rows 0 to n - 1.

    Numbers do not depend on the chunks, but for rounding. Passes over the same examples may not be
    interleaved.
    """

    objective: Objective
    read: Read
    count: int
    options: Mapping[str, Any] = field(default_factory=dict)
    numbers: torch.Tensor | None = None

    def __len__(self) -> int:
        return self.count

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
        return Stream(self.objective.loss, self.params, self.read, **self.options)

    def numbers_of(self, rows: torch.Tensor) -> torch.Tensor:
        """[k]: which rows of the dataset these are, rows [k] counted among the examples."""
        return rows if self.numbers is None else self.numbers.to(rows.device)[rows]

    def with_scalar(self, criterion: Callable[[Any, Any], torch.Tensor]) -> Examples:
        """The same rows and parameters, with another scalar of (output, target) in place of the loss."""
        return replace(self, objective=self.objective.with_scalar(criterion))

    def sized(self, chunk_size: int) -> Examples:
        """The same, so many rows at a time."""
        return replace(self, options={**self.options, "chunk_size": chunk_size, "memory": None})

    # -- passes ----------------------------------------------------------------------------------------------

    def each(
        self, query: Query, start: int = 0, stop: int | None = None
    ) -> Iterator[tuple[slice, dict[str, torch.Tensor]]]:
        """For each chunk of the rows start, ..., stop - 1 (to the last one if None), in order: its rows, and
        the results of `query` for its gradients, name -> [k, ...], on the CPU.
        """
        return self.run(_Asking(query), start=start, stop=stop)

    def norms(self) -> Iterator[tuple[slice, dict[str, torch.Tensor]]]:
        """For each chunk its rows, `loss` [k], `square_norm` [k], both float64, and what the objective's
        summary says (a prediction).

        A pass that is cheaper than `each`.
        """

        def said(gradients: PerSampleGradients | SquareNorms) -> dict[str, torch.Tensor]:
            norms = {"loss": gradients.losses.double(), "square_norm": gradients.square_norms()}
            return norms | {name: accumulating(column) for name, column in gradients.aux.items()}

        return self.run(_Asking(said, needs_factors=False))

    def fold(self, query: Callable[[Any], Tree], way: Callable[..., Any] | None = None) -> Tree:
        """The sum over the chunks of what `query` says of each one's gradients: a pytree of tensors, which
        stay on the device.

        way: what is computed of a chunk and shown to `query`, as in Stream.run; None for the gradients.
        """
        summing: _Summing[Tree] = _Summing(query)
        for _ in self.run(summing, way):
            pass
        assert summing.total is not None, "no rows"
        return summing.total

    def outputs(self) -> Iterator[tuple[slice, dict[str, torch.Tensor]]]:
        """For each chunk its rows and the model's `output` [k, ...]: a forward pass. The output must be one
        tensor a sample.
        """

        def forward(loss: Any, params: Vectors, inputs: Any, target: Any, **options: Any) -> torch.Tensor:
            return vmap(self.objective.predict, in_dims=(None, 0), randomness=options["randomness"])(
                params, inputs
            )

        return self.run(_Asking(lambda output: {"output": output}), forward)

    def losses(self) -> Iterator[tuple[slice, dict[str, torch.Tensor]]]:
        """For each chunk its rows, `loss` [k], float64, and what the objective's summary says: a forward
        pass.
        """

        def forward(loss: Any, params: Vectors, inputs: Any, target: Any, **options: Any) -> Any:
            dims = (None, 0, None if target is None else 0)
            return vmap(loss, in_dims=dims, randomness=options["randomness"])(params, inputs, target)

        def said(found: tuple[torch.Tensor, dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
            losses, summary = found
            return {"loss": losses.double()} | {name: accumulating(each) for name, each in summary.items()}

        return self.run(_Asking(said), forward)

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
        measure: Measure,
        way: Callable[..., Any] | None = None,
        start: int = 0,
        stop: int | None = None,
    ) -> Iterator[tuple[slice, dict[str, torch.Tensor]]]:
        for columns in self.stream.run(self.count if stop is None else stop, [measure], way, start):
            yield slice(columns.start, columns.stop), columns.values


class _Asking:
    """A measure whose columns are the answers of one query."""

    def __init__(self, query: Callable[[Any], dict[str, torch.Tensor]], needs_factors: bool = True) -> None:
        self.columns, self.needs_factors = query, needs_factors

    def keep(self) -> None:
        """Nothing is gathered."""


class _Summing(Generic[Tree]):
    """A measure that adds up what a query says of each chunk, once the chunk is done."""

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
