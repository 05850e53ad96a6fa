# ruff: noqa: F401, I001
# mypy: implicit-reexport
"""The private names of PyTorch that psgrad uses, and the functions of PyTorch that it replaces.

Other modules import from here, under a name without underscore. Each line says what the name is for. A
PyTorch without one of them is refused when psgrad is imported.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from operator import attrgetter
from typing import Any

import torch

from psgrad.errors import TransformError

# The versions of PyTorch with which psgrad is tested, as (major, minor): the lowest and the newest.
LOWEST, NEWEST = (2, 11), (2, 15)


def _attribute(example: Any, name: str) -> Callable[[Any], Any]:
    """The function that reads a private attribute, which `example` must have."""
    getattr(example, name)
    return attrgetter(name)


def _refusal(missing: object) -> TransformError:
    """The error that names what this PyTorch lacks."""
    return TransformError(
        f"PyTorch {torch.__version__}: {missing}; expected PyTorch {LOWEST[0]}.{LOWEST[1]} to"
        f" {NEWEST[0]}.{NEWEST[1]}, with which psgrad is tested",
        hint="install one of these versions, or a newer psgrad",
    )


try:
    from torch._C import (
        DisableTorchFunction,  # guard: the operators inside are not shown to __torch_function__ modes
        DispatchKey,  # the layers of the dispatcher
        _AutoDispatchBelowADInplaceOrView as BelowAutograd,  # guard: operators inside skip autograd
        _disabled_torch_function_impl as no_torch_function,  # tracers have __torch_dispatch__ alone
        _DisableTorchDispatch as DisableTorchDispatch,  # guard: an operator changes the tracer itself
        _dispatch_get_all_op_names as operator_names,  # the names of all operators, for the page of them
        _dispatch_tls_is_dispatch_key_included as layer_is_included,  # whether a transform of torch.func runs
        _dispatch_tls_local_exclude_set as excluded_layers,  # to set the dispatcher again as it was outside
        _dispatch_tls_local_include_set as included_layers,  # to set the dispatcher again as it was outside
        _dispatch_tls_set_dispatch_key_excluded as exclude_layer,  # kernels get computed conjugates
        _ForceDispatchKeyGuard as ForceDispatchKeys,  # guard: the dispatcher as it was outside
        _FunctionBase as FunctionBase,  # the classes of autograd.Function are found from here
        _get_dispatch_mode as mode_of_kind,  # whether make_fx records the program
        _increment_version as count_write,  # PyTorch counts no writes below autograd
        _is_any_autocast_enabled as autocast_is_on,  # a rule's operator must then go through PyTorch
        _len_torch_dispatch_stack as dispatch_modes,  # the same if a mode gets operators
        _len_torch_function_stack as function_modes,  # a function that a mode gets is not replayed
        _set_grad_enabled as set_grad_enabled,  # without the cost of a context manager
        _TorchDispatchModeKey as ModeKind,  # PROXY is the mode of make_fx
    )
    from torch._decomp import decomposition_table  # operators without a rule, by others
    from torch._ops import OpOverload as Op  # the type of an operator
    from torch._ops import OpOverloadPacket  # the type of a name with several operators
    from torch._prims_common import is_non_overlapping_and_dense_or_false  # when a result keeps strides
    from torch.nn.modules.batchnorm import _BatchNorm as BatchNormBase  # layers that mix the samples
    from torch.nn.modules.batchnorm import _NormBase as NormBase  # layers with running statistics
    from torch.utils._python_dispatch import (
        TorchDispatchMode,  # gets all operators
        _disable_current_modes as without_modes,  # operators inside go to no mode
        _get_current_dispatch_mode as current_mode,  # whether the interpreter is the innermost mode
        _pop_mode_temporarily as without_innermost_mode,  # operators inside do not go to that mode
    )
    from torch.utils._pytree import (
        _broadcast_to_and_flatten as broadcast_to_and_flatten,  # in_dims for a tree that its user registered
        register_pytree_node,  # makes an argument of a captured function a tree
        tree_flatten,  # the leaves of arguments and results
        tree_leaves,  # the leaves alone
        tree_map,  # a function applied to each leaf
        tree_unflatten,  # the tree from its leaves
    )
    from torch.utils.hooks import BackwardHook  # the hooks of modules that a transform would skip

    CONJUGATE = DispatchKey.Conjugate  # the layer that computes conjugates that are only marked
    NEGATIVE = DispatchKey.Negative  # the same for negatives
    TORCH_FUNC = DispatchKey.FuncTorchDynamicLayerFrontMode  # included while a transform of torch.func runs
    DelayedError = torch._C._functions.DelayedError  # an error that comes in PyTorch's backward pass
    make_wrapper = torch.Tensor._make_wrapper_subclass  # a tracer: a tensor without memory
    can_decompose = Op._can_decompose  # whether PyTorch defines an operator by others
    schema_of = _attribute(torch.ops.aten.add.Tensor, "_schema")  # an operator's arguments and results
    overload_name = _attribute(torch.ops.aten.add.Tensor, "_overloadname")  # the part behind the point
    write_count = _attribute(torch.empty(0), "_version")  # the number of writes to a tensor
    storage_key = _attribute(torch.empty(0).untyped_storage(), "_cdata")  # equal for shared memory
    # name -> tensor or module, as a module stores them; in order, and faster than a generator.
    parameter_store = _attribute(torch.nn.Module(), "_parameters")  # to put other tensors in their place
    buffer_store = _attribute(torch.nn.Module(), "_buffers")  # to put other tensors in their place
    load_method = _attribute(torch.nn.Module, "_load_from_state_dict")  # whether a class loads in its own way
    load_hooks = _attribute(torch.nn.Module(), "_load_state_dict_pre_hooks")  # the same of one module
    _forward_mode: Any = sys.modules["torch.autograd.forward_ad"]
    _forward_mode._current_level  # noqa: B018
except (ImportError, AttributeError) as error:
    raise _refusal(error) from error


def forward_mode_runs() -> bool:
    """Whether PyTorch's forward mode is on, under which psgrad's transforms are refused."""
    return bool(_forward_mode._current_level >= 0)


def torch_func_runs() -> bool:
    """Whether a transform of torch.func is on, under which psgrad's transforms are refused."""
    return layer_is_included(TORCH_FUNC)


