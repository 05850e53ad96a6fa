"""The controls of an evaluation: scores without any influence method.

A method that is not better than the same label, the nearest input and the loss of the training example
explains little.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn

from psgrad.engine.execution.examples import Examples
from psgrad.engine.execution.objective import Objective
from psgrad.engine.influence.evaluation.jobs import LoadedRows
from psgrad.engine.influence.method import row_norms

Array = np.ndarray[Any, Any]

RANDOM, LABEL, NEIGHBOUR, PENULTIMATE, LOSS, NORM = (
    "random",
    "same label",
    "nearest neighbour (input)",
    "penultimate cosine",
    "training loss",
    "gradient norm",
)


def controls(training: Examples, queries: Examples, seed: int = 0) -> tuple[dict[str, Array], list[str]]:
    """(name -> [n, m] float64, the missing controls with the reason, in sentences)."""
    ours, theirs = LoadedRows.of(training), LoadedRows.of(queries)
    n, m = len(ours), len(theirs)
    notes = []
    result = {RANDOM: np.random.default_rng(seed).standard_normal((n, m))}
    if has_labels(ours) and has_labels(theirs):
        assert ours.target is not None
        assert theirs.target is not None
        result[LABEL] = (ours.target[:, None] == theirs.target[None, :]).double().cpu().numpy()
    else:
        notes.append(f"no control {LABEL!r}: targets are not one whole number a row")
    first, second = _numbers(ours), _numbers(theirs)
    if first is None or second is None:
        notes.append(f"no control {NEIGHBOUR!r}: no input is made of fractional numbers")
    else:
        result[NEIGHBOUR] = -torch.cdist(first, second).cpu().numpy()
    one, other = penultimate(training.objective, ours), penultimate(training.objective, theirs)
    if one is None or other is None:
        notes.append(
            f"no control {PENULTIMATE!r}: the model's last module with parameters has no input of one size"
            " a row"
        )
    else:
        result[PENULTIMATE] = (
            (nn.functional.normalize(one, dim=1) @ nn.functional.normalize(other, dim=1).T).cpu().numpy()
        )
    for name, column in own_controls(training).items():
        result[name] = np.repeat(column[:, None], m, axis=1)
    return result, notes


def own_controls(training: Examples) -> dict[str, Array]:
    """Controls of the training example only: name -> [n] float64."""
    found = row_norms(training)
    return {LOSS: found.losses, NORM: found.norms}


def has_labels(rows: LoadedRows) -> bool:
    """Whether targets are one whole number a row."""
    return rows.target is not None and rows.target.dim() == 1 and not rows.target.is_floating_point()


def penultimate(objective: Objective, rows: LoadedRows) -> torch.Tensor | None:
    """[n, d] float64: the input of the last module with parameters of its own that runs; None if that is not
    a tensor with one row for each sample.
    """
    last: list[tuple[Any, ...]] = []

    def note(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        last[:] = [inputs]

    layers = [
        module
        for module in objective.model.modules()
        if next(module.parameters(recurse=False), None) is not None
    ]
    hooks = [module.register_forward_pre_hook(note) for module in layers]
    try:
        with torch.no_grad():
            objective.forward(objective.model, *rows.inputs)
    finally:
        for hook in hooks:
            hook.remove()
    seen = last[0][0] if last and last[0] else None
    if (
        not isinstance(seen, torch.Tensor)
        or not seen.is_floating_point()
        or seen.dim() < 2
        or len(seen) != len(rows)
    ):
        return None
    return seen.reshape(len(rows), -1).double()


def _numbers(rows: LoadedRows) -> torch.Tensor | None:
    """[n, d] float64: all inputs that are fractional numbers, side by side."""
    parts = [x.reshape(len(rows), -1).double() for x in rows.inputs if x.is_floating_point()]
    return torch.cat(parts, dim=1) if parts else None
