"""Autocast for operators that arrive in one piece.

PyTorch's autocast stands above the place where we see an operator, so most come to us cast already. It knows some operators only by
the products inside them (on a CPU the recurrent layers, their cells and einsum; on a GPU the recurrent layers), which our rules run below
it. There their arguments are cast here, as autocast would have cast those products'.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map

from psgrad.engine.transforms.operators import Op, aten

WHOLE: frozenset[Op] = frozenset(
    overload
    for packet in (
        aten.lstm,
        aten.gru,
        aten.rnn_tanh,
        aten.rnn_relu,
        aten.lstm_cell,
        aten.gru_cell,
        aten.rnn_tanh_cell,
        aten.rnn_relu_cell,
        aten.einsum,
        aten.chain_matmul,
        aten.linalg_multi_dot,
    )
    for name in packet.overloads()
    if name != "out"
    for overload in (getattr(packet, name),)
)
"""What autocast would cast the products of, and we run in one piece."""

_HALVES = (torch.bfloat16, torch.float16)


def cast(args: Any, kwargs: Any) -> Any:
    """(args, kwargs) of such an operator under autocast: float32 in the halves that it met.

    Where all is float32 it stays so, which is slower than autocast and more exact: whether autocast is on is hidden from those who see
    operators, as PyTorch turns it off for them. That it is around somewhere is not.
    """
    tensors = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, torch.Tensor)]
    halves = {x.dtype for x in tensors if x.dtype in _HALVES}
    if len(halves) != 1 or all(x.dtype != torch.float32 for x in tensors) or not _inside_autocast():
        return args, kwargs
    kind = halves.pop()
    return tree_map(lambda x: x.to(kind) if isinstance(x, torch.Tensor) and x.dtype == torch.float32 else x, (args, kwargs))


def _inside_autocast() -> bool:
    depth = torch.autocast_increment_nesting()
    torch.autocast_decrement_nesting()
    return depth > 1
