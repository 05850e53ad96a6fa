"""PyTorch's own autograd, used inside a transform: it sees nothing there, so what it would leave out in
silence is refused by name.

That is a module's backward hooks, which it skips where no tensor requires a gradient;
torch.autograd.functional, which takes what does not require one for constant; and torch.func's forward mode,
which would end the process. torch.autograd.grad and .backward() object by themselves (see Level.body).
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.utils.hooks import BackwardHook

from psgrad.engine.transforms import diagnostics
from psgrad.engine.transforms.derivatives import DerivativeLevel
from psgrad.engine.transforms.interpreter import Tracer
from psgrad.engine.transforms.levels import switches
from psgrad.engine.transforms.state import state
from psgrad.errors import TransformError


def _refuse_hooks(hook: Any, function: Any, tensors: Any) -> None:
    followed = state.attached or any(isinstance(level, DerivativeLevel) for level in state.stack)
    if followed and torch.is_grad_enabled() and any(isinstance(x, Tracer) for x in tensors):
        raise TransformError(
            f"a backward hook of a module inside the transformed function{diagnostics.where()}",
            cause="the hook may change the gradient, and would be passed by",
            next_step="remove the hook, or write what it does as a custom_vjp",
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
            expected="their namesakes in psgrad.engine.transforms",
            cause="PyTorch's forward mode needs the memory of tensors, which traced ones have none of",
        )


class _Refusing(AbstractContextManager[None]):
    """While a transform runs in any thread, a function of PyTorch's asks `refuse` first."""

    def __init__(self, owner: Any, name: str, refuse: Callable[..., None]) -> None:
        self.owner, self.name, self.refuse = owner, name, refuse
        self.lock = threading.Lock()
        self.running = 0

    def __enter__(self) -> None:
        with self.lock:
            if self.running == 0:
                self.own = getattr(self.owner, self.name)
                setattr(self.owner, self.name, self._asking(self.own))
            self.running += 1

    def __exit__(self, *error: Any) -> None:
        with self.lock:
            self.running -= 1
            if self.running == 0:
                setattr(self.owner, self.name, self.own)

    def _asking(self, own: Callable[..., Any]) -> Callable[..., Any]:
        def asking(*args: Any, **kwargs: Any) -> Any:
            self.refuse(*args, **kwargs)
            return own(*args, **kwargs)

        return asking


switches += [
    _Refusing(BackwardHook, "_apply_on_tensors", _refuse_hooks),
    _Refusing(sys.modules["torch._functorch.eager_transforms"], "_jvp_with_argnums", _refuse_forward_mode),
    _Refusing(sys.modules["torch.autograd.functional"], "_autograd_grad", _refuse_functional),
]
