"""The hash of a tensor: of its type, its shape and its bytes, for every layout, on any device."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

# What is copied at once from another device, or out of a tensor that is not contiguous.
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
