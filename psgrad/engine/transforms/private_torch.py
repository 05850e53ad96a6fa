"""What the transforms take from PyTorch though it promises none of it: a PyTorch without it is refused at
import, not in mid-run.
"""

from __future__ import annotations

import importlib
from functools import reduce

import torch

from psgrad.errors import TransformError

PRIVATE: dict[str, tuple[str, ...]] = {
    "torch._C": (
        "DisableTorchFunction",
        "DispatchKey.Conjugate",
        "DispatchKey.FuncTorchDynamicLayerFrontMode",
        "DispatchKey.Negative",
        "_AutoDispatchBelowADInplaceOrView",
        "_DisableTorchDispatch",
        "_ForceDispatchKeyGuard",
        "_FunctionBase",
        "_TorchDispatchModeKey.PROXY",
        "_disabled_torch_function_impl",
        "_dispatch_get_all_op_names",
        "_dispatch_tls_is_dispatch_key_included",
        "_dispatch_tls_local_exclude_set",
        "_dispatch_tls_local_include_set",
        "_dispatch_tls_set_dispatch_key_excluded",
        "_functions.DelayedError",
        "_get_dispatch_mode",
        "_increment_version",
        "_is_any_autocast_enabled",
        "_len_torch_dispatch_stack",
        "_len_torch_function_stack",
        "_set_grad_enabled",
    ),
    "torch._decomp": ("decomposition_table",),
    "torch._prims_common": ("is_non_overlapping_and_dense_or_false",),
    "torch._subclasses.fake_tensor": (
        "DataDependentOutputException",
        "DynamicOutputShapeException",
        "FakeTensor",
        "FakeTensorMode",
    ),
    "torch.utils._python_dispatch": (
        "TorchDispatchMode",
        "_disable_current_modes",
        "_get_current_dispatch_mode",
        "_pop_mode_temporarily",
    ),
    "torch.utils._pytree": (
        "_broadcast_to_and_flatten",
        "register_pytree_node",
        "tree_flatten",
        "tree_leaves",
        "tree_map",
        "tree_unflatten",
    ),
}


def missing() -> list[str]:
    """The names above that this PyTorch does not have."""
    return [
        f"{module}.{name}" for module, names in PRIVATE.items() for name in names if not _has(module, name)
    ]


def _has(module: str, name: str) -> bool:
    try:
        reduce(getattr, name.split("."), importlib.import_module(module))
    except (ImportError, AttributeError):
        return False
    return True


if absent := missing():
    raise TransformError(
        f"PyTorch {torch.__version__} has no {', '.join(absent)}",
        expected="PyTorch 2.11 to 2.15, with which psgrad is tested",
        cause=(
            "psgrad's transforms work below PyTorch's autograd, by names that PyTorch does not promise to"
            " keep"
        ),
        next_step="install one of these versions, or a newer psgrad",
    )
