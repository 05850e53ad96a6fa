"""Measures run over samples as `psgrad analyze` does, and the same samples' gradients by a plain loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from psgrad.commands.measure_setup import joined_summary
from psgrad.engine.execution.chunk_measure import Columns
from psgrad.engine.execution.examples import Examples
from psgrad.engine.execution.objective import Objective
from psgrad.engine.measures.builtin.norms import GradientNorms
from psgrad.engine.measures.builtin.outputs import Predictions, summary_for
from psgrad.engine.measures.measure import Gathered, Measure, Setting
from psgrad.engine.measures.passes import SecondPass
from psgrad.ragged import Block

Criterion = Callable[[Any, Any], Tensor]


@dataclass
class Rows:
    """Samples and the model that they are measured by."""

    model: nn.Module
    inputs: Tensor
    targets: Tensor | None
    criterion: Criterion = nn.functional.cross_entropy
    kind: str = "class"
    classes: int | None = 3

    def read(self, start: int, stop: int) -> Any:
        return Block((self.inputs[start:stop],), None if self.targets is None else self.targets[start:stop])

    def setting(self, chunk_size: int | str = "auto", seed: int = 0) -> Setting:
        objective = Objective(self.model, self.criterion)
        examples = Examples(objective, self.read, len(self.inputs), {"chunk_size": chunk_size})
        targets = None if self.targets is None else self.targets.cpu()  # where a dataset has them
        return Setting(examples, self.kind, targets, self.classes, seed=seed)

    def loop(self) -> np.ndarray:
        """[n, p] float64: the gradients of one sample at a time, by PyTorch's own autograd."""
        parameters = list(self.model.parameters())
        rows = []
        for i in range(len(self.inputs)):
            output = self.model(self.inputs[i : i + 1])[0]
            loss = self.criterion(output, None if self.targets is None else self.targets[i])
            result = torch.autograd.grad(loss, parameters, allow_unused=True)
            parts = [torch.zeros_like(p) if g is None else g for g, p in zip(result, parameters, strict=True)]
            rows.append(torch.cat([part.flatten() for part in parts]).double())
        return torch.stack(rows).numpy()

    def logits(self) -> np.ndarray:
        """[n, C] float64."""
        with torch.no_grad():
            return self.model(self.inputs).double().numpy()


@dataclass
class Measured:
    rows: dict[str, Tensor]
    gathered: dict[str, Gathered]


def classifier(n: int = 23, dtype: torch.dtype = torch.float64, classes: int = 3, seed: int = 0) -> Rows:
    """A small convolutional network, and images of `classes` classes."""
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Conv2d(1, 3, 3), nn.Tanh(), nn.Flatten(), nn.Linear(3 * 9, 6), nn.Tanh(), nn.Linear(6, classes)
    ).to(dtype)
    return Rows(model, torch.randn(n, 1, 5, 5, dtype=dtype), torch.randint(classes, (n,)), classes=classes)


def measured(
    rows: Rows,
    make: Callable[[], Sequence[Measure]],
    chunk_size: int | str = "auto",
    interrupted_at: int | None = None,
    keeps: bool = True,
    seed: int = 0,
) -> Measured:
    """All passes over the rows.

    interrupted_at: each pass ends at the first chunk that reaches this row, and goes on in measures that are
    made anew, from the state. keeps: whether gradients stay in memory for the second pass.
    """
    run = _Run(rows, make, chunk_size, keeps, seed)
    first = run.take(
        lambda run, start: run.stream.run(len(run.rows.inputs), run.first, start=start, materialise=True),
        interrupted_at,
        "first",
    )
    if run.again:
        for measure in run.again:
            measure.between()
        first |= run.take(
            lambda run, start: run.second.run(range(start, len(run.rows.inputs))), interrupted_at, "again"
        )
    first["ok"] = torch.isfinite(first["loss"]) & torch.isfinite(first["grad_norm"])
    return Measured(first, {measure.name: measure.gather(first) for measure in run.measures if measure.name})


def gathered_bytes(rows: Rows, make: Callable[[], Measure]) -> int:
    """Bytes that a measure has gathered after its first pass."""
    run = _Run(rows, lambda: [make()], "auto", True, 0)
    for _ in run.stream.run(len(rows.inputs), run.first, materialise=True):
        pass
    return sum(value.nbytes for value in run.measures[-1].state().values())


class _Run:
    def __init__(
        self, rows: Rows, make: Callable[[], Sequence[Measure]], chunk_size: int | str, keeps: bool, seed: int
    ) -> None:
        self.rows, self._given = rows, (make, chunk_size, keeps, seed)
        self.make()

    def make(self) -> None:
        make, chunk_size, keeps, seed = self._given
        setting = self.rows.setting(chunk_size, seed)
        self.measures = [GradientNorms(), Predictions(summary_for(self.rows.kind)), *make()]
        objective = setting.examples.objective.with_summary(partial(joined_summary, self.measures))
        setting = replace(setting, examples=replace(setting.examples, objective=objective))
        for measure in self.measures:
            measure.prepare(setting)
        self.stream = setting.examples.stream
        self.again = [measure for measure in self.measures if measure.looks_twice]
        self.second = SecondPass(self.again, self.stream)
        if not keeps:
            self.second._give_back()
        self.first = [*self.measures, self.second] if self.again else self.measures
        self.states: dict[str, list[dict[str, Tensor]]] = {}

    def take(
        self, run: Callable[[_Run, int], Any], interrupted_at: int | None, name: str
    ) -> dict[str, Tensor]:
        result: list[Columns] = []
        which = "first" if name == "first" else "again"
        for columns in run(self, 0):
            result.append(columns)
            if interrupted_at is not None and columns.stop >= interrupted_at:
                break
        if interrupted_at is not None and result[-1].stop < len(self.rows.inputs):
            states, size = [measure.state() for measure in getattr(self, which)], self.stream.chunk_size
            before = dict(self.states)
            self.make()
            self.states = before
            self.stream.fix_chunk_size(size)
            if name == "again":  # what the first pass said is known by then
                _restore(self.first, before["first"])
                for measure in self.again:
                    measure.between()
            _restore(getattr(self, which), states)
            result += list(run(self, result[-1].stop))
        self.states[name] = [
            {key: value.clone() for key, value in measure.state().items()} for measure in getattr(self, which)
        ]
        keys = result[0].values
        return {key: torch.cat([columns.values[key] for columns in result]) for key in keys}


def _restore(measures: Sequence[Measure], states: Sequence[dict[str, Tensor]]) -> None:
    for measure, state in zip(measures, states, strict=True):
        if state:
            measure.restore(state)
