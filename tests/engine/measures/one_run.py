"""Measures that are asked together, as `psgrad analyze` asks them, without a config or a disk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from psgrad.engine.measures.builtin.norms import GradientNorms
from psgrad.engine.measures.measure import Gathered, Measure, Setting
from tests.engine.measures.passes import with_needed


def measured(
    measures: Sequence[Measure], setting: Setting, chunk_size: int = 7, interrupted_at: int | None = None
) -> tuple[dict[str, Tensor], dict[str, Gathered]]:
    """(the columns of all rows, what each measure gathered) of one pass over the samples.

    interrupted_at: after so many rows the states are taken, and fresh measures go on from them.
    """
    setting = replace(setting, examples=setting.examples.sized(chunk_size), shared={})
    measures = with_needed(measures)
    every = _prepared([GradientNorms(), *measures], setting)
    parts: list[dict[str, Tensor]] = []
    states, done = [], 0
    if interrupted_at is not None:
        for columns in setting.examples.stream.run(len(setting), every):
            parts.append(columns.values)
            states, done = (
                [{name: value.clone() for name, value in each.state().items()} for each in every],
                columns.stop,
            )
            if columns.stop >= interrupted_at:
                break
        setting = replace(setting, shared={})
        every = _prepared([GradientNorms(), *(replace(measure) for measure in measures)], setting)  # type: ignore[type-var]
        for each, state in zip(every, states, strict=True):
            if state:
                each.restore(state)
    if done < len(setting):
        parts += [columns.values for columns in setting.examples.stream.run(len(setting), every, start=done)]
    rows = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    rows["ok"] = torch.isfinite(rows["loss"]) & torch.isfinite(rows["grad_norm"])
    return rows, {each.name: each.gather(rows) for each in every if each.name}


def _prepared(measures: list[Measure], setting: Setting) -> list[Measure]:
    for measure in measures:
        measure.prepare(setting)
    return measures
