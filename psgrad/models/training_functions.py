"""The functions of training that a config names, checked: one that trains a whole model, for evaluations; and
those of a training run, its step, the first state, and the batches.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from psgrad.config import TrainingConfig
from psgrad.engine.influence.own_steps import SIGNATURE as STEP
from psgrad.engine.influence.own_steps import OwnSteps
from psgrad.engine.influence.training_run import Loader
from psgrad.errors import ConfigError, ModelError, PsgradError
from psgrad.user_code import describe_failure, resolve

Train = Callable[[nn.Module, tuple[torch.Tensor, ...], torch.Tensor | None, int], nn.Module]

_TRAIN = "train(model, inputs, target, seed) -> model"


def resolve_training(spec: str, base: Path) -> Train:
    """The training function that `module:callable` names.

    It is called as `train(model, inputs, target, seed)`, once for each model that is trained:

        model: fresh from the config's factory, with the weights of this seed. inputs: a tuple of tensors,
        each [k, ...]: the training rows that are not left out, with labels flipped where that is the test.
        target: [k, ...], None where the data has none. seed: whatever else it draws (the order of the rows)
        it should draw by this.

    and returns the trained model. Raises ConfigError for a function that can't be called so. What it returns
    is checked, and an exception that it raises is reported as an error of this function.
    """
    function = _function("evaluate.train", spec, base, _TRAIN, (None, (), None, 0))

    def train(
        model: nn.Module, inputs: tuple[torch.Tensor, ...], target: torch.Tensor | None, seed: int
    ) -> nn.Module:
        wanted = {name: tuple(value.shape) for name, value in model.state_dict().items()}
        try:
            trained = function(model, inputs, target, seed)
        except (Exception, SystemExit) as error:
            raise ModelError(
                f"the training function {spec} raised {describe_failure(error)}",
                hint="run it by itself to see why",
            ) from error
        if not isinstance(trained, nn.Module):
            raise ModelError(
                f"the training function {spec} returned an object of type {type(trained).__name__};"
                " expected the trained model, a torch.nn.Module",
                hint="end it with `return model`",
            )
        found = {name: tuple(value.shape) for name, value in trained.state_dict().items()}
        if found != wanted:
            odd = sorted(set(found.items()) ^ set(wanted.items()))[0][0]
            raise ModelError(
                f"the training function {spec} returned a model with other weights than it was given:"
                f" {odd}; expected the model that it is given, trained",
            )
        named = trained.named_parameters()
        lost = next((name for name, value in named if not bool(value.isfinite().all())), None)
        if lost is not None:
            raise ModelError(
                f"the training function {spec} returned a model whose parameter {lost} is not finite",
                hint="its training diverged",
            )
        return trained

    return train


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
    step = _function("training.step", training.step, base, STEP, ({}, {}, (), None), **_ADVICE)
    state = None
    if training.state is not None:
        state = _function("training.state", training.state, base, "state(params) -> state", ({},), **_ADVICE)
    return OwnSteps(training.step, step, state, partial(_errors_of, f"the training step {training.step}"))


def resolve_batches(training: TrainingConfig, base: Path) -> Loader | None:
    """The function of a config that gives the numbers of the rows of each step, called as
    `batches(rows, seed)`; None where it names none. What it returns is checked.
    """
    spec = training.batches
    if spec is None:
        return None
    function = _function("training.batches", spec, base, _BATCHES, (0, 0), **_ADVICE)

    def loader(rows: int, seed: int) -> list[torch.Tensor]:
        with _errors_of(f"the batches {spec}"):
            one, again = ([torch.as_tensor(each) for each in function(rows, seed)] for _ in range(2))
        for number, batch in enumerate(one):
            if batch.dim() != 1 or not len(batch) or batch.is_floating_point() or batch.dtype == torch.bool:
                kind = f"{str(batch.dtype).removeprefix('torch.')} {list(batch.shape)}"
                raise ModelError(
                    f"the batches {spec} returned {kind} for step {number}; expected whole numbers [b] of"
                    " the rows of each step",
                    hint=(
                        "tensors of the data, or a mask, in place of the numbers of rows; return the"
                        " numbers of the rows, as the batch_sampler of a DataLoader has them"
                    ),
                )
            outside = batch[(batch < 0) | (batch >= rows)]
            if len(outside):
                raise ModelError(
                    f"the batches {spec} returned the row {int(outside[0])} for step {number}; expected"
                    f" rows 0 to {rows - 1}: {rows:,} are trained on",
                    hint=(
                        "numbers of rows of another dataset, or from 1; use the number of rows that it"
                        f" is called with: {_BATCHES}"
                    ),
                )
        if not one:
            raise ModelError(
                f"the batches {spec} returned no step; expected the numbers of the rows of each step:"
                f" {_BATCHES}",
                hint="a generator that was used up, or no epochs; return a new list at each call",
            )
        if len(one) != len(again) or not all(map(torch.equal, one, again)):
            raise ModelError(
                f"the batches {spec} are others when they are asked for again with the same seed; expected"
                " the same rows for the same seed",
                hint=(
                    "a global generator in place of one that is made from the seed; draw by"
                    " torch.Generator().manual_seed(seed), or np.random.default_rng(seed)"
                ),
            )
        return [batch.long() for batch in one]

    return loader


_BATCHES = "batches(rows, seed) -> rows of each step"
_ADVICE = {
    "cause": "a function of other arguments",
    "hint": "give it these arguments, in this order",
}


def _function(
    key: str,
    spec: str,
    base: Path,
    signature: str,
    arguments: tuple[Any, ...],
    **advice: str,
) -> Callable[..., Any]:
    """The callable of a spec, which takes such arguments. Raises ConfigError, with this advice, where it does
    not.
    """
    function = resolve(spec, base)
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError as error:
        raise ConfigError(
            f"influence.{key}: {spec} can't be called as {signature.split(' -> ')[0]}: {error}; expected a"
            f" function {signature}",
            **advice,
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
            f"{what} raised {describe_failure(error)}; expected a function that returns for all batches of"
            " the run",
            hint=(
                "a mistake in it, or an operator that can't be differentiated; run it by itself to see"
                " why; --debug shows the line"
            ),
        ) from error
