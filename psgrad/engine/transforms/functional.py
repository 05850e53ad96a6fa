"""functional_call: a module as a pure function of its parameters and buffers; stack_module_state: the stacked
parameters and buffers of several modules.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from psgrad.engine.transforms.private_torch import buffer_store, parameter_store
from psgrad.errors import TransformArgumentError, TransformError

# What GroupNorm, BatchNorm and other layers that need a batch axis say of an input without one.
_DIMENSIONS = re.compile(r"(?i)\bexpected .*(dimension|\dD\b)")
_NO_BATCH_AXIS = (
    "functional_call: the loss of one sample has no batch axis, which this layer may need. Call the model"
    " with x[None], and take [0] of its output or give the target as y[None]."
)


def functional_call(
    module: nn.Module,
    parameter_and_buffer_dicts: Mapping[str, torch.Tensor] | Sequence[Mapping[str, torch.Tensor]],
    args: Any = None,
    kwargs: Mapping[str, Any] | None = None,
    *,
    tie_weights: bool = True,
    strict: bool = False,
) -> Any:
    """`module(*args, **kwargs)` with tensors in place of its parameters and buffers, as torch.func's.

    Args:
        parameter_and_buffer_dicts: name -> tensor, or several dicts of this kind without common names. If the
            module replaces one of its tensors, a single dict holds the new tensor afterwards.
        args: a tuple of positional arguments; any other value is the only argument.
        tie_weights: whether a tensor for one name of a tied parameter is used for all its names.
        strict: whether exactly the module's names must be given.

    The module is restored when the call returns, also after an exception. During the call it holds the other
    tensors: each thread needs a module of its own.
    """
    values = _merged(parameter_and_buffer_dicts)
    arguments = () if args is None else args if isinstance(args, tuple) else (args,)
    names = _own_names(module) if strict or tie_weights else {}
    if tie_weights:
        values = _tied(names, values)
    if strict:
        missing, unexpected = sorted(set(names) - set(values)), sorted(set(values) - set(names))
        if missing or unexpected:
            raise TransformError(
                f"functional_call(strict=True): missing {missing}, unexpected {unexpected}; expected"
                " exactly the module's parameters and buffers",
            )
    slots = slots_of(module, values)
    with swapped(slots, values):
        try:
            return module(*arguments, **(kwargs or {}))
        except (RuntimeError, ValueError) as error:
            if _DIMENSIONS.search(str(error)):
                error.add_note(_NO_BATCH_AXIS)
            raise
        finally:
            # a module may replace a buffer: self.steps = self.steps + 1
            if isinstance(parameter_and_buffer_dicts, dict):
                left = {slot.name: slot.store[slot.key] for slot in slots if slot.key in slot.store}
                parameter_and_buffer_dicts.update(
                    {name: left[name] for name in parameter_and_buffer_dicts if name in left}
                )


def stack_module_state(
    models: Sequence[nn.Module],
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The parameters and the buffers of models of one class, each stacked along a new first axis: an ensemble
    for `vmap`.

    Returns (name -> [models, *shape] parameters, the same for buffers), as torch.func's: new leaves that
    require a gradient where the models' own do.
    """
    models = list(models)
    for wrong, what in (
        (not models, "at least one model, got 0."),
        (len({model.training for model in models}) > 1, "all models to have the same training/eval mode."),
        (len({type(model) for model in models}) > 1, "all models to be of the same class."),
    ):
        if wrong:
            raise TransformError(f"stack_module_state: Expected {what}")
    parameters = {
        name: _stacked([dict(m.named_parameters())[name] for m in models], name)
        for name, _ in models[0].named_parameters()
    }
    buffers = {
        name: _stacked([dict(m.named_buffers())[name] for m in models], name)
        for name, _ in models[0].named_buffers()
    }
    return parameters, buffers


def _stacked(tensors: Sequence[torch.Tensor], name: str) -> torch.Tensor:
    if any(t.requires_grad != tensors[0].requires_grad for t in tensors):
        raise TransformError(
            f"stack_module_state: Expected {name} to have the same .requires_grad for all models"
        )
    if any(t.shape != tensors[0].shape for t in tensors):
        raise TransformError(f"stack_module_state: Expected {name} to have the same shape for all models")
    return torch.stack([t.detach() for t in tensors]).requires_grad_(tensors[0].requires_grad)


