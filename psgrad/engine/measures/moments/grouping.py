"""Which checkpoints pass together: as many as fit in memory, where that is priced lower than one after another."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from psgrad.engine.examples import Examples
from psgrad.engine.gradients import per_sample_square_norms
from psgrad.engine.gradients.memory import chunk_budget
from psgrad.engine.gradients.planning.plan import Prediction, predict
from psgrad.engine.measures.moments.ensemble import Ensemble
from psgrad.engine.objective import Objective

# Prices are not closer than that: measured, ways priced alike differ by a tenth either way.
_PAYS = 0.9


@dataclass(frozen=True)
class Grouping:
    """sizes: of the groups of checkpoints that pass together, in order. why: in a sentence, for measures.json."""

    sizes: list[int]
    why: str

    @classmethod
    def one_by_one(cls, count: int, why: str) -> Grouping:
        return cls([1] * count, f"one checkpoint after another: {why}")


def grouped(examples: Examples, objective: Objective, count: int, chunk_size: int) -> Grouping:
    """How `count` checkpoints pass over these examples, by forecasts of time and memory, which run nothing.

    objective: of a model like those of the checkpoints, with their summary. A pass of T models at once runs T times the arithmetic in
    as many kernels as one model does: it wins where kernels are short (small chunks, small models, a GPU that waits for Python), and
    loses where they are long, as stacked convolutions run slower than shared ones (measured in benchmarks/checkpoints.py).
    """
    if examples.options.get("randomness", "error") != "error":
        return Grouping.one_by_one(count, "the model draws at random, and would draw otherwise in company")
    budget = chunk_budget(examples.device, examples.options.get("memory"))
    weights = _bytes(objective)
    try:
        one = _forecast(examples, objective.params, chunk_size, partial(_alone, objective))
        together = forecast_together(examples, objective, count, chunk_size)
        room = (budget - together.input_bytes) // (together.peak_bytes // count + weights)
        size = min(count, int(room))
        if 1 < size < count:
            size = math.ceil(count / math.ceil(count / size))  # groups of about one size
            together = forecast_together(examples, objective, size, chunk_size)
    except Exception as error:  # what a pass does depends on data; or the model fails, and does so again where its row is told
        return Grouping.one_by_one(count, f"a joint pass can't be foreseen ({type(error).__name__})")
    if size < 2:
        return Grouping.one_by_one(count, f"two of them with {chunk_size} samples do not fit {budget / 2**20:.0f} MiB")
    priced = (
        f"priced at {1e3 * together.seconds / size:.3g} ms a checkpoint together, {1e3 * one.seconds:.3g} ms alone, a chunk of {chunk_size}"
    )
    if together.seconds > _PAYS * size * one.seconds:
        return Grouping.one_by_one(count, priced)
    sizes = [min(size, count - start) for start in range(0, count, size)]
    return Grouping(sizes, f"{size} checkpoints at a time, their weights stacked: {priced}")


def _alone(objective: Objective, params: Any, inputs: Any, target: Any) -> Any:
    return per_sample_square_norms(objective.loss, params, inputs, target, in_dims=(0, None if target is None else 0), has_aux=True)


def forecast_together(examples: Examples, objective: Objective, count: int, chunk_size: int) -> Prediction:
    """What a chunk takes when `count` models like this one see it at once, beside their weights."""
    ensemble = Ensemble.like(objective, count)

    def function(both: dict[str, torch.Tensor], inputs: Any, target: Any) -> Any:
        params = {name: both[name] for name in ensemble.params}
        return ensemble.all_at_once(params, {name: both[name] for name in ensemble.fixed}, inputs, target)

    return _forecast(examples, {**ensemble.params, **ensemble.fixed}, chunk_size, function)


def _forecast(examples: Examples, params: dict[str, torch.Tensor], chunk_size: int, function: Callable[..., Any]) -> Prediction:
    inputs, target = examples.stream.load(0, 1)
    return predict(function, params, inputs, target, chunk_size)


def _bytes(objective: Objective) -> int:
    tensors = (*objective.model.parameters(), *objective.model.buffers())
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
