"""What a model is, as hashes: of every tensor that it holds, and of all else that its modules hold.

The walk follows attributes, not `state_dict`: buffers that are not persistent, tensors and modules in plain lists, a dropout's p and the
mode change what a model computes, too.
"""

from __future__ import annotations

import hashlib
import sys
import types
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import Enum
from functools import partial
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from psgrad.inputs.imports import without_digest

# What is copied at once from another device, or out of a tensor that is not contiguous.
_BLOCK_BYTES = 16 << 20
_DIGITS = 32

_PLAIN = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    np.generic,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
    PurePath,
)
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType)
# Of the attributes that every module has these change what it computes; the rest is bookkeeping, in part by numbers of a process.
_COMPUTING = {"training", "_parameters", "_buffers", "_modules", "_forward_hooks", "_forward_pre_hooks"}
_BOOKKEEPING = set(vars(nn.Module())) - _COMPUTING
# Attributes that transformers and torch.compile make of Python's hash() and id(): another number in each process.
_OF_A_PROCESS = {"_original_object_hash", "_torchdynamo_wrapper_id", "_torchdynamo_orig_callable"}


@dataclass(frozen=True)
class ModelIdentity:
    """Hashes of a model, in hexadecimal.

    tensors: name -> of a tensor's type, shape and bytes; a shared one once. modules: name -> of a module's class, mode, hooks and
    attributes that are no modules; the model itself is ''. sources: the modules of Python that the classes of its modules are written in.
    """

    tensors: Mapping[str, str]
    modules: Mapping[str, str]
    sources: tuple[str, ...]

    @property
    def weights_sha256(self) -> str:
        """The hash of all tensors."""
        return _joined(self.tensors)

    @property
    def modules_sha256(self) -> str:
        """The hash of all that is no tensor."""
        return _joined(self.modules)


def identify(model: nn.Module) -> ModelIdentity:
    """The identity of a model as it is now: taken right after it was built, as a pass forward may change buffers and attributes.

    Tensors are read block by block on any device, several at a time. SHA-256 has instructions of its own on current processors, where it
    is twice as fast as BLAKE2.
    """
    walk = _Walk(model)
    with ThreadPoolExecutor() as pool:
        digests = list(pool.map(tensor_digest, walk.tensors.values()))
    modules = {name: hashlib.sha256("\n".join(lines).encode("utf-8", "backslashreplace")).hexdigest() for name, lines in walk.lines.items()}
    return ModelIdentity(
        {name: digest[:_DIGITS] for name, digest in zip(walk.tensors, digests, strict=True)},
        {name: digest[:_DIGITS] for name, digest in modules.items()},
        tuple(sorted(walk.sources)),
    )


def tensor_digest(tensor: Tensor) -> str:
    """The SHA-256 of a tensor's type, shape and bytes; of one without bytes (meta) of type and shape alone."""
    digest = hashlib.sha256()
    _feed(digest, tensor.detach())
    return digest.hexdigest()


def _feed(digest: Any, tensor: Tensor) -> None:
    digest.update(f"{tensor.dtype} {list(tensor.shape) if not tensor.is_nested else 'nested'} {tensor.layout}".encode())
    for part in _parts(tensor):
        if isinstance(part, Tensor):
            _feed(digest, part)
        else:
            digest.update(part.encode() if isinstance(part, str) else part)


def _parts(tensor: Tensor) -> Iterator[Tensor | str | memoryview]:
    """What a tensor is made of: plain tensors where it is a sparse or quantised one or a wrapper, else its bytes."""
    if hasattr(tensor, "__tensor_flatten__"):
        names, context = tensor.__tensor_flatten__()
        yield repr(context)
        yield from (getattr(tensor, name).detach() for name in names)
    elif tensor.is_meta:
        yield "meta"
    elif tensor.is_nested:
        yield from tensor.unbind()
    elif tensor.layout == torch.sparse_coo:
        yield from (tensor._indices(), tensor._values())
    elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        yield from (tensor.crow_indices(), tensor.col_indices(), tensor.values())
    elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        yield from (tensor.ccol_indices(), tensor.row_indices(), tensor.values())
    elif tensor.layout != torch.strided:
        yield tensor.to_dense()
    elif tensor.is_quantized:
        if tensor.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
            yield f"{tensor.qscheme()} {tensor.q_scale()!r} {tensor.q_zero_point()}"
        else:
            yield f"{tensor.qscheme()} {tensor.q_per_channel_axis()}"
            yield from (tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points())
        for block in _blocks(tensor):
            yield from _bytes(block.int_repr())
    else:
        for block in _blocks(tensor):
            yield from _bytes(block)


