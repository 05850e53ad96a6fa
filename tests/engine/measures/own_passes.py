"""Measures run as `psgrad analyze` runs them, without a config or a disk: what they say of every row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from psgrad.data.rows import Block
from psgrad.engine.execution.examples import Examples
from psgrad.engine.execution.objective import BY_POSITION, Forward, Objective
from psgrad.engine.measures.builtin.norms import GradientNorms
from psgrad.engine.measures.measure import Gathered, Measure, Setting


def setting_of(
    model: nn.Module,
    loss: Callable[..., Tensor],
    inputs: tuple[Tensor, ...],
    target: Tensor | None,
    forward: Forward = BY_POSITION,
    **facts: Any,
) -> Setting:
    """What `psgrad analyze` would tell measures of these samples."""
    options = {"randomness": "different" if model.training else "error"}
    objective = Objective(model, loss, forward=forward)
    return Setting(Examples(objective, Block(inputs, target), options), **facts)


def columns_of(measure: Measure, setting: Setting, chunk_size: int = 5, start: int = 0) -> dict[str, Tensor]:
    """name -> [n - start]: all columns of the measure's own passes."""
    measure.prepare(setting)
    result: dict[str, list[Tensor]] = {}
    for own in measure.passes():
        reached = start
        for part in own.run(range(start, len(setting)), chunk_size):
            assert part.start == reached
            reached = part.stop
            for name, column in part.values.items():
                result.setdefault(name, []).append(column)
        assert reached == len(setting)
    return {name: torch.cat(parts) for name, parts in result.items()}


def measured(
    measures: Sequence[Measure], setting: Setting, chunk_size: int = 7
) -> tuple[dict[str, Tensor], dict[str, Gathered]]:
    """(the columns of all rows, what each measure gathered) of one pass that measures share."""
    setting = replace(setting, examples=setting.examples.sized(chunk_size), shared={})
    every = [GradientNorms(), *measures]
    for measure in every:
        measure.prepare(setting)
    parts = [columns.values for columns in setting.examples.stream.run(len(setting), every)]
    rows = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    rows["ok"] = torch.isfinite(rows["loss"]) & torch.isfinite(rows["grad_norm"])
    return rows, {each.name: each.gather(rows) for each in every if each.name}


def gathered_of(measure: Measure, setting: Setting, norms: Tensor, ok: Tensor | None = None) -> Gathered:
    """What a prepared measure gathers where the gradient norms are these."""
    return measure.gather(
        {"loss": norms, "grad_norm": norms, "ok": torch.isfinite(norms) if ok is None else ok}
    )
