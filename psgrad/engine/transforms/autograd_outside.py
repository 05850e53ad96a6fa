"""Replacements of operators for PyTorch's autograd, which may differentiate the result of a transform.

PyTorch has no derivative of some kernels that compute derivatives. Some results that its own derivatives use
(the factors of a linear system, the mean of a norm) are constant for its autograd, but psgrad's rules compute
with them. These operators are replaced here. Fused attention is not replaced: the derivative of its
derivative is an error, as in PyTorch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from psgrad.engine.transforms.interpreter import autograd_replacements, not_replaced_if_empty
from psgrad.engine.transforms.operators import aten
from psgrad.engine.transforms.private_torch import decomposition_table
from psgrad.engine.transforms.rules.grouped import grouped_mm, grouped_outer
from psgrad.engine.transforms.rules.registry import decompose

for _op in (
    aten.silu_backward.default,
    aten.mish_backward.default,
    aten.native_layer_norm_backward.default,
    aten.native_group_norm_backward.default,
):
    autograd_replacements[_op] = decomposition_table[_op]
    not_replaced_if_empty.add(_op)
_attention_backward = torch.ops.psgrad.attention_backward_for_cpu.default
autograd_replacements[_attention_backward] = lambda *args, **kwargs: decompose(
    _attention_backward, args, kwargs
)
# The lookup operator for a table of weights that requires no gradient.
autograd_replacements[aten._embedding_bag_forward_only.default] = aten._embedding_bag.default


def _copy(x: torch.Tensor, source: Any, non_blocking: bool = False) -> torch.Tensor:
    if not isinstance(source, torch.Tensor):
        return torch.full_like(x, source)
    return source.to(x).expand(x.shape).clone()


def _layer_norm(
    x: torch.Tensor, shape: Sequence[int], weight: Any, bias: Any, eps: float
) -> tuple[torch.Tensor, ...]:
    axes = list(range(x.dim() - len(shape), x.dim()))
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    mean = wide.mean(axes, keepdim=True)
    rstd = (wide.var(axes, correction=0, keepdim=True) + eps).rsqrt()
    out = (wide - mean) * rstd
    out = out if weight is None else out * weight
    return (out if bias is None else out + bias).to(x.dtype), mean, rstd


def _solve(
    a: torch.Tensor, b: torch.Tensor, *, left: bool = True, check_errors: bool = False
) -> tuple[torch.Tensor, ...]:
    x, info = aten.linalg_solve_ex.default(a, b, left=left, check_errors=check_errors)
    lu, pivots, _ = aten.linalg_lu_factor_ex.default(a)
    return x, lu, pivots, info


def _grouped_mm(rows: torch.Tensor, matrices: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    *parts, behind = rows.tensor_split(ends.tolist())
    products = [part @ matrix for part, matrix in zip(parts, matrices, strict=True)]
    return torch.cat([*products, behind.new_zeros(behind.shape[0], matrices.shape[2])])


def _grouped_outer(left: torch.Tensor, right: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    stops = ends.tolist()
    parts = zip(left.tensor_split(stops)[:-1], right.tensor_split(stops)[:-1], strict=True)
    return torch.stack([some.t() @ others for some, others in parts])


autograd_replacements[grouped_mm] = _grouped_mm
autograd_replacements[grouped_outer] = _grouped_outer
autograd_replacements[aten.copy.default] = _copy
autograd_replacements[aten.native_layer_norm.default] = _layer_norm
autograd_replacements[aten._linalg_solve_ex.default] = _solve
