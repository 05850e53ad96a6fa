"""EmbeddingBag: a lookup, and one sum, mean or maximum a bag.

PyTorch's kernel does both at once and can't separate samples. As two steps, the lookup is `embedding`, whose
weight gradient a per-sample query never materialises, and the bags are segments of its rows.
"""

from __future__ import annotations

import torch

from psgrad.engine.transforms import diagnostics
from psgrad.engine.transforms.rules.families import aten
from psgrad.engine.transforms.rules.registry import refuse, replace
from psgrad.errors import TransformError

SUM, MEAN, MAX = range(3)


@replace(aten._embedding_bag.default)
@replace(aten._embedding_bag_forward_only.default)
def _embedding_bag(
    weight: torch.Tensor,
    index: torch.Tensor,
    offsets: torch.Tensor,
    scale: bool = False,
    mode: int = SUM,
    sparse: bool = False,
    per_sample_weights: torch.Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int = -1,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    if scale:
        raise TransformError(
            f"an embedding bag with scale_grad_by_freq=True{diagnostics.where()}",
            cause=(
                "its gradient is divided by how often a token occurs in the batch, so it is not the gradient"
                " of a function"
            ),
            next_step="build the embedding bag with scale_grad_by_freq=False",
        )
    bags, positions = offsets.shape[0], index.shape[0]
    # A position belongs to the last bag that starts at or before it: if several start there, all but that one
    # are empty.
    order = torch.arange(positions, dtype=offsets.dtype, device=offsets.device)
    bag = torch.searchsorted(offsets.contiguous(), order, right=True) - 1
    counted = index != padding_idx if padding_idx >= 0 else torch.ones_like(index, dtype=torch.bool)
    sizes = torch.zeros(bags, dtype=torch.long, device=bag.device).index_add(0, bag, counted.long())
    rows = aten.embedding.default(weight, index)
    if mode == MAX:
        out = _largest(rows, bag, counted, bags)
    else:
        if per_sample_weights is not None:
            rows = rows * per_sample_weights.unsqueeze(1)
        rows = torch.where(counted.unsqueeze(1), rows, 0)
        out = torch.zeros(bags, rows.shape[1], dtype=rows.dtype, device=rows.device).index_add(0, bag, rows)
        out = out / sizes.clamp(min=1).unsqueeze(1) if mode == MEAN else out
    real = slice(bags - include_last_offset)  # the last offset may be the end of the last bag
    return out[real], bag, sizes[real], sizes[real]


@refuse(aten.embedding_renorm.default)
def _embedding_renorm(
    weight: torch.Tensor, index: torch.Tensor, max_norm: float, norm_type: float
) -> torch.Tensor:
    raise TransformError(
        f"an embedding with max_norm={max_norm:g}{diagnostics.where()}",
        expected="a forward that leaves the parameters as they are",
        cause=(
            "it rescales the rows that a batch looks up, in the table itself, so that the loss of a sample"
            " depends on those before it"
        ),
        next_step=(
            "build the embedding with max_norm=None, and keep the norms small elsewhere, for instance after"
            " each step"
        ),
    )


def _largest(rows: torch.Tensor, bag: torch.Tensor, counted: torch.Tensor, bags: int) -> torch.Tensor:
    """For each bag and feature the largest value, whose cotangent goes to its first position; zero in an
    empty bag.

    NaN is treated as in PyTorch's kernel, which keeps a value if it is greater than all before: NaN at the
    first position is the result, elsewhere it is skipped.
    """
    positions, features = rows.shape
    if not positions:
        return torch.zeros(bags, features, dtype=rows.dtype, device=rows.device)
    order = torch.arange(positions, device=rows.device)
    begins = order == _earliest(torch.where(counted, order, positions), bag, bags).gather(0, bag)
    where, counted = bag.unsqueeze(1).expand(positions, features), counted.unsqueeze(1)
    values = torch.where(counted, rows.detach(), -torch.inf)
    values = torch.where(
        values.isnan(), torch.where(begins, torch.inf, -torch.inf).to(rows.dtype).unsqueeze(1), values
    )
    lowest = torch.full((bags, features), -torch.inf, dtype=rows.dtype, device=rows.device)
    largest = lowest.scatter_reduce(0, where, values, "amax").gather(0, where)
    first = _earliest(torch.where((values == largest) & counted, order.unsqueeze(1), positions), where, bags)
    return torch.where(first < positions, rows.gather(0, first.clamp(max=positions - 1)), 0)


def _earliest(order: torch.Tensor, bag: torch.Tensor, bags: int) -> torch.Tensor:
    """For each bag the smallest of its entries of `order` along axis 0; the number of positions in an empty
    bag.
    """
    none = torch.full((bags, *order.shape[1:]), order.shape[0], dtype=order.dtype, device=order.device)
    return none.scatter_reduce(0, bag, order, "amin")
