"""What a built model is, as hashes: of every tensor that it holds, by its type, its shape and its bytes, in
any layout and on any device; and of its modules' classes, modes and plain attributes.

The walk follows attributes, not `state_dict`: buffers that are not persistent, tensors in plain lists and a
dropout's p change what a model computes, too. What a function closes over is not followed; the files of code
are hashed in psgrad.run.identity.
"""

from __future__ import annotations

import hashlib
import io
import sys
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from enum import Enum
from functools import partial
from pathlib import PurePath
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from psgrad.run.identity import ModelIdentity
from psgrad.user_code import without_digest

_DIGITS = 32
_TEXTS = (type(None), bool, int, float, complex, str, bytes, np.generic, range, PurePath)
_PLAIN = (*_TEXTS, torch.dtype, torch.device)
# The attributes of every module are bookkeeping, but for the mode, hooks, and what `_walk` names.
_BOOKKEEPING = set(vars(nn.Module())) - {"training", "_forward_hooks", "_forward_pre_hooks"}
# Attributes that transformers and torch.compile make of Python's hash() and id(): another number in each
# process. And those that say how transformers has loaded the weights.
_OF_A_PROCESS = {
    "_original_object_hash",
    "_torchdynamo_wrapper_id",
    "_torchdynamo_orig_callable",
    "_is_hf_initialized",
    "_weight_conversions",
}


def identify(model: nn.Module) -> ModelIdentity:
    """The identity of a model as it is now: taken right after it was built, as a pass forward may change
    buffers and attributes. Tensors are read block by block, several at a time.
    """
    walk = _ModelWalk(model)
    with ThreadPoolExecutor() as pool:
        digests = pool.map(tensor_digest, walk.tensors.values())
        tensors = {name: each[:_DIGITS] for name, each in zip(walk.tensors, digests, strict=True)}
    modules = {
        name: hashlib.sha256("\n".join(lines).encode("utf-8", "backslashreplace")).hexdigest()[:_DIGITS]
        for name, lines in walk.lines.items()
    }
    return ModelIdentity(tensors, modules, tuple(sorted(walk.sources)))


class _ModelWalk:
    """All that a model holds, each object once: `tensors` by name, and `lines` of text for each module."""

    def __init__(self, model: nn.Module) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.lines: dict[str, list[str]] = {}
        self.sources: set[str] = set()
        self._met: dict[int, tuple[str, Any]] = {}  # with the object: an id is its own while it lives
        self._module("", model)

    def _module(self, name: str, module: nn.Module) -> None:
        self.sources |= {each.__module__ for each in type(module).__mro__}
        lines = self.lines[name] = [_class_name(type(module)), f"modules {', '.join(module._modules)}"]
        named: list[tuple[str, Any]] = []
        for each in (module.named_parameters, module.named_buffers):
            named += each(recurse=False, remove_duplicate=False)
        named += module._modules.items()
        kept = vars(module).items()
        named += [(key, value) for key, value in kept if key not in _BOOKKEEPING | _OF_A_PROCESS]
        for key, value in named:
            lines.append(f"{key} = {self._text(f'{name}.{key}'.lstrip('.'), value)}")

    def _text(self, name: str, value: Any) -> str:
        """A value as text that changes with it; what it holds is added, tensors and modules under their
        names.
        """
        if isinstance(value, Enum):
            return f"{_class_name(type(value))} {value.name}"
        if isinstance(value, _PLAIN):
            return f"{_class_name(type(value))} {value!r}"
        if isinstance(value, set | frozenset):
            return str(sorted(self._text(name, each) for each in value))
        if isinstance(value, ModuleType):
            return value.__name__
        if isinstance(value, type) or (callable(value) and hasattr(value, "__qualname__")):
            return _class_name(value)
        if id(value) in self._met:
            return f"the same as {self._met[id(value)][0]}"
        self._met[id(value)] = name, value
        if isinstance(value, Tensor):
            self.tensors[name] = value
            return f"a tensor, requires_grad {value.requires_grad}"
        if isinstance(value, nn.Module):
            self._module(name, value)
            return "a module"
        words = [
            f"{key}: {self._text(f'{name}.{key}', child)}"
            for key, child in _inside(value)
            if key not in _OF_A_PROCESS
        ]
        return f"{_class_name(type(value))} {words}"


def _inside(value: Any) -> list[tuple[str, Any]]:
    """(name, part) of what a container holds, or an object of the user's: those of Python and of PyTorch's
    inner parts hold locks and counters of a process.
    """
    if isinstance(value, Mapping):
        return sorted(((str(key), child) for key, child in value.items()), key=lambda pair: pair[0])
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        return [("numbers", f"{value.dtype} {value.shape} {hashlib.sha256(value.tobytes()).hexdigest()}")]
    if isinstance(value, list | tuple | deque | np.ndarray):
        return [(str(place), child) for place, child in enumerate(value)]
    if isinstance(value, partial):
        return [("function", value.func), ("arguments", value.args), ("keywords", value.keywords)]
    module = type(value).__module__
    inner = module.partition(".")[0] in sys.stdlib_module_names or module.startswith("torch._")
    if inner and not isinstance(value, SimpleNamespace):
        return []
    slots = [name for kind in type(value).__mro__ for name in _names(getattr(kind, "__slots__", ()))]
    there = {name: getattr(value, name) for name in slots if name[:2] != "__" and hasattr(value, name)}
    return sorted((there | getattr(value, "__dict__", {})).items())


def _names(slots: Any) -> tuple[str, ...]:
    return (slots,) if isinstance(slots, str) else tuple(slots)


def _class_name(kind: Any) -> str:
    module = without_digest(str(getattr(kind, "__module__", "")))
    return f"{module}.{getattr(kind, '__qualname__', type(kind).__name__)}"


# Bytes that are copied at once from another device, or out of a tensor that is not contiguous.
_BLOCK_BYTES = 16 << 20


def tensor_digest(tensor: Tensor) -> str:
    """The SHA-256 of a tensor's type, shape and bytes; without bytes (meta) of type and shape alone. Of a
    tensor that is not strided, or that wraps others, it is that of the file that torch.save makes.
    """
    tensor = tensor.detach()
    wraps = hasattr(tensor, "__tensor_flatten__") or tensor.is_quantized or tensor.is_nested
    if wraps or tensor.layout != torch.strided:
        file = io.BytesIO()
        torch.save(tensor, file)
        return hashlib.sha256(file.getvalue()).hexdigest()
    found = hashlib.sha256(f"{tensor.dtype} {list(tensor.shape)} {tensor.is_meta}".encode())
    for block in () if tensor.is_meta else _blocks(tensor, _BLOCK_BYTES):
        plain = block.cpu().resolve_conj().resolve_neg().contiguous()
        # Not view(-1): one number may have any stride.
        found.update(plain.as_strided((plain.numel(),), (1,)).view(torch.uint8).numpy().data)
    return found.hexdigest()


def _blocks(tensor: Tensor, size: int) -> Iterator[Tensor]:
    """The tensor in pieces of at most `size` bytes, its numbers in their order; none without numbers."""
    most = max(1, size // tensor.element_size())
    if tensor.numel() == 0:
        return
    if tensor.numel() <= most or tensor.dim() == 0:
        yield tensor
    elif tensor.is_contiguous():
        yield from torch.split(tensor.view(-1), most)
    else:
        rows = most // max(1, tensor[0].numel())
        for part in torch.split(tensor, max(1, rows)):
            yield from _blocks(part if rows else part[0], size)
