"""Norms of all samples at several checkpoints in one pass: the weights are stacked and mapped over.

`grouped` decides how many checkpoints pass together: as many as fit in memory, if the predicted time is lower
than that of one after another.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from psgrad.engine.execution.chunk_plan import ChunkPlan, plan_chunk
from psgrad.engine.execution.chunk_replay import replayable
from psgrad.engine.execution.examples import Examples
from psgrad.engine.execution.memory import chunk_budget
from psgrad.engine.execution.objective import Objective
from psgrad.engine.gradients import per_sample_square_norms
from psgrad.engine.gradients.terms.numerics import flagging
from psgrad.engine.measures.measure import Arrays, CheckpointModel, Measure, Setting
from psgrad.engine.transforms import stack_module_state, vmap
from psgrad.engine.transforms.functional import swapped, tied_slots
from psgrad.errors import MeasureError

Vectors = dict[str, torch.Tensor]


@dataclass(frozen=True, eq=False)
class StackedModels:
    """Models of one architecture with different weights.

    Attributes:
        objective: of any one of them, in whose model weights are swapped; its summary is the part of an
            output that is kept.
        params: name -> [T, *shape], the parameters that gradients are taken in.
        fixed: name -> [T, *shape], frozen parameters and buffers.
    """

    objective: Objective
    params: Vectors
    fixed: Vectors

    @classmethod
    def of(cls, objective: Objective, models: Sequence[nn.Module]) -> StackedModels:
        """From models on one device, `objective` being that of a model like them."""
        stacked = [
            {name: value.detach() for name, value in part.items()} for part in stack_module_state(models)
        ]
        return cls(objective, *_parted({**stacked[0], **stacked[1]}, objective))

    @classmethod
    def like(cls, objective: Objective, count: int) -> StackedModels:
        """The shapes of an ensemble of `count` models, for a prediction: each has the weights of the given
        one, which are not copied.
        """
        own = {**dict(objective.model.named_parameters()), **dict(objective.model.named_buffers())}
        return cls(
            objective,
            *_parted(
                {name: value.detach().expand(count, *value.shape) for name, value in own.items()}, objective
            ),
        )

    @replayable("rows")
    def columns(
        self,
        loss: Any,
        params: Any,
        inputs: tuple[torch.Tensor, ...],
        target: torch.Tensor | None,
        **options: Any,
    ) -> Arrays:
        """`loss`, `grad_norm` and the summary's columns of a chunk of k rows, name -> [k, T]; for Stream.run.

        If rounding may have made a norm wrong, the models pass one by one instead: which samples are computed
        again depends on data, and differs between models.
        """
        result, unsafe = self.all_at_once(self.params, self.fixed, inputs, target)
        if not bool(unsafe.any()):
            return {name: values.transpose(0, 1) for name, values in result.items()}
        one_by_one = [
            self._one(
                {name: value[t] for name, value in self.params.items()}, self._fixed_of(t), inputs, target
            )
            for t in range(len(unsafe))
        ]
        return {name: torch.stack([each[name] for each in one_by_one], 1) for name in one_by_one[0]}

    @torch.no_grad()
    def all_at_once(
        self, params: Vectors, fixed: Vectors, inputs: tuple[torch.Tensor, ...], target: torch.Tensor | None
    ) -> tuple[Arrays, torch.Tensor]:
        """(name -> [T, k], [T] bool: the models with a norm that rounding may have made wrong)."""

        def one(params: Vectors, fixed: Vectors, inputs: Any, target: Any) -> tuple[Arrays, torch.Tensor]:
            with flagging() as flags:
                result = self._one(params, fixed, inputs, target)
            unsafe = flags.any()
            if unsafe is None:
                unsafe = torch.zeros((), dtype=torch.bool, device=result["loss"].device)
            return result, unsafe

        mapped: tuple[Arrays, torch.Tensor] = vmap(one, in_dims=(0, 0 if fixed else None, None, None))(
            params, fixed, inputs, target
        )
        return mapped

    def _one(
        self, params: Vectors, fixed: Vectors, inputs: tuple[torch.Tensor, ...], target: torch.Tensor | None
    ) -> Arrays:
        """name -> [k], of one model."""
        in_dims = (0, None if target is None else 0)
        with swapped(tied_slots(self.objective.model, fixed), fixed):
            norms = per_sample_square_norms(
                self.objective.loss, params, inputs, target, in_dims=in_dims, has_aux=True
            )
        return {"loss": norms.losses.double(), "grad_norm": norms.square_norms().sqrt(), **norms.aux}

    def _fixed_of(self, t: int) -> Vectors:
        return {name: value[t] for name, value in self.fixed.items()}


def _parted(stacked: Vectors, objective: Objective) -> tuple[Vectors, Vectors]:
    """(the parameters that gradients are taken in, the others)."""
    params = {name: stacked[name] for name in objective.params}
    return params, {name: value for name, value in stacked.items() if name not in params}


# Predicted times are no more exact than that: measured times of equal predictions differ by a tenth.
_PAYS = 0.9


@dataclass(frozen=True)
class Grouping:
    """sizes: of the groups of checkpoints that pass together, in order. why: in a sentence, for
    measures.json.
    """

    sizes: list[int]
    why: str

    @classmethod
    def one_by_one(cls, count: int, why: str) -> Grouping:
        return cls([1] * count, f"one checkpoint after another: {why}")


def grouped(examples: Examples, objective: Objective, count: int, chunk_size: int) -> Grouping:
    """How `count` checkpoints pass over these examples, by predicted time and memory; nothing runs.

    objective: of a model like those of the checkpoints, with their summary. A pass of T models at once runs T
    times the arithmetic in as many kernels as one model does: it wins where kernels are short (small chunks,
    small models, a GPU that waits for Python), and loses where they are long, as stacked convolutions run
    slower than shared ones (measured in benchmarks/checkpoints.py).
    """
    if examples.options.get("randomness", "error") != "error":
        return Grouping.one_by_one(count, "the model draws at random, and would draw otherwise in company")
    budget = chunk_budget(examples.device, examples.options.get("memory"))
    weights = _bytes(objective)
    try:
        one = _chunk_plan(examples, objective.params, chunk_size, partial(_alone, objective))
        together = plan_together(examples, objective, count, chunk_size)
        room = (budget - together.input_bytes) // (together.peak_bytes // count + weights)
        size = min(count, int(room))
        if 1 < size < count:
            size = math.ceil(count / math.ceil(count / size))  # groups of about one size
            together = plan_together(examples, objective, size, chunk_size)
    except (
        Exception
        # what a pass does depends on data; or the model fails, and does so again whose error names the row
    ) as error:
        return Grouping.one_by_one(count, f"a joint pass can't be predicted ({type(error).__name__})")
    if size < 2:
        return Grouping.one_by_one(
            count, f"two of them with {chunk_size} samples do not fit {budget / 2**20:.0f} MiB"
        )
    priced = (
        f"priced at {1e3 * together.seconds / size:.3g} ms a checkpoint together, {1e3 * one.seconds:.3g} ms"
        f" alone, a chunk of {chunk_size}"
    )
    if together.seconds > _PAYS * size * one.seconds:
        return Grouping.one_by_one(count, priced)
    sizes = [min(size, count - start) for start in range(0, count, size)]
    return Grouping(sizes, f"{size} checkpoints at a time, their weights stacked: {priced}")


def _alone(objective: Objective, params: Any, inputs: Any, target: Any) -> Any:
    return per_sample_square_norms(
        objective.loss, params, inputs, target, in_dims=(0, None if target is None else 0), has_aux=True
    )


def plan_together(examples: Examples, objective: Objective, count: int, chunk_size: int) -> ChunkPlan:
    """The plan of a chunk for `count` models like this one at once, beside their weights."""
    ensemble = StackedModels.like(objective, count)

    def function(both: dict[str, torch.Tensor], inputs: Any, target: Any) -> Any:
        params = {name: both[name] for name in ensemble.params}
        return ensemble.all_at_once(params, {name: both[name] for name in ensemble.fixed}, inputs, target)

    return _chunk_plan(examples, {**ensemble.params, **ensemble.fixed}, chunk_size, function)


def _chunk_plan(
    examples: Examples, params: dict[str, torch.Tensor], chunk_size: int, function: Callable[..., Any]
) -> ChunkPlan:
    inputs, target = examples.stream.load(0, 1)
    return plan_chunk(function, params, inputs, target, chunk_size)


def _bytes(objective: Objective) -> int:
    tensors = (*objective.model.parameters(), *objective.model.buffers())
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


class Resident:
    """The checkpoints' objectives; loaded once if all of them fit the memory budget of a chunk, else at each
    use.

    Attributes:
        stay: whether they stay in memory.
    """

    def __init__(self, checkpoints: Sequence[CheckpointModel], examples: Examples) -> None:
        self._checkpoints = checkpoints
        model = examples.objective.model
        size = sum(x.numel() * x.element_size() for x in (*model.parameters(), *model.buffers()))
        self.stay = size * len(checkpoints) <= chunk_budget(examples.device, examples.options.get("memory"))
        self._loaded: dict[int, Objective] = {}

    def at(self, t: int) -> Objective:
        """The model and loss at checkpoint t, counted from 0."""
        if t not in self._loaded:
            if not self.stay:
                self._loaded.clear()
            self._loaded[t] = self._checkpoints[t].objective()
        return self._loaded[t]


def require_checkpoints(measure: Measure, setting: Setting, least: int, why: str) -> None:
    """Raises MeasureError where there are fewer than `least` checkpoints; `why` says what is wrong with
    fewer.
    """
    count = len(setting.checkpoints)
    if count < least:
        raise MeasureError(
            f"the measure {measure.name} looks at several checkpoints, and analyze.checkpoints lists"
            f" {count or 'none'}",
            expected=f"at least {least}: {why}",
            cause=(
                "model.checkpoint is the one model that everything else is measured at; it is not counted"
                if count < 2
                else None
            ),
            next_step=(
                f"list a training run's files, in order, in analyze.checkpoints; or take {measure.name} out"
                " of analyze.measures"
            ),
        )


def require_labels(measure: Measure, setting: Setting) -> None:
    """Raises MeasureError where a prediction can't be right or wrong: the loss has no labels."""
    if setting.kind in ("class", "token", "binary"):
        targets = setting.targets
        if targets is None:  # they come with the rows, and the first one shows their kind
            targets = setting.examples.stream.read(0, 1).target
        if setting.kind == "binary" or targets is None or not targets.is_floating_point():
            return
    words = {"value": "a value to come near to", "custom": "a form of its own"}
    raise MeasureError(
        f"the measure {measure.name} asks whether a prediction is right, and this loss has"
        f" {words.get(setting.kind, 'soft labels')}",
        expected=(
            "a loss over labels: cross_entropy, nll or token_cross_entropy with whole numbers, or"
            " bce_with_logits"
        ),
        next_step=(
            f"take {measure.name} out of analyze.measures; trajectory follows the loss itself, whatever it is"
        ),
    )
