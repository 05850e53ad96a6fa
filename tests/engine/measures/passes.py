"""Measures run over samples as `psgrad analyze` does, and the same samples' gradients by a plain loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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
from psgrad.engine.measures.mean_gradient import MeanGradient
from psgrad.engine.measures.measure import Gathered, Measure, Setting
from psgrad.engine.measures.passes import second_pass
from psgrad.ragged import Block
from tests.oracles import one_sample_gradients

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

    def setting(self, chunk_size: int | str = "auto", seed: int = 0) -> Setting:
        objective = Objective(self.model, self.criterion)
        examples = Examples(objective, Block((self.inputs,), self.targets), {"chunk_size": chunk_size})
        targets = None if self.targets is None else self.targets.cpu()  # where a dataset has them
        return Setting(examples, self.kind, targets, self.classes, seed=seed)

    def loop(self) -> np.ndarray:
        """[n, p] float64: the gradients of one sample at a time, by PyTorch's own autograd."""
        assert self.targets is not None
        found = one_sample_gradients(self.model, self.criterion, (self.inputs,), self.targets)
        return torch.cat([each.flatten(1) for each in found.values()], 1).double().numpy()

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
    seed: int = 0,
) -> Measured:
    """All passes over the rows.

    interrupted_at: each pass ends at the first chunk that reaches this row, and goes on in measures that are
    made anew, from the state.
    """
    setting, measures = prepared(rows, make, chunk_size, seed)
    count, stream = len(rows.inputs), setting.examples.stream
    parts = _until(stream.run(count, measures, materialise=True), interrupted_at)
    states = [measure.state() for measure in measures]
    if interrupted_at is not None:
        size = stream.chunk_size
        setting, measures = prepared(rows, make, chunk_size, seed)
        stream = setting.examples.stream
        stream.fix_chunk_size(size)
        for measure, state in zip(measures, states, strict=True):
            if state:
                measure.restore(state)
        parts += list(stream.run(count, measures, start=parts[-1].stop, materialise=True))
    found = _joined(parts)
    if again := [measure for measure in measures if measure.needs_second_pass]:
        for measure in again:
            measure.between()
        own, size = second_pass(again, setting.examples), stream.chunk_size
        parts = _until(own.run(range(count), size), interrupted_at)
        if parts[-1].stop < count:
            parts += list(own.run(range(parts[-1].stop, count), size))
        found |= _joined(parts)
    found["ok"] = torch.isfinite(found["loss"]) & torch.isfinite(found["grad_norm"])
    gathered = {measure.name: measure.gather(found) for measure in measures if measure.name}
    columns = {name: column for each in gathered.values() for name, column in each.columns.items()}
    return Measured(found | columns, gathered)


def gathered_bytes(rows: Rows, make: Callable[[], Measure]) -> int:
    """Bytes that a measure has gathered after its first pass."""
    setting, measures = prepared(rows, lambda: [make()])
    for _ in setting.examples.stream.run(len(rows.inputs), measures, materialise=True):
        pass
    return sum(value.nbytes for measure in measures[2:] for value in measure.state().values())


def prepared(
    rows: Rows, make: Callable[[], Sequence[Measure]], chunk_size: int | str = "auto", seed: int = 0
) -> tuple[Setting, list[Measure]]:
    """The measures of a run, those that others need before them."""
    setting, made = rows.setting(chunk_size, seed), make()
    needed = [MeanGradient()] * any(MeanGradient.name in measure.needs for measure in made)
    measures = [GradientNorms(), Predictions(summary_for(rows.kind)), *needed, *made]
    objective = setting.examples.objective.with_summary(partial(joined_summary, measures))
    setting = replace(setting, examples=replace(setting.examples, objective=objective))
    for measure in measures:
        measure.prepare(setting)
    return setting, measures


def _until(chunks: Iterator[Columns], row: int | None) -> list[Columns]:
    """The chunks up to the first one that reaches this row; all of them if None."""
    found: list[Columns] = []
    for columns in chunks:
        found.append(columns)
        if row is not None and columns.stop >= row:
            break
    return found


def _joined(parts: Sequence[Columns]) -> dict[str, Tensor]:
    return {key: torch.cat([columns.values[key] for columns in parts]) for key in parts[0].values}
