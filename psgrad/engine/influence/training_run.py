"""A training run that is computed again, step by step, forward and backward.

The run is a function of its training examples' weights: step t goes along the mean over its batch of
w_i * loss_i, where all w_i are 1, or is a function of the user's. `TrainingRun.weight_derivatives` is the
exact derivative of a number of the last parameters with respect to each w_i. With w_i = 0 an example is left
out while all else stays: initial weights, order, batches. Ilyas and Engstrom, "MAGIC: Near-Optimal Data
Attribution for Deep Learning" (2025); Engstrom et al., "Optimizing ML Training with Metagradient Descent"
(2025).

States of the forward run, which the derivative needs in reverse order, are kept where they fit into memory,
or in a file that has no name and so is gone with the process, however that ends. Where they do not fit, some
are kept and the steps between them are computed again, level by level.
"""

from __future__ import annotations

import math
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from time import perf_counter
from typing import IO, Any, Protocol

import numpy as np
import torch

from psgrad.engine.execution.objective import Objective
from psgrad.engine.free_memory import free_memory
from psgrad.engine.gradients.flat import Vectors
from psgrad.engine.influence.evaluation.jobs import LoadedRows, Recipe
from psgrad.engine.influence.training_steps import RecipeSteps, StepBatch, Steps, TrainingState
from psgrad.engine.transforms import capture, vmap
from psgrad.engine.transforms.private_torch import tree_flatten, tree_map, tree_unflatten
from psgrad.errors import InfluenceError

# The share of the free space of a disk that states may take.
_DISK_SHARE = 0.5


class Kept(Protocol):
    """Points of a run, of which the last is taken first."""

    def append(self, point: TrainingState, /) -> None:
        """Keep one more."""

    def pop(self) -> TrainingState:
        """The last of them, which is kept no longer."""


