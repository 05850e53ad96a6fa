"""Models whose weights stay in their safetensors files: built without memory for parameters, each of which is
then a `Stored` tensor that reads its numbers when an operator needs them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from psgrad.engine.execution.stored import Stored
from psgrad.engine.execution.weight_sources import InFile, WeightFile
from psgrad.engine.transforms.operators import is_random
from psgrad.engine.transforms.private_torch import (
    DispatchMode,
    Replacement,
    load_hooks,
    load_method,
    parameter_store,
    tree_leaves,
)
from psgrad.engine.transforms.tracer import tensors_in
from psgrad.models.checkpoint_files import checkpoint_kind, shards_of, tensor_kinds

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}


def tensors_in_files(path: Path) -> dict[str, Tensor] | None:
    """The tensors of a safetensors file, or of the shards of an index, by name, none of which is read yet;
    None for a checkpoint of another kind, and for one with tensors of another type or place than operators
    can read.

    Raises ConfigError and CheckpointError for a file that is no whole checkpoint.
    """
    if checkpoint_kind(path) not in ("safetensors", "index"):
        return None
    kinds = tensor_kinds(path)
    if any(dtype not in _DTYPES for dtype, _ in kinds.values()):
        return None
    found: dict[str, Tensor] = {}
    for file, names in shards_of(path).items():
        begins, offsets = _offsets(file)
        weights = WeightFile(file)
        for name in offsets if names is None else names:
            dtype, shape = kinds[name]
            source = InFile(weights, begins + offsets[name], shape, _DTYPES[dtype])
            found[name] = Stored(source, _DTYPES[dtype])
    return found


def _offsets(file: Path) -> tuple[int, dict[str, int]]:
    """(where the numbers begin, name -> the first byte from there on), which the library does not tell.
    Source: the file format, https://github.com/huggingface/safetensors#format.
    """
    with file.open("rb") as opened:
        size = int.from_bytes(opened.read(8), "little")
        header = json.loads(opened.read(size))
    return 8 + size, {
        name: each["data_offsets"][0] for name, each in header.items() if name != "__metadata__"
    }


def built_without_memory(build: Callable[[], nn.Module]) -> nn.Module | None:
    """The model that `build` makes, its parameters without memory or numbers; None where one without memory
    might not be the same: where what the checkpoint does not have depends on a parameter's numbers, or may
    depend on random numbers.
    """
    watch = _Draws()  # type: ignore[no-untyped-call]
    try:
        with torch.random.fork_rng(devices=[]), _EMPTY_PARAMETERS, watch:
            model = build()
    except Exception:  # it reads numbers that are not there; built with memory it fails with its own words
        return None
    saved = model.state_dict().keys()
    others = [buffer for name, buffer in model.named_buffers() if name not in saved]
    others += plain_tensors(model)
    if any(each.is_meta for each in (*model.buffers(), *others)):
        return None
    if watch.drew and (others or watch.read):
        return None
    return None if any(_loads_in_its_own_way(module) for module in model.modules()) else model


def fill_from_files(model: nn.Module, tensors: Mapping[str, Tensor]) -> set[str]:
    """Gives each parameter without memory its tensor from a file, by name, as the type that the model has.
    Returns the names of those that have one now.

    tensors: from each name of a parameter to what is stored for it, of the same shape.
    """
    places = [
        (f"{path}.{name}".lstrip("."), module, name, parameter)
        for path, module in model.named_modules(remove_duplicate=False)
        for name, parameter in parameter_store(module).items()
        if parameter is not None and parameter.is_meta
    ]
    made = {id(old): _parameter(tensors[full], old) for full, _, _, old in places if full in tensors}
    for _, module, name, old in places:
        if id(old) in made:
            setattr(module, name, made[id(old)])
    return {full for full, _, _, old in places if id(old) in made}


def _parameter(stored: Tensor, wanted: nn.Parameter) -> nn.Parameter:
    """The parameter with the numbers that a copy into the wanted one has."""
    exact = torch.promote_types(stored.dtype, wanted.dtype) == wanted.dtype  # widening, if anything
    if isinstance(stored, Stored) and exact:
        value: Tensor = Stored(stored.source, wanted.dtype)
    else:
        value = stored.to(wanted.dtype)
    return nn.Parameter(value, requires_grad=wanted.requires_grad)


class _Draws(DispatchMode):  # type: ignore[no-untyped-call]
    """Notes whether an operator draws random numbers into memory, and whether a number is read."""

    drew = read = False

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = op(*args, **(kwargs or {}))
        self.read |= op is torch.ops.aten._local_scalar_dense.default
        if is_random(op, args, kwargs or {}):
            results = result if isinstance(result, (tuple, list)) else [result]
            self.drew |= any(not each.is_meta for each in tensors_in(results, {}))
        return result


def _registering_empty(register: Callable[..., None]) -> Callable[..., None]:
    """nn.Module.register_parameter, after which the parameter has no memory."""

    def register_parameter(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        register(module, name, param)
        if type(param) is nn.Parameter and not param.is_meta:
            empty = nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)
            empty.__dict__.update(vars(param))
            parameter_store(module)[name] = empty

    return register_parameter


_EMPTY_PARAMETERS = Replacement((nn.Module, "register_parameter"), _registering_empty)


def plain_tensors(model: nn.Module) -> Iterator[Tensor]:
    """Tensors that modules hold as plain attributes."""
    for module in model.modules():
        held = {
            name: value for name, value in vars(module).items() if name not in ("_parameters", "_buffers")
        }
        yield from (each for each in tree_leaves(held) if type(each) is Tensor)


def _loads_in_its_own_way(module: nn.Module) -> bool:
    """Whether a module may change a state dict on its way in; PyTorch's only add a count of batches."""
    kind = type(module)
    own = load_method(kind) is not load_method(nn.Module) and not kind.__module__.startswith("torch.nn.")
    return own or bool(load_hooks(module))
