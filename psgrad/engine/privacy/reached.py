"""Finds the objects that can be reached from some objects: attributes, containers, closures, defaults,
classes, and the globals that the user's code names.

The list of places is not complete; it has those where Python code usually keeps things. Not reached are the
globals of installed packages, and what an object keeps outside of Python (the position of an iterator, an
open file).
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import random
import site
import sys
import sysconfig
import types
import weakref
from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

# Libraries whose classes and functions hold no state of a user's model, or the interpreter's own.
_FOREIGN = (
    "torch",
    "builtins",
    "numpy",
    "collections",
    "logging",
    "threading",
    "psgrad",
    "abc",
    "typing",
    "functools",
    "enum",
    "pathlib",
)
# Libraries whose objects hold none either: a user's object may be one of the others, such as a
# torch.distributions.Normal or a UserDict.
_MACHINERY = ("builtins", "logging", "threading", "psgrad", "abc", "typing", "enum", "pathlib")
_REGISTERED = ("_parameters", "_buffers", "_modules")
_PLAIN = (str, bytes, int, float, complex, bool)
_CONTAINERS = (dict, list, tuple, set, frozenset, deque)
Cached = functools._lru_cache_wrapper
GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
Step = tuple[str, Any]


class Globals:
    """The globals of one module that some code of it names: `names` in `content`."""

    def __init__(self, content: dict[str, Any], names: Sequence[str]) -> None:
        self.content, self.names = content, names


def reached(roots: Sequence[object], most: int | None = None) -> Iterator[Step]:
    """(where, what) for each object that can be reached from the roots, these included, once; not text and
    numbers, and of modules the user's own, as `Globals`.

    A name that ends with a point is that of an object's attributes: what is in them is named with the point,
    what is in another container with brackets. most: containers with more parts than that are not looked
    into; None for no limit.
    """
    seen: dict[int, object] = {}  # the objects themselves, so that no other one gets their identity
    named: set[tuple[int, str]] = set()  # (of which module's content, which of its globals) were met
    waiting: list[Step] = [("" if place == 0 else f"root {place}", root) for place, root in enumerate(roots)]
    while waiting:
        where, value = waiting.pop()
        if id(value) in seen or value is None or type(value) in _PLAIN:
            continue
        seen[id(value)] = value
        if isinstance(value, types.ModuleType):
            if is_own(value):
                waiting.append((where, Globals(vars(value), sorted(vars(value)))))
            continue
        yield where.strip(".") or "the model", value
        if most is None or not isinstance(value, _CONTAINERS) or len(value) <= most:
            waiting += _parts(where, value)
        if isinstance(value, types.FunctionType) and is_own(value):
            for part in _globals_of(value):
                part.names = [name for name in part.names if (id(part.content), name) not in named]
                named.update((id(part.content), name) for name in part.names)
                if part.names:
                    waiting.append((f"the globals of {part.content.get('__name__', where)}", part))


def _parts(where: str, value: Any) -> list[Step]:
    """(where, what) of the parts of a value."""
    if isinstance(value, Globals):
        return [
            (f"the global {name}", value.content[name])
            for name in value.names
            if _is_followed(value.content.get(name))
        ]
    if isinstance(value, dict):
        if where.endswith("."):  # a module's parameters, buffers and modules are named as it names them
            return [(where if key in _REGISTERED else f"{where}{key}", item) for key, item in value.items()]
        return [(f"{where}[{key!r}]", item) for key, item in value.items()]
    if isinstance(value, _CONTAINERS):
        return [(f"{where}[{place}]", item) for place, item in enumerate(value)]
    if isinstance(value, np.ndarray):
        return [(where, item) for item in value.flat] if value.dtype == object else []
    if isinstance(value, type):
        if is_foreign(value):
            return []
        parts = [(f"{where}.{key}", item) for key, item in vars(value).items() if _is_of_the_user(key, item)]
        return [*parts, (f"{where}'s class", type(value))]
    if _is_unused_context(value):
        return [(f"{where}.{name}", getattr(value, name)) for name in ("func", "args", "kwds")]
    if isinstance(value, weakref.ReferenceType):
        return [(where, value())]
    if isinstance(value, ContextVar):
        return [(where, value.get(None))]
    if isinstance(value, types.CellType):
        return [(where, item) for item in attributes(value, ["cell_contents"]).values()]
    if isinstance(value, types.FunctionType):
        cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        defaults = (value.__defaults__, value.__kwdefaults__)
        parts = [
            *((f"{where}'s {name}", cell) for name, cell in cells),
            *((f"{where}'s defaults", item) for item in defaults),
        ]
        return [] if is_foreign(value) else [*parts, (f"{where}.", value.__dict__)]
    inside = [
        (where, getattr(value, name))
        for kind, names in _WRAPPERS.items()
        if isinstance(value, kind)
        for name in names
    ]
    if inside or (is_machinery(type(value)) and not isinstance(value, types.SimpleNamespace)):
        return inside
    slots = [(f"{where}.{key}", item) for key, item in attributes(value, slots_of(type(value))).items()]
    classes = [(f"{where}'s class", base) for base in type(value).__mro__]
    return [*slots, *classes, (f"{where}.", getattr(value, "__dict__", None))]


def _is_unused_context(value: Any) -> bool:
    """Whether a value is a context of contextlib's that was not entered. As a decorator it is made anew for
    each call, from its function; and entered, its generator is advanced, so that the next one to enter it
    fails.
    """
    return (
        isinstance(value, contextlib._GeneratorContextManager)
        and inspect.getgeneratorstate(value.gen) == inspect.GEN_CREATED
    )


# Containers of other objects, and their names.
_WRAPPERS: dict[type, tuple[str, ...]] = {
    types.MethodType: ("__self__", "__func__"),
    types.BuiltinMethodType: ("__self__",),  # such as the append of a list
    functools.partial: ("func", "args", "keywords"),
    functools.partialmethod: ("func", "args", "keywords"),
    functools.cached_property: ("func",),
    Cached: ("__wrapped__",),
    staticmethod: ("__func__",),
    classmethod: ("__func__",),
    property: ("fget", "fset", "fdel"),
}


def _is_of_the_user(key: str, item: Any) -> bool:
    """Whether a class attribute is the user's: names that begin with two underscores are Python's, except for
    methods and what wraps them.
    """
    return not key.startswith("__") or isinstance(item, (types.FunctionType, *_WRAPPERS))


def is_foreign(what: Any) -> bool:
    """Whether a class or a function is of a library whose own state is never a model's."""
    return _package(what) in _FOREIGN


