"""Scaled dot-product attention on its fused kernels, in both directions: the sample axis is folded into the kernels' batch axis."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from psgrad.engine.transforms.levels import Tracer
from psgrad.engine.transforms.rules.families import aten
from psgrad.engine.transforms.rules.registry import JointVJP, Op, define


def _attention(level: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Under a gradient: as [batch, heads, t, d], the one layout that has fused kernels."""
    query, key, value = args[:3]
    rest, rank = list(args[3:]), max(query.dim(), key.dim(), value.dim())
    if max(_gradients(t) for t in (query, key, value)) > 1:  # the fused kernels have no second derivative
        return _by_matrix_products(query, key, value, *rest, **kwargs)
    if rank == 4 and query.dim() == key.dim() == value.dim():
        return aten.scaled_dot_product_attention.default.decompose(query, key, value, *rest, **kwargs)
    if rank > 4 or rank < 2:
        return _by_matrix_products(query, key, value, *rest, **kwargs)
    if rest and rest[0] is not None and rest[0].dim() > 2:
        rest[0] = _to_rank_4(rest[0])
    if kwargs.get("attn_mask") is not None and kwargs["attn_mask"].dim() > 2:
        kwargs = {**kwargs, "attn_mask": _to_rank_4(kwargs["attn_mask"])}
    lifted = [_to_rank_4(t) for t in (query, key, value)]
    out = aten.scaled_dot_product_attention.default.decompose(*lifted, *rest, **kwargs)
    return out.reshape(*out.shape[4 - rank :])


def _to_rank_4(t: torch.Tensor) -> torch.Tensor:
    return t.reshape(*(1,) * (4 - t.dim()), *t.shape)


def _gradients(value: Any) -> int:
    """At how many reverse-mode levels a value is traced."""
    count = 0
    while isinstance(value, Tracer):
        count += not value.carries_samples
        value = value.below()
    return count


