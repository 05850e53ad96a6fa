"""PyTorch's own autograd inside a transform, and outside of one.

Inside, errors are raised for uses that would silently have no effect: a module's backward hooks, which
PyTorch skips if no tensor requires a gradient; torch.autograd.functional, which treats a tensor that does not
require a gradient as constant; and torch.func's forward mode, which would end the process.
torch.autograd.grad and .backward() raise errors by themselves (see Level.explained).

Outside, it may differentiate the result of a transform. PyTorch has no derivative of some kernels that
compute derivatives. Some results that its own derivatives use (the factors of a linear system, the mean of a
norm) are constant for its autograd, but psgrad's rules compute with them. These operators are replaced here.
Fused attention is not replaced: the derivative of its derivative is an error, as in PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from psgrad.engine.transforms import diagnostics
from psgrad.engine.transforms.derivatives import DerivativeLevel
from psgrad.engine.transforms.interpreter import autograd_replacements, not_replaced_if_empty
from psgrad.engine.transforms.levels import switches
from psgrad.engine.transforms.operators import aten
from psgrad.engine.transforms.private_torch import (
    AUTOGRAD_FUNCTIONAL,
    BACKWARD_HOOK,
    FORWARD_MODE,
    Replacement,
    decomposition_table,
)
from psgrad.engine.transforms.rules.grouped_matmul import grouped_mm, grouped_outer
from psgrad.engine.transforms.rules.registry import decompose
from psgrad.engine.transforms.state import state
from psgrad.engine.transforms.tracer import Tracer
from psgrad.errors import TransformError


def _refuse_hooks(hook: Any, function: Any, tensors: Any) -> None:
    followed = state.attached or any(isinstance(level, DerivativeLevel) for level in state.stack)
    if followed and torch.is_grad_enabled() and any(isinstance(x, Tracer) for x in tensors):
        raise TransformError(
            f"a backward hook of a module inside the transformed function{diagnostics.where()} would not run",
            hint="remove it, or write its change of the gradient as a torch.autograd.Function",
        )


def _refuse_functional(*args: Any, **kwargs: Any) -> None:
    if state.stack:
        raise TransformError(
            f"torch.autograd.functional inside the transformed function{diagnostics.where()}",
            hint="use transforms, which nest: jacrev, jacfwd, hessian, vjp, jvp",
        )


def _refuse_forward_mode(*args: Any, **kwargs: Any) -> None:
    if state.stack:
        raise TransformError(
            f"torch.func.jvp, jacfwd, hessian or linearize inside the transformed"
            f" function{diagnostics.where()}",
            hint="use the functions of the same name in psgrad.engine.transforms",
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


for _op in (
    aten.silu_backward.default,
    aten.mish_backward.default,
    aten.native_layer_norm.default,
    aten.native_layer_norm_backward.default,
    aten.native_group_norm_backward.default,
):
    autograd_replacements[_op] = decomposition_table[_op]
    not_replaced_if_empty.add(_op)
_attention_backward = torch.ops.psgrad.attention_backward_for_cpu.default
autograd_replacements[_attention_backward] = lambda *args, **kwargs: decompose(
    _attention_backward, args, kwargs
)
# The lookup operator for a table of weights that requires no gradient.
autograd_replacements[aten._embedding_bag_forward_only.default] = aten._embedding_bag.default


def _copy(x: torch.Tensor, source: Any, non_blocking: bool = False) -> torch.Tensor:
    if not isinstance(source, torch.Tensor):
        return torch.full_like(x, source)
    return source.to(x).expand(x.shape).clone()


def _solve(
    a: torch.Tensor, b: torch.Tensor, *, left: bool = True, check_errors: bool = False
) -> tuple[torch.Tensor, ...]:
    x, info = aten.linalg_solve_ex.default(a, b, left=left, check_errors=check_errors)
    lu, pivots, _ = aten.linalg_lu_factor_ex.default(a)
    return x, lu, pivots, info


def _grouped_mm(rows: torch.Tensor, matrices: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    *parts, behind = rows.tensor_split(ends.tolist())
    products = [part @ matrix for part, matrix in zip(parts, matrices, strict=True)]
    return torch.cat([*products, behind.new_zeros(behind.shape[0], matrices.shape[2])])


def _grouped_outer(left: torch.Tensor, right: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    stops = ends.tolist()
    parts = zip(left.tensor_split(stops)[:-1], right.tensor_split(stops)[:-1], strict=True)
    return torch.stack([some.t() @ others for some, others in parts])


autograd_replacements[grouped_mm] = _grouped_mm
autograd_replacements[grouped_outer] = _grouped_outer
autograd_replacements[aten.copy.default] = _copy
autograd_replacements[aten._linalg_solve_ex.default] = _solve
