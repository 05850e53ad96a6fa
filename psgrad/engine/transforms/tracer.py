"""Tracers, the values of a transformed function, and the walks over an operator's arguments that find them.

A `Tracer` is a tensor without storage that stands for something else at one level: a recorded value, or a
whole batch. interpreter.py passes operators on tracers to their level.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, NoReturn, Self

import torch

from psgrad.engine.transforms import diagnostics
from psgrad.engine.transforms.private_torch import ForceDispatchKeys, no_torch_function
from psgrad.engine.transforms.state import ActiveLevel, state
from psgrad.errors import TransformError

# On a GPU a recurrent layer packs its weights for cuDNN whenever they have changed, as they do under a
# transform. It leaves them as they are if two have the same address.
_PACKS_ITS_WEIGHTS = torch.nn.RNNBase.flatten_parameters.__code__


def _layer_that_packs_its_weights() -> torch.nn.RNNBase | None:
    """The recurrent layer that asks a tracer for its address, by itself or in a comprehension."""
    frame = sys._getframe(2)
    for caller in (frame, frame.f_back):
        if caller is not None and caller.f_code is _PACKS_ITS_WEIGHTS:
            layer: torch.nn.RNNBase = caller.f_locals["self"]
            return layer
    return None


class Tracer(torch.Tensor):
    """A value at one level, with the shape, strides, dtype and device that the user's function reads."""

    __slots__ = ("level", "value")  # attributes of every tracer, for speed and memory

    level: ActiveLevel
    value: Any
    carries_samples: ClassVar[bool] = False  # whether the value has a sample axis that the tracer hides
    has_views: bool = False  # whether a view of it is known

    __torch_function__ = no_torch_function  # type: ignore[assignment]

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"{type(self).__name__}(level={self.level.index}, value={self.value!r})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self.clone()

    def below(self) -> torch.Tensor:
        """The value of this tracer, one level below."""
        raise NotImplementedError

    def rewritten(self, new: Any) -> Any:
        """The result of a write of `new` into this tensor under no_grad: the new value with the derivative of
        the old one.
        """
        return new

    def twin(self) -> Any:
        """A tracer of the same value, which stays when this one becomes a view of it."""
        raise NotImplementedError

    def become_view(self, view: Any) -> None:
        """Become this view of the former value, after an in-place operator has changed the shape."""
        raise NotImplementedError

    def with_contiguous_strides(self) -> Any:
        """This value with contiguous strides, for a program that takes views of it."""
        return self

    def tolist(self) -> Any:
        return [item.tolist() for item in self.unbind()] if self.dim() else self.item()

    def data_ptr(self) -> int:
        if (layer := _layer_that_packs_its_weights()) is not None:
            weights = itertools.chain.from_iterable(layer.all_weights)
            return next((w.data_ptr() for w in weights if not isinstance(w, Tracer)), 0)
        raise TransformError(
            f"the address of a traced tensor{diagnostics.where()}: it has no memory",
            hint="make the kernel an operator (torch.library.custom_op) with a rule:"
            " docs/guides/adding-an-operator.md",
        )

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        if not requires_grad:
            raise TransformError(
                f"requires_grad_(False) on a traced tensor{diagnostics.where()} would not stop the gradient",
                hint="call .detach(), or use torch.no_grad() where the gradient should end",
            )
        return self

    def numpy(self, *, force: bool = False) -> Any:
        raise TransformError(
            f"a traced tensor can't become a NumPy array{diagnostics.where()}",
            hint="write the computation with torch, or do it outside the transformed function",
        )

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        return self.numpy()

    @property
    def data(self) -> torch.Tensor:
        return torch.Tensor.data.__get__(self)  # type: ignore[attr-defined,no-any-return]

    @data.setter
    def data(self, new: Any) -> None:
        refuse_new_data()

    def register_hook(self, hook: Any) -> Any:
        raise TransformError(
            f"a hook on a traced tensor{diagnostics.where()} would never run",
            hint="write the change of the gradient as a torch.autograd.Function",
        )

    register_post_accumulate_grad_hook = register_hook


def refuse_new_data() -> NoReturn:
    raise TransformError(
        f"an assignment to .data of a traced tensor{diagnostics.where()} is not seen by transforms",
        hint="write into it under torch.no_grad() (x.copy_(y)), or use another variable",
    )


