"""The functions that a config names for a training run: its step, the first state, and the batches."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from psgrad.config import TrainingConfig
from psgrad.engine.influence.own_steps import SIGNATURE, OwnSteps
from psgrad.engine.influence.training_run import Loader
from psgrad.errors import ConfigError, ModelError, PsgradError
from psgrad.user_code import describe_failure, resolve


def resolve_step(training: TrainingConfig, base: Path) -> OwnSteps | None:
    """The steps of the function that a config names; None where it names an optimiser.

    The step is called as `step(params, state, batch, weights)`:

        params: name -> parameter. state: what the step before returned. batch: a tuple of the inputs and the
        target of the batch's examples, each [b, ...]. weights: [b], one for each example.

    and returns new parameters and a new state, of the same names, structure, shapes and types. Raises
    ConfigError for a function that can't be called so.
    """
    if training.step is None:
        return None
    step = _function("step", training.step, base, SIGNATURE, ({}, {}, (), None))
    state = None
    if training.state is not None:
        state = _function("state", training.state, base, "state(params) -> state", ({},))
    return OwnSteps(training.step, step, state, partial(_errors_of, f"the training step {training.step}"))


def resolve_batches(training: TrainingConfig, base: Path) -> Loader | None:
    """The function of a config that gives the numbers of the rows of each step, called as
    `batches(rows, seed)`; None where it names none. What it returns is checked.
    """
    spec = training.batches
    if spec is None:
        return None
    function = _function("batches", spec, base, _BATCHES, (0, 0))

    def loader(rows: int, seed: int) -> list[torch.Tensor]:
        with _errors_of(f"the batches {spec}"):
            one, again = ([torch.as_tensor(each) for each in function(rows, seed)] for _ in range(2))
        for number, batch in enumerate(one):
            if batch.dim() != 1 or not len(batch) or batch.is_floating_point() or batch.dtype == torch.bool:
                kind = f"{str(batch.dtype).removeprefix('torch.')} {list(batch.shape)}"
                raise ModelError(
                    f"the batches {spec} returned {kind} for step {number}",
                    expected="whole numbers [b] of the rows of each step",
                    cause="tensors of the data, or a mask, in place of the numbers of rows",
                    next_step="return the numbers of the rows, as the batch_sampler of a DataLoader has them",
                )
            outside = batch[(batch < 0) | (batch >= rows)]
            if len(outside):
                raise ModelError(
                    f"the batches {spec} returned the row {int(outside[0])} for step {number}",
                    expected=f"rows 0 to {rows - 1}: {rows:,} are trained on",
                    cause="numbers of rows of another dataset, or from 1",
                    next_step=f"use the number of rows that it is called with: {_BATCHES}",
                )
        if not one:
            raise ModelError(
                f"the batches {spec} returned no step",
                expected=f"the numbers of the rows of each step: {_BATCHES}",
                cause="a generator that was used up, or no epochs",
                next_step="return a new list at each call",
            )
        if len(one) != len(again) or not all(map(torch.equal, one, again)):
            raise ModelError(
                f"the batches {spec} are others when they are asked for again with the same seed",
                expected="the same rows for the same seed",
                cause="a global generator in place of one that is made from the seed",
                next_step="draw by torch.Generator().manual_seed(seed), or np.random.default_rng(seed)",
            )
        return [batch.long() for batch in one]

    return loader


_BATCHES = "batches(rows, seed) -> rows of each step"


def _function(
    key: str, spec: str, base: Path, signature: str, arguments: tuple[Any, ...]
) -> Callable[..., Any]:
    """The callable of a spec, which takes such arguments. Raises ConfigError where it does not."""
    function = resolve(spec, base)
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError as error:
        raise ConfigError(
            f"influence.training.{key}: {spec} can't be called as {signature.split(' -> ')[0]}: {error}",
            expected=f"a function {signature}",
            cause="a function of other arguments",
            next_step="give it these arguments, in this order",
        ) from None
    except ValueError:  # some callables written in C have no signature
        pass
    return function


@contextmanager
def _errors_of(what: str) -> Iterator[None]:
    """An exception of the user's function becomes a ModelError that names it."""
    try:
        yield
    except PsgradError:
        raise
    except (Exception, SystemExit) as error:
        raise ModelError(
            f"{what} raised {describe_failure(error)}",
            expected="a function that returns for all batches of the run",
            cause="a mistake in it, or an operator that can't be differentiated",
            next_step="run it by itself to see why; --debug shows the line",
        ) from error
