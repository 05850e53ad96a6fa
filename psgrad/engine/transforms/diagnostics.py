"""The place in the user's program that an operator came from, for error messages."""

from __future__ import annotations

import contextlib
import functools
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch

from psgrad.engine.transforms.private_torch import FunctionBase, functions_made
from psgrad.errors import TransformError

_TORCH = str(Path(torch.__file__).parent)
_ENGINE = str(Path(__file__).parent.parent)
_OTHER_CODE = (_TORCH, _ENGINE, contextlib.__file__, "<")


def _frames(error: BaseException | None = None) -> Iterator[FrameType]:
    """The frames that run now, or those that an error came through, from the innermost outwards."""
    if error is not None:
        yield from reversed([frame for frame, _ in traceback.walk_tb(error.__traceback__)])
        return
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def user_line(error: BaseException | None = None) -> str | None:
    """`file:line` of the innermost frame of the user's code: outside of PyTorch, the engine and their context
    managers.
    """
    for frame in _frames(error):
        name = frame.f_code.co_filename
        if not name.startswith(_OTHER_CODE):
            return f"{name}:{frame.f_lineno}"
    return None


def module_path(error: BaseException | None = None) -> str | None:
    """The innermost nn.Module whose forward is running, as `name (Class)`; the name is the one in the
    outermost module.
    """
    modules = [
        frame.f_locals["self"]
        for frame in _frames(error)
        if frame.f_code.co_name == "forward" and isinstance(frame.f_locals.get("self"), torch.nn.Module)
    ]
    if not modules:
        return None
    inner, outer = modules[0], modules[-1]
    name = next((name for name, module in outer.named_modules() if module is inner), "")
    return f"{name or 'the model'} ({type(inner).__name__})"


def where(error: BaseException | None = None) -> str:
    """The layer and line of the code that runs now, or of the origin of an error, as far as known: ` (in fc1
    (Linear), at model.py:12)`.
    """
    parts = []
    if module := module_path(error):
        parts.append(f"in {module}")
    if line := user_line(error):
        parts.append(f"at {line}")
    return f" ({', '.join(parts)})" if parts else ""


# Functions that open a level, by the id of their code: the search for frames between an operator and its
# transform ends there.
_boundaries: set[int] = set()


def boundary(function: Callable[..., Any]) -> None:
    """Mark a function (of a module, so that it stays alive) as one that opens a level."""
    _boundaries.add(id(function.__code__))


def running_autograd_function(*, inside: bool) -> str | None:
    """The name of the autograd.Function whose forward is running, if any.

    A transform does not get the operators of its backward. It would differentiate the forward instead, or
    treat its results as constants if PyTorch has switched recording off. PyTorch has no hook for the call,
    but the forward's frame is on the stack. This runs at every recorded operator, so frames are compared by
    the id of their code: hashing code takes ten times as long.

    inside: whether only Functions that were called inside the innermost transform count.
    """
    forwards = _forwards(functions_made())
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = id(frame.f_code)
        if code in forwards:
            return forwards[code][1]
        if inside and code in _boundaries:
            return None
        frame = frame.f_back
    return None


@functools.lru_cache(maxsize=1)
def _forwards(made_so_far: Any) -> dict[int, tuple[CodeType, str]]:
    """The forward of each existing class of autograd.Function, by the id of its code, which is kept alive."""
    classes = [function for function in _subclasses(FunctionBase) if hasattr(function.forward, "__code__")]
    return {
        id(function.forward.__code__): (function.forward.__code__, function.__name__) for function in classes
    }


def _subclasses(base: Any) -> Iterator[Any]:
    for subclass in base.__subclasses__():
        if hasattr(subclass, "forward"):
            yield subclass
        yield from _subclasses(subclass)


def batch_statistics_error(where: str) -> TransformError:
    """The error for a BatchNorm that would mix the samples."""
    return TransformError(
        f"BatchNorm in training mode{where}: one sample's gradient would depend on all others",
        hint="call model.eval() to use the running statistics, or replace it by GroupNorm and train again",
    )


def group_of_one_error(where: str) -> TransformError:
    """The error for a GroupNorm whose groups have one value each, which PyTorch refuses for one sample."""
    return TransformError(
        f"GroupNorm of groups that have one value each{where}, which PyTorch refuses for one sample",
        hint="use fewer groups than channels, or leave the layer out: its output is its bias",
    )