def _by_matrix_products(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    if enable_gqa:
        repeats = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(repeats, -3), value.repeat_interleave(repeats, -3)
    scores = torch.matmul(query, key.transpose(-2, -1)) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()
    if attn_mask is not None:
        scores = scores.masked_fill(~attn_mask, -torch.inf) if attn_mask.dtype == torch.bool else scores + attn_mask
    weights = aten._safe_softmax.default(scores, -1)
    if dropout_p > 0:
        weights = torch.dropout(weights, dropout_p, True)
    return torch.matmul(weights, value)


def _attention_batch(
    batch: Any,
    op: Op,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **kwargs: Any,
) -> torch.Tensor:
    """Without a gradient: leading axes of one sample and the sample axis become the batch axis of one call."""
    rank = max(query.dim(), key.dim(), value.dim())
    if rank > 4 or dropout_p > 0 or (batch.level.deferral is None and any(isinstance(batch.raw(t), Tracer) for t in (query, key, value))):
        return batch.physical(_by_matrix_products(query, key, value, attn_mask, dropout_p, is_causal, **kwargs))
    lifted = [_to_rank_4(t).expand(*_common(query, key, value), -1, -1) if rank < 4 else t for t in (query, key, value)]
    mask = _fold_mask(batch, attn_mask, query)
    out = op(*[batch.fold(t) for t in lifted], mask, dropout_p, is_causal, **kwargs)
    out = batch.unfold(out)
    return out.reshape(batch.size, *query.shape[:-1], value.shape[-1]) if rank < 4 else out


def _common(*tensors: torch.Tensor) -> tuple[int, ...]:
    return tuple(torch.broadcast_shapes(*[_to_rank_4(t).shape[:-2] for t in tensors]))


def _fold_mask(batch: Any, mask: Any, query: torch.Tensor) -> Any:
    """A mask that broadcasts against the folded batch axis."""
    if mask is None or not batch.is_mapped(mask):
        if mask is not None and mask.dim() == 4 and mask.shape[0] != 1:
            return mask.repeat(batch.size, 1, 1, 1)
        return mask
    physical = batch.aligned(mask, 4)
    inner = query.shape[0] if query.dim() == 4 else 1
    return physical.expand(batch.size, inner, *physical.shape[2:]).flatten(0, 1)


define(aten.scaled_dot_product_attention.default, instead=_attention, batch=_attention_batch)

# -- the fused kernels -------------------------------------------------------------------------------------------------------------------


def _cpu_back(
    out: Any, query: Any, key: Any, value: Any, dropout_p: float = 0.0, is_causal: bool = False, *, attn_mask: Any = None, scale: Any = None
) -> Any:
    result, logsumexp = out[0], out[1]

    return _of_result(
        lambda g, _: aten._scaled_dot_product_flash_attention_for_cpu_backward.default(
            g, query, key, value, result, logsumexp, dropout_p, is_causal, attn_mask=attn_mask, scale=scale
        )
    )


def _of_result(kernel: Callable[[torch.Tensor, Sequence[int]], Any]) -> Any:
    """The way back through the attended values alone: nothing else that a fused kernel returns has a derivative."""

    def back(gs: Sequence[Any], positions: Sequence[int]) -> dict[int, Any]:
        if gs[0] is None:
            return {}
        grads = kernel(gs[0], positions)
        return {position: grads[position] for position in positions}

    return back


def _mask_keyword(batch: Any, op: Op, *args: Any, attn_mask: Any = None, **kwargs: Any) -> Any:
    query = next(a for a in args if isinstance(a, torch.Tensor))
    tensors = [batch.fold(a) if isinstance(a, torch.Tensor) else a for a in args]
    result = op(*tensors, attn_mask=_fold_mask(batch, attn_mask, query), **kwargs)
    return batch.unfold(result)


define(aten._scaled_dot_product_flash_attention_for_cpu.default, vjp=JointVJP(_cpu_back), batch=_mask_keyword)
define(aten._scaled_dot_product_flash_attention_for_cpu_backward.default, batch=_mask_keyword)


def _cuda_flash_back(
    out: Any,
    query: Any,
    key: Any,
    value: Any,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: Any = None,
) -> Any:
    result, logsumexp, cum_q, cum_k, max_q, max_k, seed, offset = out[:8]

    return _of_result(
        lambda g, _: aten._scaled_dot_product_flash_attention_backward.default(
            g, query, key, value, result, logsumexp, cum_q, cum_k, max_q, max_k, dropout_p, is_causal, seed, offset, scale=scale
        )
    )


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
            g, query, key, value, bias, result, logsumexp, seed, offset, dropout_p, mask, is_causal, scale=scale
        )

    return _of_result(kernel)


def _efficient_forward(level: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The backward kernel needs the log-sum-exp, which the forward call leaves out where it sees no tensor that requires grad."""
    if args[4]:
        return None
    return aten._scaled_dot_product_efficient_attention.default(*args[:4], True, *args[5:], **kwargs)


def _fold_leading(kept: frozenset[int] = frozenset()) -> Any:
    """Fold the mapped tensors of a fused CUDA kernel; random state and sequence tables have no batch axis and stay."""

    def rule(batch: Any, op: Op, *args: Any, **kwargs: Any) -> Any:
        full = [
            batch.raw(a)[0] if i in kept and batch.is_mapped(a) else batch.fold(a) if isinstance(a, torch.Tensor) and i not in kept else a
            for i, a in enumerate(args)
        ]
        result = op(*full, **kwargs)
        return tuple(
            batch.unfold(r)
            if isinstance(r, torch.Tensor) and r.dim() >= 3
            else r.unsqueeze(0).expand(batch.size, *r.shape)
            if isinstance(r, torch.Tensor)
            else r
            for r in result
        )

    return rule


define(aten._scaled_dot_product_flash_attention.default, vjp=JointVJP(_cuda_flash_back), batch=_fold_leading())
define(aten._scaled_dot_product_flash_attention_backward.default, batch=_fold_leading(frozenset({6, 7, 12, 13})))
define(
    aten._scaled_dot_product_efficient_attention.default,
    vjp=JointVJP(_cuda_efficient_back),
    instead=_efficient_forward,
    batch=_fold_leading(),
)
define(aten._scaled_dot_product_efficient_attention_backward.default, batch=_fold_leading(frozenset({7, 8})))
