"""The optimiser of a config, by its name in torch.optim. It sees noisy sums alone, so that any of them is post-processing."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from psgrad.errors import ConfigError

# Those that ask for more than one gradient a step, or for another kind of it.
_REFUSED = {
    "LBFGS": "it asks for several gradients and losses a step, of which one is released",
    "SparseAdam": "it takes sparse gradients, and a noisy gradient is nowhere zero",
}


def known_optimizers() -> list[str]:
    """The names of torch.optim that can be used."""
    found = [
        name
        for name, value in vars(torch.optim).items()
        if isinstance(value, type) and issubclass(value, torch.optim.Optimizer) and value is not torch.optim.Optimizer
    ]
    return sorted(set(found) - set(_REFUSED))


def make_optimizer(name: str, kwargs: Mapping[str, Any], parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """The optimiser over these parameters. Raises ConfigError for a name that torch.optim has not, and for arguments it does not take."""
    if name in _REFUSED:
        raise ConfigError(f"privacy.optimizer: {name} can't be used: {_REFUSED[name]}", next_step="choose a first-order optimiser")
    known = known_optimizers()
    if name not in known:
        close = [other for other in known if other.lower() == name.lower()] or difflib.get_close_matches(name, known, n=1)
        raise ConfigError(
            f"privacy.optimizer: torch.optim has no optimiser {name!r}" + (f"; did you mean {close[0]}?" if close else ""),
            expected=f"one of {', '.join(known)}",
        )
    trained = list(parameters)
    try:
        if not _all_finite(kwargs):
            raise ValueError("a number is NaN or infinite")
        _rehearse(getattr(torch.optim, name), kwargs, trained)
        optimizer: torch.optim.Optimizer = getattr(torch.optim, name)(trained, **kwargs)
    except Exception as error:  # arguments are checked in as many ways as there are optimisers
        first_line = next(iter(str(error).splitlines()), type(error).__name__)
        raise ConfigError(
            f"privacy.optimizer: {name} does not take {dict(kwargs)}: {first_line}",
            expected=f"the arguments of torch.optim.{name}, such as lr",
            next_step="correct privacy.optimizer.kwargs",
        ) from error
    return optimizer


def _all_finite(value: object) -> bool:
    """Whether no number in a value of a config is NaN or infinite: a ledger, which is JSON, could not hold it."""
    if isinstance(value, Mapping):
        return all(map(_all_finite, value.values()))
    if isinstance(value, list | tuple):
        return all(map(_all_finite, value))
    return not isinstance(value, float) or math.isfinite(value)


def _rehearse(optimizer: type[torch.optim.Optimizer], kwargs: Mapping[str, Any], parameters: Iterable[nn.Parameter]) -> None:
    """Take two steps on a zero for each kind of parameter: some arguments are looked at when a step is taken, which is paid for then."""
    kinds = {(parameter.ndim, parameter.dtype, parameter.device) for parameter in parameters}
    zeros = [nn.Parameter(torch.zeros([1] * ndim, dtype=dtype, device=device)) for ndim, dtype, device in kinds]
    tried = optimizer(zeros, **kwargs)
    for _ in range(2):
        for zero in zeros:
            zero.grad = torch.zeros_like(zero)
        tried.step()
