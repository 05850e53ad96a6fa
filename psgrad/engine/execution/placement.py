"""Where a model's weights are kept, and in which type.

The place is the device, or where they are: commands/weight_placement.py chooses.
The type: parameters that are differentiated have the engine's, the others the one that they are stored in.
A frozen weight in half precision stays so. Operators get it in the engine's type: each widens it for as long
as it runs, and only the narrow one is kept for the backward pass. Widening is exact, so the numbers are those
of a model that was widened as a whole. Offloaded weights stay where they are, too (see stored.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from psgrad.engine.execution.stored import Stored, as_stored
from psgrad.engine.execution.weight_sources import InMemory, Quantised
from psgrad.engine.execution.weight_supply import Supply
from psgrad.engine.transforms.private_torch import buffer_store, parameter_store

_NARROW = (torch.float16, torch.bfloat16)
_PLAIN = (*_NARROW, torch.float32, torch.float64)


def place(
    model: nn.Module,
    device: torch.device,
    dtype: torch.dtype,
    frozen: str,
    supply: Supply | None = None,
    *,
    trained_too: bool = True,
) -> nn.Module:
    """The model itself, ready for the device: parameters that require a gradient and buffers in `dtype`,
    frozen parameters as `frozen` says: 'as-saved', 'float32' or 'bfloat16'.

    Those as saved are float64 where `dtype` is. Parameters that are no plain tensors (quantised ones) keep
    their bits, and live on the device.

    supply: brings offloaded parameters to the device when operators need them; None moves all there at once.
    trained_too: whether those that require a gradient are offloaded, too. They can't be written to then.
    """
    if supply is None:
        with _without_quantised(model):
            model.to(device)
    _place_buffers(model, device, dtype)
    made: dict[int, nn.Parameter] = {}
    for module in list(model.modules()):
        for name, parameter in list(parameter_store(module).items()):
            if parameter is None:
                continue
            if id(parameter) not in made:
                own = supply if trained_too or not parameter.requires_grad else None
                made[id(parameter)] = _placed(parameter, device, dtype, frozen, own)
            if made[id(parameter)] is not parameter:
                setattr(module, name, made[id(parameter)])  # recurrent layers keep a second list of theirs
    return model


@contextmanager
def _without_quantised(model: nn.Module) -> Iterator[None]:
    """Inside, the model has none of its quantised weights: `Module.to` would move their numbers."""
    stores = [parameter_store(module) for module in model.modules()]
    held = [(store, name, each) for store in stores for name, each in store.items() if is_quantised(each)]
    for store, name, _ in held:
        store[name] = None
    try:
        yield
    finally:
        for store, name, each in held:
            store[name] = each


def _place_buffers(model: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Move the buffers; one that several modules share stays one."""
    moved: dict[int, Tensor] = {}
    for module in model.modules():
        buffers = buffer_store(module)
        for name, buffer in buffers.items():
            if buffer is None:
                continue
            if id(buffer) not in moved:
                there = buffer.to(device, dtype if buffer.dtype in _PLAIN else buffer.dtype)
                moved[id(buffer)] = _with_data(buffer, there)
            buffers[name] = moved[id(buffer)]


def _with_data(tensor: Tensor, data: Tensor) -> Tensor:
    """The tensor itself with these data, or the data where its kind of memory is not compatible with them."""
    try:
        tensor.data = data
    except RuntimeError:
        return data
    return tensor


def _placed(
    parameter: nn.Parameter, device: torch.device, dtype: torch.dtype, frozen: str, supply: Supply | None
) -> nn.Parameter:
    if is_quantised(parameter):
        stored: Any = parameter.detach()
        return nn.Parameter(Stored(stored.source.to(device), dtype), requires_grad=False)
    if not is_plain(parameter):
        parameter.data = parameter.data.to(device)
        return parameter
    narrow = narrowed_to(parameter, dtype, frozen)
    data = parameter.detach()
    if supply is not None:
        found = _offloaded(data, narrow, dtype, supply)
        if found is not None:
            return nn.Parameter(found, requires_grad=parameter.requires_grad)
    data = as_stored(data).to(device)
    if narrow is not None:
        return nn.Parameter(Stored(InMemory(data.to(narrow)), dtype), requires_grad=False)
    data = data.to(dtype)
    if isinstance(parameter.data, Stored) or parameter.device != data.device:
        return nn.Parameter(data, requires_grad=parameter.requires_grad)
    parameter.data = data
    return parameter


def is_plain(parameter: nn.Parameter) -> bool:
    """Whether a parameter is an ordinary tensor of floating-point numbers, wherever they lie; a quantised one
    is none.
    """
    plain = type(parameter) in (nn.Parameter, Stored) and type(parameter.data) in (Tensor, Stored)
    return plain and parameter.dtype in _PLAIN and not is_quantised(parameter)


def is_quantised(tensor: Tensor | None) -> bool:
    """Whether a tensor's numbers are kept in fewer bits."""
    return isinstance(tensor, Stored) and isinstance(tensor.source, Quantised)


def narrowed_to(parameter: nn.Parameter, dtype: torch.dtype, frozen: str) -> torch.dtype | None:
    """The half precision that a frozen parameter is stored in; None for one that is stored as it is used."""
    kind = parameter.dtype
    if parameter.requires_grad or (frozen == "as-saved" and dtype == torch.float64):
        kind = dtype
    elif frozen != "as-saved":
        kind = getattr(torch, frozen)
    return kind if not parameter.requires_grad and kind in _NARROW else None


def _offloaded(
    data: Tensor, narrowed: torch.dtype | None, dtype: torch.dtype, supply: Supply
) -> Tensor | None:
    """The parameter, left where it is; None for one that is as well off on the device. narrowed: the type
    that it is rounded to.
    """
    if isinstance(data, Stored) and narrowed in (None, data.stored_dtype):
        return Stored(data.source, dtype, supply, data.view_of_source)
    host = as_stored(data)
    host = host.to(narrowed) if narrowed is not None else host if host.dtype in _NARROW else host.to(dtype)
    if supply.device.type == "cpu":
        return Stored(InMemory(host), dtype) if host.dtype != dtype else None
    if torch.empty_like(host, device="meta").stride() != host.stride():  # copies would have other strides
        return None
    return Stored(InMemory(host.pin_memory() if supply.device.type == "cuda" else host), dtype, supply)