def _blocks(tensor: Tensor) -> Iterator[Tensor]:
    """The tensor in pieces, its numbers in their order."""
    most = max(1, _BLOCK_BYTES // tensor.element_size())
    if tensor.numel() <= most or tensor.dim() == 0:
        yield tensor
    elif tensor.is_contiguous() and not tensor.is_quantized:
        yield from torch.split(tensor.view(-1), most)
    else:
        rows = most // max(1, tensor[0].numel())
        for part in torch.split(tensor, max(1, rows)):
            yield from _blocks(part) if rows else _blocks(part[0])


def _bytes(block: Tensor) -> Iterator[memoryview]:
    if block.numel():
        plain = block.cpu().resolve_conj().resolve_neg().contiguous()
        yield plain.as_strided((plain.numel(),), (1,)).view(torch.uint8).numpy().data  # not view(-1): one number may have any stride


class _Walk:
    """All that a model holds, each object once: `tensors` by name, and `lines` of text for each module."""

    def __init__(self, model: nn.Module) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.lines: dict[str, list[str]] = {}
        self.sources: set[str] = set()
        self._met: dict[int, str] = {}
        self._alive: list[Any] = []  # an id stays an object's own for as long as it lives
        self._waiting: list[tuple[str, str, Any]] = [("", "", model)]  # no recursion: a list may be nested deeper than Python's stack
        while self._waiting:
            self._meet(*self._waiting.pop())

    def _meet(self, owner: str, name: str, value: Any) -> None:
        if isinstance(value, nn.Module) and id(value) not in self._met:
            owner = name
        lines = self.lines.setdefault(owner, [])
        text = _plain_text(value)
        if text is None and id(value) in self._met:
            text = f"the same as {self._met[id(value)]}"
        if text is not None:
            lines.append(f"{name} = {text}")
            return
        self._met[id(value)] = name
        self._alive.append(value)
        if isinstance(value, Tensor):
            self.tensors[name] = value
        if isinstance(value, nn.Module):
            self.sources |= {each.__module__ for each in type(value).__mro__}
        lines.append(f"{name} is {_description(value)}")
        self._waiting += [
            (owner, f"{name}.{key}" if name else key, child) for key, child in reversed(list(_children(value))) if key not in _OF_A_PROCESS
        ]


def _plain_text(value: Any) -> str | None:
    """A value that has no parts, as text; None for all others."""
    if isinstance(value, Enum):
        return f"{_class_name(type(value))} {value.name}"
    if isinstance(value, _PLAIN):
        return f"{_class_name(type(value))} {str.__str__(value) if isinstance(value, str) else repr(value)}"
    if isinstance(value, type | types.BuiltinFunctionType):
        return _class_name(value)
    if isinstance(value, types.ModuleType):
        return value.__name__
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        return f"{value.dtype} {value.shape} {hashlib.sha256(np.ascontiguousarray(value).data).hexdigest()}"
    if isinstance(value, set | frozenset):
        return str(sorted(_plain_text(each) or _class_name(type(each)) for each in value))
    if isinstance(value, list | tuple) and all(type(each) in _PLAIN for each in value):
        return f"{_class_name(type(value))} {list(value)!r}"
    return None


def _description(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{_class_name(type(value))}, requires_grad {value.requires_grad}"
    return _class_name(value if isinstance(value, types.FunctionType) else type(value))


def _children(value: Any) -> Iterator[tuple[str, Any]]:
    """(name, part) of all that an object holds, in an order of its own."""
    if isinstance(value, torch.jit.ScriptModule):  # it has its attributes in C++
        yield from (*value.named_parameters(recurse=False), *value.named_buffers(recurse=False), *value.named_children())
        yield from (("training", value.training), ("code", getattr(value, "code", None)))
    elif isinstance(value, nn.Module):
        for key, child in vars(value).items():
            if key in ("_parameters", "_buffers", "_modules"):
                yield from child.items()
            elif key in ("_forward_hooks", "_forward_pre_hooks"):
                yield from ((f"{key}.{place}", hook) for place, hook in enumerate(child.values()))
            elif key not in _BOOKKEEPING:
                yield key, child
    elif isinstance(value, Mapping):
        yield from sorted(((_plain_text(key) or _class_name(type(key)), child) for key, child in value.items()), key=lambda pair: pair[0])
    elif isinstance(value, list | tuple | np.ndarray):
        yield from ((str(place), child) for place, child in enumerate(value))
    elif isinstance(value, types.FunctionType):
        yield "defaults", value.__defaults__
        yield "keyword defaults", value.__kwdefaults__
        names = value.__code__.co_freevars
        yield from ((name, _content(cell)) for name, cell in zip(names, value.__closure__ or (), strict=True))
    elif isinstance(value, types.MethodType):
        yield from (("function", value.__func__), ("self", value.__self__))
    elif isinstance(value, partial):
        yield from (("function", value.func), ("arguments", value.args), ("keywords", value.keywords))
    elif isinstance(value, torch.ScriptObject):  # what quantised layers keep their packed weights in
        yield "state", value.__getstate__()
    elif not _is_machinery(type(value)):
        yield from sorted(vars(value).items()) if hasattr(value, "__dict__") else ()
        slots = [getattr(each, "__slots__", ()) for each in type(value).__mro__]
        listed = [name for each in slots for name in ([each] if isinstance(each, str) else each)]
        yield from ((name, getattr(value, name)) for name in listed if not name.startswith("__") and hasattr(value, name))


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty
        return None


def _is_machinery(kind: type) -> bool:
    """Whether objects of a class are tools of Python or PyTorch: locks, loggers, compilers. What they hold differs between processes."""
    package = kind.__module__.partition(".")[0]
    return kind.__module__.startswith("torch._") or (package in sys.stdlib_module_names and kind is not types.SimpleNamespace)


def _class_name(kind: Any) -> str:
    return f"{without_digest(str(getattr(kind, '__module__', '')))}.{getattr(kind, '__qualname__', type(kind).__name__)}"


def _joined(digests: Mapping[str, str]) -> str:
    return hashlib.sha256("\n".join(f"{name} {digests[name]}" for name in sorted(digests)).encode("utf-8", "backslashreplace")).hexdigest()