def rewritten(old: Any, new: Any) -> Any:
    """The result of a write of `new` into `old` under no_grad (see Tracer.rewritten). If no level follows
    `old`, this is `new`.
    """
    if isinstance(old, Tracer):
        return old.rewritten(new)
    if state.outside is None or not (state.attached and old.requires_grad):
        return new
    with ForceDispatchKeys(*state.outside):
        with torch.enable_grad():
            place = old.clone()
        return place.copy_(new)


def innermost(value: Any) -> Any:
    """The plain tensor, or the deferred value, under all tracers."""
    while isinstance(value, Tracer):
        value = value.value
    return value


def strides_of(value: torch.Tensor) -> tuple[int, ...]:
    """The strides of a value that is to be traced. Also stores in the state whether autograd follows it, and
    whether it may be a conjugate or negative that is only marked.
    """
    if value.requires_grad and state.outside is not None:
        state.attached = True
    if value.dtype.is_complex or value.is_neg():
        state.marked = True
    try:
        return value.stride()
    except RuntimeError as error:
        raise TransformError(
            f"a tensor of layout {value.layout}{diagnostics.where()}; expected a dense tensor",
            hint="call .to_dense() on it outside the transformed function",
        ) from error


def note_autograd(value: Any) -> None:
    """Store in the state whether PyTorch's autograd follows a plain tensor. Called for each plain tensor that
    is traced, or that an operator receives.
    """
    if value.requires_grad and state.outside is not None:
        state.attached = True


def is_differentiable(value: Any) -> bool:
    """Whether a value can have a derivative: a tensor of real or complex floating-point numbers."""
    return isinstance(value, torch.Tensor) and (value.dtype.is_floating_point or value.dtype.is_complex)


ENDED: Any = object()  # stands for the level of a tracer whose transform has ended

OTHER, TENSOR, TRACER, SEQUENCE = range(4)  # kinds of arguments


class _Kinds(dict[type, int]):
    """The kind of each class of arguments. A table, because isinstance is slow for classes of tensors."""

    def __missing__(self, cls: type) -> int:
        if issubclass(cls, torch.Tensor):
            kind = TRACER if issubclass(cls, Tracer) else TENSOR
        else:
            kind = SEQUENCE if issubclass(cls, (list, tuple)) else OTHER
        self[cls] = kind
        return kind


kinds = _Kinds()


def top_level(args: Any, kwargs: dict[str, Any]) -> ActiveLevel | None:
    """The highest level among the arguments; None if there is no tracer; `ENDED` if the transform of a tracer
    has ended.
    """
    top: ActiveLevel | None = None
    for argument in (*args, *kwargs.values()) if kwargs else args:
        kind = kinds[type(argument)]
        if kind == TRACER:
            level = argument.level
        elif kind == TENSOR:
            if argument.requires_grad:
                note_autograd(argument)
            continue
        elif kind == SEQUENCE:  # `cat`, `stack`, `index`; most lists are sizes
            if not argument or type(argument[0]) is int:
                continue
            inner = top_level(argument, {})
            if inner is None:
                continue
            if inner is ENDED:
                return inner
            level = inner
        else:
            continue
        if level is top:
            continue
        if not level.is_active:
            return ENDED  # type: ignore[no-any-return]
        if top is None or level.index > top.index:
            top = level
    return top


def map_tracers(function: Callable[[Any], Any], tree: Any) -> Any:
    """`function` applied to each tensor in an operator's arguments or results."""
    kind = kinds[type(tree)]
    if kind in (TENSOR, TRACER):
        return function(tree)
    if kind == SEQUENCE:
        items = [map_tracers(function, item) for item in tree]
        return items if isinstance(tree, list) else tuple(items)
    if isinstance(tree, dict):
        return {key: map_tracers(function, item) for key, item in tree.items()}
    return tree


def on_active_levels(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor without tracers of transforms that have ended."""
    while isinstance(tensor, Tracer) and not tensor.level.is_active:
        tensor = tensor.below()
    return tensor


def tensors_in(args: Any, kwargs: Any) -> Iterator[torch.Tensor]:
    """The tensors among an operator's arguments."""
    for argument in itertools.chain(args, kwargs.values()):
        if isinstance(argument, torch.Tensor):
            yield argument
        elif isinstance(argument, (list, tuple)):
            yield from (item for item in argument if isinstance(item, torch.Tensor))
