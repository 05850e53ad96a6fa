"""functional_call: a module as a pure function of its parameters and buffers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from psgrad.errors import TransformError


def functional_call(
    module: nn.Module,
    parameter_and_buffer_dicts: Mapping[str, torch.Tensor] | Sequence[Mapping[str, torch.Tensor]],
    args: Any = None,
    kwargs: Mapping[str, Any] | None = None,
    *,
    tie_weights: bool = True,
    strict: bool = False,
) -> Any:
    """`module(*args, **kwargs)` with tensors in the place of its parameters and buffers, as torch.func's.

    Args:
        parameter_and_buffer_dicts: name -> tensor, or several such dicts without common names.
        args: a tuple of positional arguments; anything else is taken as the only one.
        tie_weights: a tensor given for one name of a tied parameter stands for all its names.
        strict: whether all names must be given, and no others.

    The module is as before when the call returns, also after an exception.
    """
    values = _merged(parameter_and_buffer_dicts)
    arguments = () if args is None else args if isinstance(args, tuple) else (args,)
    names = _own_names(module)
    if strict:
        missing, unexpected = sorted(set(names) - set(values)), sorted(set(values) - set(names))
        if missing or unexpected:
            raise TransformError(
                f"functional_call(strict=True): missing {missing}, unexpected {unexpected}",
                expected="exactly the module's parameters and buffers",
            )
    if tie_weights:
        values = _tied(names, values)
    with _swapped(module, values):
        return module(*arguments, **(kwargs or {}))


def _merged(dicts: Any) -> dict[str, torch.Tensor]:
    if isinstance(dicts, Mapping):
        return dict(dicts)
    if not isinstance(dicts, Sequence) or not all(isinstance(d, Mapping) for d in dicts):
        raise ValueError(f"Expected parameter_and_buffer_dicts to be a dict, or a list/tuple of dicts, but got {type(dicts)}")
    merged: dict[str, torch.Tensor] = {}
    for d in dicts:
        repeated = sorted(set(d) & set(merged))
        if repeated:
            raise ValueError(f"{repeated} appeared in multiple dictionaries; behavior of functional call is ambiguous")
        merged.update(d)
    return merged


def _own_names(module: nn.Module) -> dict[str, torch.Tensor]:
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
                raise ValueError(
                    f"functional_call got multiple values for keys {sorted(given)}, which are tied. Consider using tie_weights=False"
                )
            full.update(dict.fromkeys(group, values[given[0]]))
    return full


@contextmanager
def _swapped(module: nn.Module, values: dict[str, torch.Tensor]) -> Iterator[None]:
    """Puts the tensors where the module keeps its own, and afterwards its own back."""
    undo: list[tuple[dict[str, Any], str, Any]] = []
    flattened: list[tuple[Any, list[Any]]] = []
    try:
        for path, value in values.items():
            owner, _, name = path.rpartition(".")
            try:
                submodule = module.get_submodule(owner)
            except AttributeError as error:
                raise TransformError(f"functional_call: the module has no part named {owner!r} (for {path!r})") from error
            store = next((s for s in (submodule._parameters, submodule._buffers) if name in s), None)
            if store is None:
                raise TransformError(
                    f"functional_call: {path!r} is neither a parameter nor a buffer of the module",
                    next_step="compare the names with dict(module.named_parameters()) and dict(module.named_buffers())",
                )
            undo.append((store, name, store[name]))
            store[name] = value
            if hasattr(submodule, "_flat_weights_names") and not any(m is submodule for m, _ in flattened):
                flattened.append((submodule, submodule._flat_weights))
        for recurrent, _ in flattened:  # recurrent layers keep a second list of their weights
            recurrent.__dict__["_flat_weights"] = [getattr(recurrent, n) if n is not None else None for n in recurrent._flat_weights_names]
        yield
    finally:
        for recurrent, own in flattened:
            recurrent.__dict__["_flat_weights"] = own
        for store, name, own_value in reversed(undo):
            store[name] = own_value
