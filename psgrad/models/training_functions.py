"""The function of a config that trains a whole model, for evaluations, checked."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import nn

from psgrad.errors import ConfigError, ModelError
from psgrad.user_code import describe_failure, resolve

Train = Callable[[nn.Module, tuple[torch.Tensor, ...], torch.Tensor | None, int], nn.Module]


def resolve_training(spec: str, base: Path) -> Train:
    """The training function that `module:callable` names.

    It is called as `train(model, inputs, target, seed)`, once for each model that is trained. model: fresh
    from the config's factory, with the weights of this seed. inputs: a tuple of tensors [k, ...], the rows
    that are not left out. target: [k, ...], None where the data has none. seed: for all else that it draws.
    It returns the trained model.

    Raises ConfigError for a function that can't be called so; what it raises and returns is checked.
    """
    function = resolve(spec, base)
    try:
        inspect.signature(function).bind(None, (), None, 0)
    except TypeError as error:
        raise ConfigError(
            f"influence.evaluate.train: {spec} can't be called as train(model, inputs, target, seed): {error}"
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
            raise ModelError(f"the training function {spec} raised {describe_failure(error)}") from error
        _require_trained(trained, wanted, f"the training function {spec} returned")
        found: nn.Module = trained
        return found

    return train


def _require_trained(trained: object, wanted: Mapping[str, tuple[int, ...]], returned: str) -> None:
    """Raises ModelError unless a model has weights of the wanted names and shapes, and finite ones."""
    if not isinstance(trained, nn.Module):
        raise ModelError(f"{returned} an object of type {type(trained).__name__}; expected the trained model")
    found = {name: tuple(value.shape) for name, value in trained.state_dict().items()}
    if found != wanted:
        odd = min(set(found.items()) ^ set(wanted.items()))[0]
        raise ModelError(f"{returned} a model with other weights than it was given: {odd}")
    named = trained.named_parameters()
    lost = next((name for name, value in named if not bool(value.isfinite().all())), None)
    if lost is not None:
        raise ModelError(f"{returned} a model whose parameter {lost} is not finite: its training diverged")
