"""The function of a config that trains a whole model, for evaluations, checked."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from psgrad.errors import ConfigError, ModelError
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
    function = resolve(spec, base)
    try:
        inspect.signature(function).bind(None, (), None, 0)
    except TypeError as error:
        raise ConfigError(
            f"influence.evaluate.train: {spec} can't be called as {_TRAIN.split(' -> ')[0]}: {error};"
            f" expected a function {_TRAIN}"
        ) from None
    except ValueError:  # some callables written in C have no signature
        pass

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
