"""What a model is, as hashes: of every tensor that it holds, by its type, its shape and its bytes, for every
layout, on any device; and of all else that its modules hold.

The walk follows attributes, not `state_dict`: buffers that are not persistent, tensors and modules in plain
lists, a dropout's p and the mode change what a model computes, too.
"""

from __future__ import annotations

import copyreg
import hashlib
import sys
import types
import warnings
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import Enum
from functools import _lru_cache_wrapper, partial
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from psgrad.engine.execution.stored import Stored
from psgrad.run.code_identity import is_installed
from psgrad.user_code import without_digest

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
# The attributes of every module that change what it computes. The others are bookkeeping, some with numbers
# that differ from process to process.
_COMPUTING = {"training", "_parameters", "_buffers", "_modules", "_forward_hooks", "_forward_pre_hooks"}
_BOOKKEEPING = set(vars(nn.Module())) - _COMPUTING
# Attributes that transformers and torch.compile make of Python's hash() and id(): another number in each
# process. And those that say how transformers has loaded the weights.
_OF_A_PROCESS = {
    "_original_object_hash",
    "_torchdynamo_wrapper_id",
    "_torchdynamo_orig_callable",
    "_is_hf_initialized",
    "_weight_conversions",
}


@dataclass(frozen=True)
class ModelIdentity:
    """Hashes of a model, in hexadecimal.

    tensors: name -> of a tensor's type, shape and bytes; a shared one once. modules: name -> of a module's
    class, mode, hooks and attributes that are no modules; the model itself is ''. sources: the modules of
    Python that the classes of its modules are written in.
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
    """The identity of a model as it is now: taken right after it was built, as a pass forward may change
    buffers and attributes.

    Tensors are read block by block on any device, several at a time. SHA-256 has instructions of its own on
    current processors, where it is twice as fast as BLAKE2.
    """
    walk = _ModelWalk(model)
    digests = _digests(walk.tensors)
    modules = {
        name: hashlib.sha256("\n".join(lines).encode("utf-8", "backslashreplace")).hexdigest()
        for name, lines in walk.lines.items()
    }
    return ModelIdentity(
        {name: digests[name][:_DIGITS] for name in walk.tensors},
        {name: digest[:_DIGITS] for name, digest in modules.items()},
        tuple(sorted(walk.sources)),
    )


def _digests(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    with ThreadPoolExecutor() as pool:
        return dict(zip(tensors, pool.map(tensor_digest, tensors.values()), strict=True))


class _ModelWalk:
    """All that a model holds, each object once: `tensors` by name, and `lines` of text for each module."""

    def __init__(self, model: nn.Module) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.lines: dict[str, list[str]] = {}
        self.sources: set[str] = set()
        self._visited: dict[int, str] = {}
        self._alive: list[Any] = []  # an id stays an object's own for as long as it lives
        # No recursion: a list may be nested deeper than Python's stack.
        self._waiting: list[tuple[str, str, Any]] = [("", "", model)]
        while self._waiting:
            self._visit(*self._waiting.pop())

    def _visit(self, owner: str, name: str, value: Any) -> None:
        if isinstance(value, nn.Module) and id(value) not in self._visited:
            owner = name
        lines = self.lines.setdefault(owner, [])
        text = _plain_text(value)
        if text is None and id(value) in self._visited:
            text = f"the same as {self._visited[id(value)]}"
        if text is not None:
            lines.append(f"{name} = {text}")
            return
        self._visited[id(value)] = name
        self._alive.append(value)
        if isinstance(value, Tensor):
            self.tensors[name] = value
        if isinstance(value, nn.Module):
            self.sources |= {each.__module__ for each in type(value).__mro__}
            lines.append(f"{name} has {', '.join(value._modules)}")  # in this order, which may matter
        if isinstance(value, type):
            self.sources.add(value.__module__)
        lines.append(f"{name} is {_description(value)}")
        self._waiting += [
            (owner, f"{name}.{key}" if name else key, child)
            for key, child in reversed(list(_children(value)))
            if key not in _OF_A_PROCESS
        ]


def _plain_text(value: Any) -> str | None:
    """A value that has no parts, as text; None for all others."""
    if isinstance(value, Enum):
        return f"{_class_name(type(value))} {value.name}"
    if isinstance(value, _PLAIN):
        return f"{_class_name(type(value))} {str.__str__(value) if isinstance(value, str) else repr(value)}"
    if isinstance(value, types.BuiltinFunctionType) or (isinstance(value, type) and not _has_a_body(value)):
        return _class_name(value)
    if isinstance(value, types.ModuleType):
        return value.__name__
    if isinstance(value, torch.Generator):
        return f"a generator {hashlib.sha256(value.get_state().numpy().data).hexdigest()}"
    if type(value) in (np.ndarray, np.memmap) and not value.dtype.hasobject:
        numbers = np.ascontiguousarray(value).reshape(-1)
        content = numbers.view(np.uint8).data if numbers.nbytes else b""
        return f"{value.dtype} {value.shape} {hashlib.sha256(content).hexdigest()}"
    if isinstance(value, set | frozenset):
        return str(sorted(_plain_text(each) or _class_name(type(each)) for each in value))
    if type(value) in (list, tuple, torch.Size) and all(type(each) in _PLAIN for each in value):
        return f"{_class_name(type(value))} {list(value)!r}"
    return None


def _description(value: Any) -> str:
    if isinstance(value, Tensor):
        kind = nn.Parameter if isinstance(value, Stored) else type(value)  # the same, wherever it is stored
        return f"{_class_name(kind)}, requires_grad {value.requires_grad}"
    return _class_name(value if isinstance(value, types.FunctionType | type) else type(value))


def _children(value: Any) -> Iterator[tuple[str, Any]]:
    """(name, part) of all that an object holds, in an order of its own."""
    if isinstance(value, Stored):
        return
    yield from _inside(value)
    if _has_a_body(type(value)):
        yield "its class", type(value)


def _inside(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, torch.jit.ScriptModule):  # it has its attributes in C++
        yield from value.named_parameters(recurse=False)
        yield from value.named_buffers(recurse=False)
        yield from value.named_children()
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
        named = ((_plain_text(key) or _class_name(type(key)), child) for key, child in value.items())
        yield from sorted(named, key=lambda pair: pair[0])
        yield from (*_attributes(value), ("what is missing", getattr(value, "default_factory", None)))
    elif isinstance(value, np.ndarray) and not value.dtype.hasobject:
        yield from (("numbers", np.asarray(value)), *_attributes(value))
    elif isinstance(value, list | tuple | np.ndarray):
        yield from (*((str(place), child) for place, child in enumerate(value)), *_attributes(value))
    elif isinstance(value, type):
        yield from ((f"its base {place}", base) for place, base in enumerate(value.__bases__))
        for key, child in sorted(vars(value).items()):
            if not key.startswith("__") or isinstance(child, _HOLD_CODE):
                yield key, child
    elif isinstance(value, types.FunctionType):
        yield from _of_function(value)
    elif isinstance(value, types.MethodType):
        yield from (("function", value.__func__), ("self", value.__self__))
    elif isinstance(value, partial):
        yield from (("function", value.func), ("arguments", value.args), ("keywords", value.keywords))
    elif isinstance(value, property):
        yield from (("get", value.fget), ("set", value.fset))
    elif isinstance(value, _WRAP_CODE):
        yield "function", value.__wrapped__
    elif type(value).__module__.partition(".")[0] == "torch":
        if isinstance(value, Tensor) or not type(value).__module__.startswith("torch._"):
            yield from _attributes(value)
    elif isinstance(value, torch.ScriptObject):  # what quantised layers keep their packed weights in
        yield "state", value.__getstate__()
    else:
        own = [] if _is_of_python(type(value)) else _attributes(value)
        yield from own or _reduced(value)


_WRAP_CODE = (staticmethod, classmethod, _lru_cache_wrapper)
_HOLD_CODE = (types.FunctionType, property, *_WRAP_CODE)


def _attributes(value: Any) -> list[tuple[str, Any]]:
    """(name, value) of an object's attributes, in slots too."""
    slots = [getattr(each, "__slots__", ()) for each in type(value).__mro__]
    listed = [name for each in slots for name in ([each] if isinstance(each, str) else each)]
    there = [name for name in listed if not name.startswith("__") and hasattr(value, name)]
    found = [(name, getattr(value, name)) for name in there]
    return [*sorted(getattr(value, "__dict__", {}).items()), *found]