def is_machinery(kind: type) -> bool:
    """Whether instances of a class are tools of Python, PyTorch or psgrad, without state of a model."""
    return not issubclass(kind, (nn.Module, Tensor)) and (
        _package(kind) in _MACHINERY or str(kind.__module__).startswith("torch._")
    )


def _package(what: Any) -> str:
    return str(getattr(what, "__module__", None) or "builtins").partition(".")[0]


def slots_of(kind: type) -> list[str]:
    """The names of the attributes that instances keep outside of a `__dict__`."""
    names: list[str] = []
    for base in () if is_foreign(kind) else kind.__mro__:
        own = base.__dict__.get("__slots__", ())
        names += [own] if isinstance(own, str) else own
    return [name for name in names if not name.startswith("__")]


def attributes(value: Any, names: Sequence[str]) -> dict[str, Any]:
    """The existing attributes of these names; of `Globals` the globals."""
    if isinstance(value, Globals):
        return {name: value.content[name] for name in names if name in value.content}
    result = {}
    for name in names:
        with suppress(AttributeError, ValueError, KeyError):  # an empty slot, an empty cell
            result[name] = value.__dict__[name] if isinstance(value, type) else getattr(value, name)
    return result


# -- Globals -------------------------------------------------------------------------------------------------


def is_own(what: Any) -> bool:
    """Whether a function, a class or a module is the user's own, and not of an installed package."""
    if isinstance(what, types.FunctionType):
        return not is_foreign(what) and not _is_installed(what.__code__.co_filename)
    if isinstance(what, type):
        module = sys.modules.get(what.__module__)
        return not is_foreign(what) and (module is None or is_own(module))
    file = getattr(what, "__file__", None)
    if file is None:
        return bool(what.__name__ == "__main__")  # of a notebook
    return what.__name__.partition(".")[0] not in _FOREIGN and not _is_installed(file)


def _is_followed(value: Any) -> bool:
    """Whether a global is data, or the user's own. Other objects of an installed package may be in use by
    other threads.
    """
    if isinstance(
        value,
        (
            *_CONTAINERS,
            *GENERATORS,
            *_WRAPPERS,
            Tensor,
            np.ndarray,
            nn.Module,
            bytearray,
            array,
            types.SimpleNamespace,
            weakref.ReferenceType,
            ContextVar,
        ),
    ):
        return True
    return is_own(value if isinstance(value, (type, types.FunctionType)) else type(value))


def _globals_of(function: types.FunctionType) -> list[Globals]:
    """The globals that a function may read or write: of its own module, and of the user's modules that it
    names.
    """
    names, result, met = sorted(_names(function.__code__)), [], set()
    waiting = [function.__globals__]
    while waiting:
        content = waiting.pop()
        if id(content) not in met:
            met.add(id(content))
            result.append(Globals(content, names))
            modules = (content[name] for name in names if isinstance(content.get(name), types.ModuleType))
            waiting += [vars(module) for module in modules if is_own(module)]
    return result


def _names(code: types.CodeType) -> set[str]:
    """All global names and attributes that a piece of code uses, functions inside it included."""
    inner = (each for each in code.co_consts if isinstance(each, types.CodeType))
    return set(code.co_names).union(*map(_names, inner))


@cache
def _is_installed(file: str) -> bool:
    if file.startswith("<frozen"):
        return True
    path = Path(file)
    return bool({"site-packages", "dist-packages"} & set(path.parts)) or any(
        path.is_relative_to(root) for root in _installed_roots()
    )


@cache
def _installed_roots() -> tuple[str, ...]:
    paths = (sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib", "purelib", "platlib"))
    return (*paths, *site.getsitepackages(), site.getusersitepackages())
