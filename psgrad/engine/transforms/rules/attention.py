"""Scaled dot-product attention, as one operator and by matrix products."""

from __future__ import annotations

from typing import Any

import torch

from psgrad.engine.transforms.rules.families import aten
from psgrad.engine.transforms.rules.registry import Op, define
from psgrad.engine.transforms.state import state


def _attention(*args: Any, **kwargs: Any) -> Any:
    """Attention with a derivative, computed as [batch, heads, t, d], the only layout with fused kernels."""
    query, key, value = args[:3]
    rest, rank = list(args[3:]), max(query.dim(), key.dim(), value.dim())
    if rank == 4 and query.dim() == key.dim() == value.dim():
        return aten.scaled_dot_product_attention.default.decompose(query, key, value, *rest, **kwargs)
    if rank > 4 or rank < 2:
        return by_matrix_products(query, key, value, *rest, **kwargs)
    if rest and rest[0] is not None and rest[0].dim() > 2:
        rest[0] = _to_rank_4(rest[0])
    if kwargs.get("attn_mask") is not None and kwargs["attn_mask"].dim() > 2:
        kwargs = {**kwargs, "attn_mask": _to_rank_4(kwargs["attn_mask"])}
    lifted = [_to_rank_4(t) for t in (query, key, value)]
    out = aten.scaled_dot_product_attention.default.decompose(*lifted, *rest, **kwargs)
    return out.reshape(*out.shape[4 - rank :]) + _nan_of_scores(*args, **kwargs)


def _to_rank_4(t: torch.Tensor) -> torch.Tensor:
    return t.reshape(*(1,) * (4 - t.dim()), *t.shape)


def _nan_of_scores(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **kwargs: Any,
) -> Any:
    """[..., t, 1]: NaN for the queries with a score of NaN, else zero.

    PyTorch returns NaN for them, because it uses matrix products for ranks other than four. The fused kernel
    treats a query as one without keys if all its scores are NaN. Only the score of the first key is computed
    here, and infinities and NaN in later keys under a causal mask; a NaN from a difference of infinities at a
    later key is not found.
    """
    if not key.shape[-2]:
        return 0
    query, key = query.detach(), key.detach()
    if kwargs.get("enable_gqa"):
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
    lost = (query * key.narrow(-2, 0, 1)).sum(-1, keepdim=True).isnan()
    if is_causal:
        high, low, lost_key = (
            which.any(-2, keepdim=True) for which in (key == torch.inf, key == -torch.inf, key.isnan())
        )
        lost = lost | ((query >= 0) & high | (query <= 0) & low | lost_key).any(-1, keepdim=True)
    return torch.where(lost, torch.nan, 0).to(query.dtype)


def by_matrix_products(
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
    weights = attention_weights(query, key, attn_mask, is_causal, scale)
    if dropout_p > 0:
        weights = torch.dropout(weights, dropout_p, True)
    return torch.matmul(weights, value)


def attention_weights(
    query: torch.Tensor, key: torch.Tensor, mask: Any, is_causal: bool, scale: float | None
) -> torch.Tensor:
    scores = torch.matmul(query, key.transpose(-2, -1)) * scale_of(query, scale)
    if is_causal:
        mask = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    return aten._safe_softmax.default(scores, -1)


def scale_of(query: torch.Tensor, scale: float | None) -> float:
    return query.shape[-1] ** -0.5 if scale is None else scale


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
    """Attention without a derivative: the leading axes of one sample and the sample axis become the batch
    axis of one call.
    """
    rank = max(query.dim(), key.dim(), value.dim())
    if rank > 4 or dropout_p > 0:
        return batch.physical(
            by_matrix_products(query, key, value, attn_mask, dropout_p, is_causal, **kwargs)
        )
    lifted = [
        _to_rank_4(t).expand(*_common(query, key, value), -1, -1) if rank < 4 else t
        for t in (query, key, value)
    ]
    mask = fold_mask(batch, attn_mask, query)
    folded = [batch.fold(t) for t in lifted]
    # outer autograd saves the kernel's arguments and result; the function may write into its own tensors
    if state.attached:
        folded = [t.clone() for t in folded]
    out = batch.unfold(op(*folded, mask, dropout_p, is_causal, **kwargs), lifted[0].shape[0])
    if state.attached:
        out = out.clone()
    if rank == 4:
        return out
    lost = _nan_of_scores(query, key, value, attn_mask, dropout_p, is_causal, **kwargs)
    return out.reshape(batch.size, *query.shape[:-1], value.shape[-1]) + batch.physical(lost)


def _common(*tensors: torch.Tensor) -> tuple[int, ...]:
    return tuple(torch.broadcast_shapes(*[_to_rank_4(t).shape[:-2] for t in tensors]))


def fold_mask(batch: Any, mask: Any, query: torch.Tensor) -> Any:
    """A mask that broadcasts against the folded batch axis."""
    if mask is None or not batch.is_mapped(mask):
        if mask is not None and mask.dim() == 4 and mask.shape[0] != 1:
            return mask.repeat(batch.size, 1, 1, 1)
        return mask
    physical = batch.aligned(mask, 4)
    inner = query.shape[0] if query.dim() == 4 else 1
    return physical.expand(batch.size, inner, *physical.shape[2:]).flatten(0, 1)


define(aten.scaled_dot_product_attention.default, instead=_attention, batch=_attention_batch)