def _merged(dicts: Any) -> dict[str, torch.Tensor]:
    if isinstance(dicts, Mapping):
        return dict(dicts)
    if not isinstance(dicts, Sequence) or not all(isinstance(d, Mapping) for d in dicts):
        raise TransformArgumentError(
            "Expected parameter_and_buffer_dicts to be a dict, or a list/tuple of dicts, but got"
            f" {type(dicts)}"
        )
    merged: dict[str, torch.Tensor] = {}
    for d in dicts:
        repeated = sorted(set(d) & set(merged))
        if repeated:
            raise TransformArgumentError(
                f"{repeated} appeared in multiple dictionaries; behavior of functional call is ambiguous"
            )
        merged.update(d)
    return merged


def _own_names(module: nn.Module) -> dict[str, torch.Tensor]:
    """Name -> tensor for all parameters and buffers, also those of modules that are in several places."""
    return {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }


def _tied(names: dict[str, torch.Tensor], values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    groups: dict[int, list[str]] = {}
    for name, tensor in names.items():
        groups.setdefault(id(tensor), []).append(name)
    full = dict(values)
    for group in groups.values():
        given = [name for name in group if name in values]
        if len(group) > 1 and given:
            if any(values[name] is not values[given[0]] for name in given):
                raise TransformArgumentError(
                    f"functional_call got multiple values for keys {sorted(given)}, which are tied. Consider"
                    " using tie_weights=False"
                )
            full.update(dict.fromkeys(group, values[given[0]]))
    return full


class Slot(NamedTuple):
    """One place where a module stores a parameter or buffer, and the name of the tensor to store there."""

    owner: nn.Module
    store: dict[str, Any]
    key: str
    name: str


def slots_of(module: nn.Module, names: Iterable[str]) -> list[Slot]:
    """The slots of the module's parameters and buffers of these names."""
    slots = []
    owners: dict[str, nn.Module] = {}
    for name in names:
        path, _, key = name.rpartition(".")
        owner = owners.get(path)
        if owner is None:
            try:
                owner = owners[path] = module.get_submodule(path)
            except AttributeError as error:
                raise TransformError(
                    f"functional_call: the module has no part named {path!r} (for {name!r})"
                ) from error
        stores = parameter_store(owner), buffer_store(owner)
        store: dict[str, Any] | None = next((candidate for candidate in stores if key in candidate), None)
        if store is None and isinstance(owner.__dict__.get(key), torch.Tensor):
            store = owner.__dict__  # a tensor that is not registered
        if store is None:
            raise TransformArgumentError(
                f"functional_call: {name!r} is neither a parameter nor a buffer of the module",
                hint="compare the names with module.named_parameters() and module.named_buffers()",
            )
        slots.append(Slot(owner, store, key, name))
    return slots


def tied_slots(module: nn.Module, names: Iterable[str]) -> list[Slot]:
    """The slots of these names, and of all other names of the same tensors."""
    own = _own_names(module)
    aliases: dict[int, list[str]] = {}
    for name, tensor in own.items():
        aliases.setdefault(id(tensor), []).append(name)
    return [slot._replace(name=name) for name in names for slot in slots_of(module, aliases[id(own[name])])]


@contextmanager
def swapped(slots: Sequence[Slot], values: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Store tensors in place of a module's own, and restore these at the end."""
    # Recurrent layers store a second list of their weights, and PyTorch 2.13 weak references to these, which
    # a run of the layer makes anew where they are of other tensors.
    recurrent = [s.owner for s in slots if "_flat_weights_names" in s.owner.__dict__]
    lists = ("_flat_weights", "_flat_weight_refs")
    own_lists = [(layer, {k: layer.__dict__[k] for k in lists if k in layer.__dict__}) for layer in recurrent]
    own_values = [slot.store[slot.key] for slot in slots]
    before = current_swaps()
    try:
        _running.swaps = (*before, (slots, values))
        for slot in slots:
            slot.store[slot.key] = values[slot.name]
        for layer in recurrent:
            layer.__dict__["_flat_weights"] = [
                getattr(layer, n) if n is not None else None for n in layer.__dict__["_flat_weights_names"]
            ]
        yield
    finally:
        _running.swaps = before
        for slot, value in zip(slots, own_values, strict=True):
            slot.store[slot.key] = value
        for layer, weights in own_lists:
            layer.__dict__.update(weights)


Swaps = tuple[tuple[Sequence[Slot], Mapping[str, torch.Tensor]], ...]


class _Running(threading.local):
    swaps: Swaps = ()


_running = _Running()


def current_swaps() -> Swaps:
    """The tensors that are swapped in now, for a function that runs again later."""
    return _running.swaps


@contextmanager
def swapped_again(swaps: Swaps) -> Iterator[None]:
    with ExitStack() as exits:
        for slots, values in swaps:
            exits.enter_context(swapped(slots, values))
        yield