def _of_function(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    yield from (("defaults", function.__defaults__), ("keyword defaults", function.__kwdefaults__))
    names = function.__code__.co_freevars
    yield from ((name, _content(cell)) for name, cell in zip(names, function.__closure__ or (), strict=True))
    yield from sorted(vars(function).items())
    if function.__code__.co_filename.startswith("<"):  # of no file, whose hash would tell
        yield "code", _code_text(function.__code__)


def _code_text(code: types.CodeType) -> str:
    constants = [
        _code_text(each) if isinstance(each, types.CodeType) else _plain_text(each) for each in code.co_consts
    ]
    return f"{code.co_code.hex()} {code.co_names} {constants}"


def _reduced(value: Any) -> Iterator[tuple[str, Any]]:
    """What an object without attributes would be stored as; nothing of a lock or a file."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # iterators can be stored, and will not be in a later Python
            reduce = copyreg.dispatch_table.get(type(value))
            found = value.__reduce_ex__(4) if reduce is None else reduce(value)
    except Exception:
        return
    if isinstance(found, str):
        yield "name", found
        return
    _, arguments, *rest = found
    yield "made of", arguments
    for kind, part in zip(("state", "items", "pairs"), rest, strict=False):
        if part is not None:
            yield kind, part if kind == "state" else list(part)


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty
        return None


def _is_of_python(kind: type) -> bool:
    """Whether a class is one of Python's library, whose attributes may be locks and counters of a process."""
    return kind.__module__.partition(".")[0] in sys.stdlib_module_names and kind is not types.SimpleNamespace


def _has_a_body(kind: type) -> bool:
    """Whether a class is the user's own: what it holds is not told by the version of a package. Members of an
    Enum are known by name.
    """
    module = sys.modules.get(kind.__module__)
    file = getattr(module, "__file__", None)
    if issubclass(kind, Enum) or kind.__module__.partition(".")[0] in ("psgrad", *sys.stdlib_module_names):
        return False
    return module is None or (file is not None and not is_installed(Path(file)))


def _class_name(kind: Any) -> str:
    module = without_digest(str(getattr(kind, "__module__", "")))
    return f"{module}.{getattr(kind, '__qualname__', type(kind).__name__)}"


def _joined(digests: Mapping[str, str]) -> str:
    lines = "\n".join(f"{name} {digests[name]}" for name in sorted(digests))
    return hashlib.sha256(lines.encode("utf-8", "backslashreplace")).hexdigest()


# Bytes that are copied at once from another device, or out of a tensor that is not contiguous.
_BLOCK_BYTES = 16 << 20


def tensor_digest(tensor: Tensor) -> str:
    """The SHA-256 of a tensor's type, shape and bytes; without bytes (meta) of type and shape alone."""
    digest = hashlib.sha256()
    _feed(digest, tensor.detach())
    return digest.hexdigest()


def _feed(digest: Any, tensor: Tensor) -> None:
    shape = "nested" if tensor.is_nested else list(tensor.shape)
    digest.update(f"{tensor.dtype} {shape} {tensor.layout}".encode())
    for part in _parts(tensor):
        if isinstance(part, Tensor):
            _feed(digest, part)
        else:
            digest.update(part.encode() if isinstance(part, str) else part)


def _parts(tensor: Tensor) -> Iterator[Tensor | str | memoryview]:
    """What a tensor is made of: its bytes, or plain tensors of a sparse one, a quantised one or a wrapper."""
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
        # Not view(-1): one number may have any stride.
        yield plain.as_strided((plain.numel(),), (1,)).view(torch.uint8).numpy().data