def make_fx_runs() -> bool:
    """Whether make_fx records the operators."""
    return mode_of_kind(ModeKind.PROXY) is not None


_BINDINGS = (torch._C._VariableFunctions, torch._C._nn, torch._C.TensorBase)  # type: ignore[attr-defined]


def binding(op: Op) -> Callable[..., Any]:
    """PyTorch's own Python function for an operator, which takes half the time to call; the operator's
    kernels, called past Python, where it has none.
    """
    name = schema_of(op).name.partition("::")[2]
    for functions in _BINDINGS if op.namespace == "aten" else ():
        if (function := getattr(functions, name, None)) is not None:
            return function  # type: ignore[no-any-return]
    return op._op


class DispatchMode(TorchDispatchMode):
    """A mode that PyTorch does not wrap against its compiler, which costs microseconds a call."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


# -- autograd.Function ---------------------------------------------------------------------------------------

try:
    # The classes from which users derive theirs. torch.autograd itself is not imported in psgrad.
    SingleLevelFunction: Any = next(
        kind for kind in FunctionBase.__subclasses__() if kind.__name__ == "_SingleLevelFunction"
    )
    Function: Any = next(kind for kind in SingleLevelFunction.__subclasses__() if kind.__name__ == "Function")
except StopIteration:
    raise _refusal("no torch.autograd.function._SingleLevelFunction") from None

# Up to 2.13 `Function.apply` is Python code that completes the arguments and calls the `apply` of its base.
APPLIES_IN_TWO_STEPS = isinstance(vars(Function)["apply"], classmethod)
_function_count: Any = getattr(sys.modules["torch.autograd.function"], "AUTOGRAD_FUNCTION_COUNTER", None)


def functions_made() -> Any:
    """A value that changes whenever a class of autograd.Function is made."""
    if _function_count is not None:  # ten times as fast as listing the classes
        return repr(_function_count)
    return sum(len(kind.__subclasses__()) for kind in FunctionBase.__subclasses__())


# -- functions of PyTorch that are replaced while a transform runs ------------------------------------------


class Replacement(AbstractContextManager[None]):
    """While a transform runs in any thread, `owner.name` is `make(previous value)`.

    If the class or module has inherited the name, and not defined it, None is passed, and the name is deleted
    again.
    """

    def __init__(self, place: tuple[Any, str], make: Callable[[Any], Any]) -> None:
        self.owner, self.name = place
        self.make = make
        self.lock = threading.Lock()
        self.running = 0

    def __enter__(self) -> None:
        with self.lock:
            if self.running == 0:
                self.own = vars(self.owner).get(self.name)
                setattr(self.owner, self.name, self.make(self.own))
            self.running += 1

    def __exit__(self, *error: Any) -> None:
        with self.lock:
            self.running -= 1
            if self.running == 0:
                if self.own is None:
                    delattr(self.owner, self.name)
                else:
                    setattr(self.owner, self.name, self.own)


# A user's autograd.Function is called: its rules are used (autograd_function.py).
FUNCTION_APPLY = (SingleLevelFunction if APPLIES_IN_TWO_STEPS else Function, "apply")
# A module's backward hook is set up: refused, as it would not run (torch_autograd.py).
BACKWARD_HOOK = (BackwardHook, "_apply_on_tensors")
# torch.func's forward mode begins: refused, as it would end the process (torch_autograd.py).
FORWARD_MODE = (sys.modules["torch._functorch.eager_transforms"], "_jvp_with_argnums")
# torch.autograd.functional differentiates: refused, as its derivatives would be zero (torch_autograd.py).
AUTOGRAD_FUNCTIONAL = (sys.modules["torch.autograd.functional"], "_autograd_grad")
for _owner, _name in (FUNCTION_APPLY, BACKWARD_HOOK, FORWARD_MODE, AUTOGRAD_FUNCTIONAL):
    if not hasattr(_owner, _name):
        raise _refusal(f"no {_owner.__name__}.{_name}")
