"""Where a model's parameters live, and in which type: those that are differentiated in the engine's, the
others in the type that they are stored in.

A frozen weight in half precision stays so. Operators see it in the engine's type: each widens it for as long
as it runs, and only the narrow one is kept for the backward pass. Widening is exact, so the numbers are those
of a model that was widened as a whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from psgrad.engine.transforms.private_torch import (
    make_wrapper,
    no_torch_function,
    parameter_store,
    schema_of,
    tree_map,
)
from psgrad.errors import ModelError

_NARROW = (torch.float16, torch.bfloat16)
_PLAIN = (*_NARROW, torch.float32, torch.float64)
_aten = torch.ops.aten
# What only looks at a weight: a view of the narrow one is kept, and widened where it is used.
_VIEWS = {
    _aten.alias.default,
    _aten.detach.default,
    _aten.expand.default,
    _aten.permute.default,
    _aten.select.int,
    _aten.slice.Tensor,
    _aten.squeeze.dim,
    _aten.t.default,
    _aten.transpose.int,
    _aten.unsqueeze.default,
    _aten.view.default,
}


def place(model: nn.Module, device: torch.device, dtype: torch.dtype, frozen: str) -> nn.Module:
    """The model itself on the device: parameters that require a gradient and buffers in `dtype`, frozen
    parameters as `frozen` says: 'as-saved', 'float32' or 'bfloat16'.

    Those as saved are float64 where `dtype` is. Parameters that are no plain tensors (quantised ones) keep
    their type.
    """
    model.to(device)
    for buffer in model.buffers():
        if buffer.dtype in _PLAIN:
            buffer.data = buffer.data.to(dtype)
    made: dict[int, nn.Parameter] = {}
    for module in list(model.modules()):
        for name, parameter in list(parameter_store(module).items()):
            if parameter is None:
                continue
            if id(parameter) not in made:
                made[id(parameter)] = _placed(parameter, dtype, frozen)
            if made[id(parameter)] is not parameter:
                setattr(module, name, made[id(parameter)])  # recurrent layers keep a second list of theirs
    return model


def _placed(parameter: nn.Parameter, dtype: torch.dtype, frozen: str) -> nn.Parameter:
    plain = type(parameter) is nn.Parameter and type(parameter.data) is Tensor
    if not plain or parameter.dtype not in _PLAIN:
        return parameter
    kind = parameter.dtype
    if not parameter.requires_grad and not (frozen == "as-saved" and dtype == torch.float64):
        kind = kind if frozen == "as-saved" else getattr(torch, frozen)
        if kind in _NARROW:
            stored = parameter.detach().to(kind)
            return nn.Parameter(Widened(stored, dtype), requires_grad=False)
    parameter.data = parameter.data.to(dtype)
    return parameter


class Widened(Tensor):
    """A constant that is stored in half precision, and that operators see in a wider type."""

    stored: Tensor

    __torch_function__ = no_torch_function  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, stored: Tensor, dtype: torch.dtype) -> Widened:
        return make_wrapper(  # type: ignore[no-any-return]
            cls,
            stored.shape,
            strides=stored.stride(),
            storage_offset=stored.storage_offset(),
            dtype=dtype,
            device=stored.device,
        )

    def __init__(self, stored: Tensor, dtype: torch.dtype) -> None:
        self.stored = stored

    @classmethod
    def __torch_dispatch__(cls, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if not all(issubclass(each, cls) or each in (Tensor, nn.Parameter) for each in types):
            return NotImplemented  # a traced tensor's level comes first
        kwargs = kwargs or {}
        if op in _VIEWS:
            return Widened(op(args[0].stored, *args[1:], **kwargs), args[0].dtype)
        if op is _aten._to_copy.default and set(kwargs) == {"dtype"} and kwargs["dtype"] in _PLAIN:
            return Widened(args[0].stored, kwargs["dtype"])
        if op is _aten.embedding.default and isinstance(args[0], Widened):
            return op(args[0].stored, *args[1:], **kwargs).to(args[0].dtype)
        if schema_of(op).is_mutable and any(
            _is_written(op, place, value) for place, value in enumerate(args)
        ):
            raise ModelError(
                f"the model writes into a frozen weight that is stored as {args[0].stored.dtype} ({op})",
                next_step="set model.dtype: float32",
            )
        return op(*tree_map(_widened, args), **tree_map(_widened, kwargs))

    def data_ptr(self) -> int:
        return self.stored.data_ptr()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Widened({self.stored!r}, dtype={self.dtype})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Widened:
        return Widened(self.stored.clone(), self.dtype)


def _widened(value: Any) -> Any:
    return value.stored.to(value.dtype) if isinstance(value, Widened) else value


def _is_written(op: Any, place: int, value: Any) -> bool:
    written = schema_of(op).arguments[place].alias_info
    return isinstance(value, Widened) and written is not None and written.is_write


def as_stored(tensor: Tensor) -> Tensor:
    """The tensor in the type that it is stored in; the tensor itself, but for a widened one."""
    return tensor.data.stored if isinstance(tensor.data, Widened) else tensor


def stored_in(model: nn.Module) -> Mapping[str, int]:
    """The types that the model's numbers are stored in -> how many numbers."""
    found: dict[str, int] = {}
    for parameter in model.parameters():
        kind = str(as_stored(parameter).dtype).removeprefix("torch.")
        found[kind] = found.get(kind, 0) + parameter.numel()
    return found