class OnDisk:
    """Points in a file without a name in a folder, bit by bit as they are in memory.

    Raises InfluenceError where the disk has no room for them.
    """

    def __init__(self, folder: Path, like: TrainingState) -> None:
        leaves, self._tree = tree_flatten((like.params, like.state))
        self._like = [(leaf.dtype, leaf.shape, leaf.nbytes, leaf.device) for leaf in leaves]
        self._folder, self._bytes, self._count = folder, like.bytes, 0
        try:
            self._file: IO[bytes] = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - closed with this object
        except OSError as error:
            raise self._unwritable(error) from error
        weakref.finalize(self, self._file.close)

    def append(self, point: TrainingState) -> None:
        leaves, _ = tree_flatten((point.params, point.state))
        try:
            self._file.seek(self._count * self._bytes)
            for leaf in leaves:
                self._file.write(leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
            self._file.flush()
        except OSError as error:
            with suppress(OSError):  # what is left in its buffer can't be written either
                self._file.close()
            raise self._unwritable(error) from error
        self._count += 1

    def pop(self) -> TrainingState:
        self._count -= 1
        self._file.seek(self._count * self._bytes)
        leaves = []
        for dtype, shape, size, device in self._like:
            content = torch.frombuffer(bytearray(self._file.read(size)), dtype=torch.uint8) if size else None
            leaf = torch.empty(shape, dtype=dtype) if content is None else content.view(dtype).reshape(shape)
            leaves.append(leaf.to(device))
        params, state = tree_unflatten(leaves, self._tree)
        return TrainingState(params, state)

    def _unwritable(self, error: OSError) -> InfluenceError:
        return InfluenceError(
            f"state number {self._count:,} of the training run can't be written to {self._folder}:"
            f" {error.strerror}; expected {self._bytes:,} free bytes for each state"
            " (influence.training.states: disk)",
            hint=(
                "a full disk or a quota, or a folder that can't be written to; free some space, choose"
                " an --output on another disk, or set influence.training.states: memory, which computes"
                " again what does not fit"
            ),
        )


def room_on_disk(folder: Path, point: TrainingState) -> int:
    """How many states like this one a folder's disk takes."""
    return int(shutil.disk_usage(folder).free * _DISK_SHARE) // max(point.bytes, 1)


Loader = Callable[[int, int], list[torch.Tensor]]

# The share of the free memory that states of the run may take.
_SHARE = 4
# Fewer states than these at a level would compute most steps many times.
_FEWEST = 8
# How far the end of a second run may be from that of the first, as a share of the distance from the initial
# weights: rounding, where a GPU adds in another order.
_SAME = 1e-3


def training_batches(rows: int, *, epochs: int, batch_size: int, seed: int) -> list[torch.Tensor]:
    """The numbers of the rows of each step, int64 [b]: a permutation of all rows for each epoch, cut into
    batches, the last of which may be smaller.
    """
    shuffles = np.random.default_rng([seed, 1])
    found: list[torch.Tensor] = []
    for _ in range(epochs):
        found += torch.from_numpy(shuffles.permutation(rows)).split(batch_size)
    return found


@dataclass(frozen=True)
class TrainingRun:
    """A deterministic training run.

    Attributes:
        objective: model and loss. Its own parameters count for nothing.
        rows: the training set, [n, ...] each.
        recipe: how; any but newton. Of a run with own steps, its epochs and batches alone.
        seed: of the order of the rows: that of the built-in trainer of an evaluation.
        initial: name -> parameter, where the run begins.
        kept: how many states are kept at once; None for as many as fit into a quarter of the free memory, or
            into half of the free disk.
        fresh: seed -> the initial parameters of another run; None where there are no others.
        own: steps in place of the recipe's.
        loader: (how many rows, seed) to the numbers of the rows of each step, int64 [b], in place of the
            recipe's batches.
        disk: the folder on whose disk states are kept; None for those in memory.
    """

    objective: Objective
    rows: LoadedRows
    recipe: Recipe
    seed: int
    initial: Vectors
    kept: int | None = None
    fresh: Callable[[int], Vectors] | None = None
    own: Steps | None = None
    loader: Loader | None = None
    disk: Path | None = None

    def on(self, rows: torch.Tensor, seed: int) -> TrainingRun:
        """A run of the same recipe on some of the examples, rows [k], in another order, and from other
        initial parameters where there are any.
        """
        inputs = tuple(x[rows] for x in self.rows.inputs)
        part = LoadedRows(inputs, None if self.rows.target is None else self.rows.target[rows])
        initial = self.initial if self.fresh is None else self.fresh(seed)
        return replace(self, rows=part, seed=seed, initial=initial)

    @cached_property
    def batches(self) -> list[torch.Tensor]:
        """The numbers of the rows of each step, int64 [b]."""
        if self.loader is not None:
            found = self.loader(len(self.rows), self.seed)
        else:
            epochs, size = self.recipe.epochs, self.recipe.batch_size
            found = training_batches(len(self.rows), epochs=epochs, batch_size=size, seed=self.seed)
        return [batch.to(self.device) for batch in found]

    @property
    def device(self) -> torch.device:
        return next(iter(self.initial.values())).device

    @property
    def facts(self) -> dict[str, Any]:
        """Facts about the run, for the manifest."""
        batches = {"epochs": self.recipe.epochs, "batch_size": self.recipe.batch_size}
        named = self.steps.facts | batches | {"seed": self.seed}
        if self.loader is None:
            return named
        return {key: value for key, value in named.items() if key not in batches} | {
            "batches": "of a function"
        }

    @property
    def final(self) -> Vectors:
        """The parameters after the last step. Raises InfluenceError for a run that diverges, ModelError for
        own steps that can't be computed again.
        """
        return self._ended[0]

    @cached_property
    def _ended(self) -> tuple[Vectors, float]:
        """(the parameters after the last step, the seconds of a step)."""
        point, seen, begun = self.start, False, perf_counter()
        with self.steps.errors():
            self.steps.require_same_again(point, self._batch(0))
            for step in range(len(self.batches)):
                seen = seen or self.steps.depends_on_weights(point, self._batch(step))
                point = self._after(point, step)
                if step == min(1, len(self.batches) - 1):  # the first one was recorded, the second compared
                    begun = perf_counter()
        self.steps.require_weights(seen)
        self._require_finite(point.params)
        return point.params, (perf_counter() - begun) / max(len(self.batches) - 2, 1)

    def retrained(self, weights: torch.Tensor) -> Vectors:
        """name -> [K, *shape]: the parameters after the same run with other weights [K, n] of the examples,
        all K at once.
        """
        point = self._copies(len(weights))
        weights = weights.to(self._like)
        with self.steps.errors():
            for step in range(len(self.batches)):
                point = self._after_stacked(point, weights, step)
        return point.params

    def weight_derivatives(self, cotangents: Vectors) -> torch.Tensor:
        """[m, n] float64: the derivatives of m numbers with respect to each example's weight.

        cotangents: name -> [m, *shape], the derivatives of the numbers with respect to the last parameters.
        Raises InfluenceError where the run, computed again, ends elsewhere than at `final`.
        """
        count, last = len(next(iter(cotangents.values()))), len(self.batches) - 1
        found = torch.zeros(count, len(self.rows), dtype=torch.float64, device=self.device)
        of_state = self._zero_cotangents(count)
        with self.steps.errors():
            for step, point in self._backward(self.start, 0, len(self.batches)):
                if step == last and self.own is not None:
                    self._require_same_end(self._after(point, step).params)
                cotangents, of_state, derivatives = self._pulled_at(step, point, cotangents, of_state)
                # a loader may draw a row twice for one batch
                found.index_add_(1, self.batches[step], derivatives.double())
        return found

    def derivative_seconds(self, cotangents: Vectors) -> float:
        """What `weight_derivatives` is predicted to take, by the steps of the run and one step backward."""
        of_state = self._zero_cotangents(len(next(iter(cotangents.values()))))
        with self.steps.errors():
            step = self._clocked(lambda: self._pulled_at(0, self.start, cotangents, of_state))
        return len(self.batches) * (step + self._ended[1] * self.levels)

    def retraining_seconds(self, count: int) -> float:
        """The predicted seconds of `retrained` with `count` weights, from one step."""
        point = self._copies(count)
        weights = torch.ones(count, len(self.rows)).to(self._like)
        with self.steps.errors():
            step = self._clocked(lambda: self._after_stacked(point, weights, 0))
        return len(self.batches) * step

    @cached_property
    def levels(self) -> int:
        """How many times each step is computed before it is pulled back: once where all states are kept."""
        steps = len(self.batches)
        return max(1, math.ceil(math.log(max(steps, 1), self._width(self.start)) - 1e-9))

    def _clocked(self, run: Callable[[], Any]) -> float:
        """Seconds of the third time; the first one is recorded, the second one compared."""
        run()
        run()
        begun = perf_counter()
        run()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return perf_counter() - begun

    @cached_property
    def steps(self) -> Steps:
        return RecipeSteps(self.objective, self.recipe) if self.own is None else self.own

    @cached_property
    def start(self) -> TrainingState:
        """The point before the first step."""
        return TrainingState(self.initial, self.steps.start(self.initial))

    @property
    def _like(self) -> torch.Tensor:
        return next(iter(self.initial.values()))

    def _copies(self, count: int) -> TrainingState:
        """The point before the first step, [K, ...] of all."""
        params, state = tree_map(
            lambda leaf: leaf.expand(count, *leaf.shape).clone(), (self.start.params, self.start.state)
        )
        return TrainingState(params, state)

    def _zero_cotangents(self, count: int) -> Any:
        """[m, ...] of the state."""
        return tree_map(lambda leaf: leaf.new_zeros((count, *leaf.shape)), self.start.state)

    def _batch(self, step: int) -> StepBatch:
        rows, target = self.batches[step], self.rows.target
        return StepBatch(
            tuple(x[rows] for x in self.rows.inputs),
            None if target is None else target[rows],
            self.steps.known(step, len(self.batches), self._like),
        )

    def _after(self, point: TrainingState, step: int) -> TrainingState:
        weights = torch.ones(len(self.batches[step]), dtype=self._like.dtype, device=self.device)
        return TrainingState(*self._step(point.params, point.state, self._batch(step), weights))

    def _after_stacked(self, point: TrainingState, weights: torch.Tensor, step: int) -> TrainingState:
        own = weights[:, self.batches[step]]
        return TrainingState(*self._stacked(point.params, point.state, self._batch(step), own))

    def _pulled_at(self, step: int, point: TrainingState, of_params: Vectors, of_state: Any) -> Any:
        return self._pulled(point.params, point.state, self._batch(step), of_params, of_state)

    @cached_property
    def _step(self) -> Any:
        return capture(self.steps.after, say=lambda why: None)

    @cached_property
    def _stacked(self) -> Any:
        # own steps may draw by a seed: the same numbers for all
        stacked = vmap(self.steps.after, in_dims=(0, 0, None, 0), randomness="same")
        return capture(stacked, say=lambda why: None)

    @cached_property
    def _pulled(self) -> Any:
        return capture(self.steps.pulled, say=lambda why: None)

    def _backward(self, start: TrainingState, first: int, last: int) -> Iterator[tuple[int, TrainingState]]:
        """(step, the point before it) of the steps last - 1, ..., first. start: the point before `first`."""
        width = self._width(start)
        kept: Kept = [] if self.disk is None else OnDisk(self.disk, start)
        kept.append(start)
        if last - first <= width:
            for step in range(first, last - 1):
                start = self._after(start, step)
                kept.append(start)
            for step in reversed(range(first, last)):
                yield step, kept.pop()
            return
        parts = _parts(first, last, width)
        for part in parts[:-1]:
            for step in range(part.start, part.stop):
                start = self._after(start, step)
            kept.append(start)
        for part in reversed(parts):
            yield from self._backward(kept.pop(), part.start, part.stop)

    def _width(self, point: TrainingState) -> int:
        """How many points are kept at one level."""
        if self.kept is not None:
            return max(self.kept, 2)
        if self.disk is not None:
            return max(_FEWEST, room_on_disk(self.disk, point))
        return max(_FEWEST, free_memory(self.device) // _SHARE // max(point.bytes, 1))

    def _require_finite(self, params: Vectors) -> None:
        if all(bool(value.isfinite().all()) for value in params.values()):
            return
        raise InfluenceError(
            "the training that influence.training describes diverged: its weights are not finite",
            hint=(
                "the learning rate is too high for this model, or its loss is not bounded on these"
                " rows; set a smaller learning rate: influence.training.learning_rate, or that of a"
                " step of your own"
            ),
        )

    def _require_same_end(self, end: Vectors) -> None:
        apart, way = distance(end, self.final), distance(self.initial, self.final)
        if apart <= _SAME * way:
            return
        raise InfluenceError(
            f"the training run, computed again, ends {apart / way if way else 1:.2g} times as far from its"
            " first end as the initial weights are; expected the same end each time: a step is a function"
            " of its arguments alone",
            hint=(
                "a step after the first one draws random numbers, or reads a variable that others"
                " change; keep what changes from step to step in the state, and draw by a generator"
                " that is made in the step from a seed and a count in the state"
            ),
        )


def distance(one: Vectors, other: Vectors) -> float:
    """How far two sets of parameters are apart."""
    return float(
        torch.stack([(one[name] - other[name]).double().square().sum() for name in one]).sum().sqrt()
    )


def _parts(first: int, last: int, count: int) -> list[slice]:
    """Steps first, ..., last - 1 in `count` parts of about equal length."""
    ends = [first + (last - first) * number // count for number in range(count + 1)]
    return [slice(start, stop) for start, stop in pairwise(ends) if stop > start]
