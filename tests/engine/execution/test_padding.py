"""Whether a model ignores padding is found by comparing rows alone with themselves padded."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from psgrad.engine.execution.buckets import padding_is_masked
from psgrad.ragged import Block
from tests.engine.execution.ragged_models import VOCABULARY, case, with_mask


def masked(kind: str, lengths: list[int], dtype: torch.dtype = torch.float64) -> bool:
    found = case(kind, dtype)
    block = found.block(found.rows(lengths))
    inputs = tuple(x.to(dtype) if x.is_floating_point() else x for x in block.inputs)
    return padding_is_masked(found.objective.loss, found.objective.params, replace(block, inputs=inputs))


@pytest.mark.parametrize("kind", ["mean", "bert", "gpt2", "llama", "t5"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_padding_is_masked_by_models_that_read_the_mask(kind: str, dtype: torch.dtype) -> None:
    assert masked(kind, [3, 9, 12], dtype)


@pytest.mark.parametrize("kind", ["lstm", "conv"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_padding_is_read_by_models_without_a_mask(kind: str, dtype: torch.dtype) -> None:
    assert not masked(kind, [3, 9, 12], dtype)


def test_padding_is_masked_where_all_rows_are_as_long() -> None:
    assert masked("lstm", [5, 5])


class Short(nn.Module):
    """Takes four positions at most; more than that are no numbers that it can look up."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.places = nn.Embedding(VOCABULARY, 3), nn.Embedding(4, 3)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        x = self.table(ids) + self.places(torch.arange(ids.shape[1]))
        return (x * mask.unsqueeze(-1)).sum(1)


def block_of(lengths: list[int], **changes: Any) -> tuple[Any, Block]:
    bert = case("mean")
    other = replace(bert, model=Short(), criterion=F.cross_entropy, **changes)
    return other.objective, other.block(other.rows(lengths))


def test_padding_that_the_model_fails_on_is_not_masked() -> None:
    objective, block = block_of([3, 6])
    assert not padding_is_masked(objective.loss, objective.params, block)


def test_padding_of_a_row_that_fails_alone_is_left_to_the_pass() -> None:
    objective, block = block_of([5, 6])
    assert padding_is_masked(objective.loss, objective.params, block)


def test_padding_that_changes_the_loss_alone_or_the_gradient_alone_is_not_masked() -> None:
    """A loss that counts positions has the same gradient; a penalty that is zero here has not."""
    found = case("mean")

    def counting(output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output, target)

    class Counting(type(found.model)):  # type: ignore[misc]
        def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
            return super().forward(ids, mask) + self.extra(ids)

        def extra(self, ids: Tensor) -> Tensor:
            return torch.tensor([0.0, 0.1 * ids.shape[1]], dtype=torch.float64)

    class Sloping(Counting):
        def extra(self, ids: Tensor) -> Tensor:
            zero = self.table.weight[ids].sum(1)[:, :2]
            return zero - zero.detach()

    for kind in (Counting, Sloping):
        torch.manual_seed(0)
        other = replace(
            found, model=kind().double(), criterion=counting, row=lambda n: (with_mask(n), torch.tensor(1))
        )
        block = other.block(other.rows([3, 9]))
        assert not padding_is_masked(other.objective.loss, other.objective.params, block)
