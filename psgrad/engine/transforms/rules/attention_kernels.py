"""The fused kernels of attention: the sample axis is folded into their batch axis; a second derivative uses
matrix products.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from psgrad.engine.transforms.rules.attention import (
    attention_weights,
    by_matrix_products,
    fold_mask,
    scale_of,
)
from psgrad.engine.transforms.rules.families import aten, sum_to
from psgrad.engine.transforms.rules.registry import JointVJP, Op, define, replace
from psgrad.errors import UnsupportedOperatorError


def _of_result(kernel: Callable[[torch.Tensor, Sequence[int]], Any]) -> Any:
    """The VJP through the attended values only: no other result of a fused kernel has a derivative."""

    def back(gs: Sequence[Any], positions: Sequence[int]) -> dict[int, Any]:
        if gs[0] is None:
            return {}
        return dict(enumerate(kernel(gs[0], positions)))

    return back


def _mask_keyword(batch: Any, op: Op, *args: Any, attn_mask: Any = None, **kwargs: Any) -> Any:
    query = next(a for a in args if isinstance(a, torch.Tensor))
    tensors = [batch.fold(a) if isinstance(a, torch.Tensor) else a for a in args]
    result = op(*tensors, attn_mask=fold_mask(batch, attn_mask, query), **kwargs)
    return batch.unfold(result, query.shape[0])


define(
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    vjp=JointVJP(
        lambda out, query, key, value, dropout_p=0.0, is_causal=False, **options: _of_result(
            lambda g, _: _backward_for_cpu(g, query, key, value, *out[:2], dropout_p, is_causal, **options)
        )
    ),
    batch=_mask_keyword,
)

# PyTorch's backward kernel computes the weights as exp(score - logsumexp), a difference of rounded numbers.
# For large scores the sum of these weights is not one. psgrad has an operator that checks for large scores: a
# check of values in a rule could not be captured and replayed.

LARGE_SCORE = 1e3
_library = torch.library.Library("psgrad", "FRAGMENT")
_library.define(
    "attention_backward_for_cpu(Tensor g, Tensor query, Tensor key, Tensor value, Tensor out,"
    " Tensor logsumexp, float dropout_p, bool is_causal, *, Tensor? attn_mask=None, float? scale=None)"
    " -> (Tensor, Tensor, Tensor)"
)
_backward_for_cpu: Any = torch.ops.psgrad.attention_backward_for_cpu.default


def _backward_kernels(
    g: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: torch.Tensor | None = None,
    scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The cotangents of query, key and value [b, heads, positions, features] by PyTorch's kernel, and by
    matrix products for the batch entries b with large finite scores.
    """
    grads = aten._scaled_dot_product_flash_attention_for_cpu_backward.default(
        g, query, key, value, out, logsumexp, dropout_p, is_causal, attn_mask=attn_mask, scale=scale
    )
    large = logsumexp.abs() > LARGE_SCORE
    if not large.any():
        return grads  # type: ignore[no-any-return]
    rows = (large & logsumexp.isfinite()).flatten(1).any(1).nonzero()[:, 0]
    if attn_mask is not None and attn_mask.dim() == 4 and attn_mask.shape[0] > 1:
        attn_mask = attn_mask[rows]
    wide = [x[rows].to(logsumexp.dtype) for x in (g, query, key, value)]
    exact: Any = _back_by_matrix_products(
        wide[0], wide[1], wide[2], wide[3], attn_mask, dropout_p, is_causal, scale
    )
    for grad, part in zip(grads, exact[:3], strict=True):
        grad[rows] = part.to(grad.dtype)
    return grads  # type: ignore[no-any-return]


_library.impl("attention_backward_for_cpu", _backward_kernels, "CPU")
torch.library.register_fake(
    "psgrad::attention_backward_for_cpu",
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
    lib=_library,
)
define(_backward_for_cpu, batch=_mask_keyword)

# The backward kernels have no derivative. A second derivative uses matrix products.


