"""Raises errors for uses of PyTorch's autograd inside a transform that would silently have no effect.

These are a module's backward hooks, which PyTorch skips if no tensor requires a gradient;
torch.autograd.functional, which treats a tensor that does not require a gradient as constant; and
torch.func's forward mode, which would end the process. torch.autograd.grad and .backward() raise errors by
themselves (see Level.explained).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from psgrad.engine.transforms import diagnostics
from psgrad.engine.transforms.derivatives import DerivativeLevel
from psgrad.engine.transforms.levels import switches
from psgrad.engine.transforms.private_torch import (
    AUTOGRAD_FUNCTIONAL,
    BACKWARD_HOOK,
    FORWARD_MODE,
    Replacement,
)
from psgrad.engine.transforms.state import state
from psgrad.engine.transforms.tracer import Tracer
from psgrad.errors import TransformError


def _refuse_hooks(hook: Any, function: Any, tensors: Any) -> None:
    followed = state.attached or any(isinstance(level, DerivativeLevel) for level in state.stack)
    if followed and torch.is_grad_enabled() and any(isinstance(x, Tracer) for x in tensors):
        raise TransformError(
            f"a backward hook of a module inside the transformed function{diagnostics.where()}",
            cause="the hook may change the gradient, and would not run",
            next_step="remove the hook, or write its change of the gradient as a custom_vjp",
        )


def _refuse_functional(*args: Any, **kwargs: Any) -> None:
    if state.stack:
        raise TransformError(
            f"torch.autograd.functional inside the transformed function{diagnostics.where()}",
            expected="derivatives by transforms, which nest: jacrev, jacfwd, hessian, vjp, jvp",
            cause="PyTorch's autograd records nothing there, and its derivatives would all be zero",
        )


def _refuse_forward_mode(*args: Any, **kwargs: Any) -> None:
    if state.stack:
        raise TransformError(
            "torch.func.jvp, jacfwd, hessian or linearize inside the transformed"
            f" function{diagnostics.where()}",
            expected="the functions of the same name in psgrad.engine.transforms",
            cause="PyTorch's forward mode needs the memory of tensors, and traced tensors have none",
        )


def _refusing(place: tuple[Any, str], refuse: Callable[..., None]) -> Replacement:
    """A replacement by which a function of PyTorch calls `refuse` first, while a transform runs in any
    thread.
    """

    def make(own: Callable[..., Any]) -> Callable[..., Any]:
        def refusing(*args: Any, **kwargs: Any) -> Any:
            refuse(*args, **kwargs)
            return own(*args, **kwargs)

        return refusing

    return Replacement(place, make)


switches += [
    _refusing(BACKWARD_HOOK, _refuse_hooks),
    _refusing(FORWARD_MODE, _refuse_forward_mode),
    _refusing(AUTOGRAD_FUNCTIONAL, _refuse_functional),
]