def _back_by_matrix_products(
    g: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: Any,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The cotangents of query, key, value and of the scores. If there are fewer heads of keys than of
    queries, each head of keys belongs to a group of heads of queries.
    """
    if dropout_p > 0:
        raise UnsupportedOperatorError(
            "a second derivative of a fused attention kernel with dropout",
            hint="use torch.nn.attention.sdpa_kernel(SDPBackend.MATH) around the model, or dropout_p=0",
        )
    group = query.shape[-3] // key.shape[-3]
    wide_key, wide_value = (x.repeat_interleave(group, -3) if group > 1 else x for x in (key, value))
    weights = attention_weights(query, wide_key, mask, is_causal, scale)
    toward = torch.matmul(g, wide_value.transpose(-2, -1))
    scores = weights * (toward - (toward * weights).sum(-1, keepdim=True))
    products = (
        scores @ wide_key * scale_of(query, scale),
        scores.transpose(-2, -1) @ query * scale_of(query, scale),
    )
    backs = (products[1], weights.transpose(-2, -1) @ g)
    to_key, to_value = (x.unflatten(-3, (-1, group)).sum(-3) if group > 1 else x for x in backs)
    return products[0], to_key, to_value, scores


@replace(_backward_for_cpu)
def _cpu_backward(
    g: Any,
    query: Any,
    key: Any,
    value: Any,
    out: Any,
    logsumexp: Any,
    dropout_p: float,
    causal: bool,
    **options: Any,
) -> Any:
    mask, scale = options.get("attn_mask"), options.get("scale")
    return _back_by_matrix_products(g, query, key, value, mask, dropout_p, causal, scale)[:3]


def _cuda_efficient_back(
    out: Any,
    query: Any,
    key: Any,
    value: Any,
    bias: Any,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: Any = None,
) -> Any:
    result, logsumexp, seed, offset = out

    def kernel(g: torch.Tensor, positions: Sequence[int]) -> Any:
        mask = [True, True, True, 3 in positions]
        return aten._scaled_dot_product_efficient_attention_backward.default(
            g,
            query,
            key,
            value,
            bias,
            result,
            logsumexp,
            seed,
            offset,
            dropout_p,
            mask,
            is_causal,
            scale=scale,
        )

    return _of_result(kernel)


def _efficient_forward(*args: Any, **kwargs: Any) -> Any:
    """The backward kernel needs the log-sum-exp, which the forward call omits if no tensor requires grad."""
    if args[4]:
        return None
    return aten._scaled_dot_product_efficient_attention.default(*args[:4], True, *args[5:], **kwargs)


def _fold_leading(unfolded: frozenset[int] = frozenset()) -> Any:
    """Batching of a fused CUDA kernel by folding. unfolded: positions of arguments without a batch axis, such
    as random states and sequence tables.
    """

    def rule(batch: Any, op: Op, *args: Any, **kwargs: Any) -> Any:
        full = [
            (
                batch.raw(a)[0]
                if i in unfolded and batch.is_mapped(a)
                else batch.fold(a)
                if isinstance(a, torch.Tensor) and i not in unfolded
                else a
            )
            for i, a in enumerate(args)
        ]
        result = op(*full, **kwargs)
        return tuple(
            (
                batch.unfold(r, args[0].shape[0])
                if isinstance(r, torch.Tensor) and r.dim() >= 3
                else r.unsqueeze(0).expand(batch.size, *r.shape)
                if isinstance(r, torch.Tensor)
                else r
            )
            for r in result
        )

    return rule


_flash_backward = aten._scaled_dot_product_flash_attention_backward.default
define(
    aten._scaled_dot_product_flash_attention.default,
    vjp=JointVJP(
        lambda out, query, key, value, dropout_p=0.0, is_causal=False, *_, **scale: _of_result(
            # the first results and the tables of sequences, and behind two arguments seed and offset
            lambda g, _: _flash_backward(
                g, query, key, value, *out[:6], dropout_p, is_causal, *out[6:8], **scale
            )
        )
    ),
    batch=_fold_leading(),
)
define(_flash_backward, batch=_fold_leading(frozenset({6, 7, 12, 13})))


@replace(_flash_backward)
def _cuda_flash_backward(
    g: Any, query: Any, key: Any, value: Any, out: Any, logsumexp: Any, *rest: Any, scale: Any = None
) -> Any:
    dropout_p, causal = rest[4:6]  # behind the tables of sequences
    return _back_by_matrix_products(g, query, key, value, None, dropout_p, causal, scale)[:3]


@replace(aten._scaled_dot_product_efficient_attention_backward.default)
def _cuda_efficient_backward(
    g: Any,
    query: Any,
    key: Any,
    value: Any,
    bias: Any,
    out: Any,
    logsumexp: Any,
    seed: Any,
    offset: Any,
    dropout_p: float,
    wanted: Sequence[bool],
    causal: bool = False,
    *,
    scale: Any = None,
) -> Any:
    *grads, scores = _back_by_matrix_products(g, query, key, value, bias, dropout_p, causal, scale)
    return *grads, sum_to(scores, bias.shape, bias.dtype) if bias is not None else None


define(
    aten._scaled_dot_product_efficient_attention.default,
    vjp=JointVJP(_cuda_efficient_back),
    instead=_efficient_forward,
    batch=_fold_leading(),
)
define(aten._scaled_dot_product_efficient_attention_backward.default, batch=_fold_leading(frozenset({7, 8})))


@replace(aten._scaled_dot_product_cudnn_attention.default)
def _by_flash_attention(
    query: Any,
    key: Any,
    value: Any,
    bias: Any,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: Any = None,
) -> tuple[Any, ...]:
    """cuDNN's attention, by the flash kernel, which has rules; or by matrix products if there is a mask,
    which the flash kernel does not take.
    """
    if bias is None:
        return aten._scaled_dot_product_flash_attention.default(
            query, key, value, dropout_p, is_causal, False, scale=scale
        )
    out = by_matrix_products(query, key, value, bias, dropout_p, is_causal, scale=scale)
    unused = torch.empty(0, device=query.device)
    return out, unused, unused, unused, query.shape[-2], key.shape[-2], unused, unused, unused
