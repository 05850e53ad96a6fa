"""Memory that widened weights take in turn."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from psgrad.engine.execution import lent_memory
from psgrad.engine.execution.lent_memory import Lent
from psgrad.engine.execution.stored import Stored
from psgrad.engine.execution.weight_sources import InMemory


@pytest.fixture(autouse=True)
def _without_spare(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lent_memory, "_spare", [])


def narrow(*shape: int) -> Tensor:
    return torch.randn(*shape).bfloat16()


def test_widened_weights_take_one_memory_in_turn() -> None:
    places = []
    for weight in (narrow(1024, 1024), narrow(1024, 512).t(), narrow(512, 1024)):
        lent = Lent()
        wide = lent.widened(weight, torch.float32)
        torch.testing.assert_close(wide, weight.float(), rtol=0, atol=0)
        assert wide.stride() == weight.float().stride()
        places.append(wide.data_ptr())
        lent.end(wide @ wide.t())
    assert len(set(places)) == 1


def test_two_weights_of_one_operator_take_two_memories() -> None:
    lent, first, second = Lent(), narrow(1024, 512), narrow(1024, 512)
    wide = lent.widened(first, torch.float32), lent.widened(second, torch.float32)
    torch.testing.assert_close(wide[0], first.float(), rtol=0, atol=0)
    assert wide[0].data_ptr() != wide[1].data_ptr()
    lent.end(None)
    assert len(lent_memory._spare) == 1


def test_memory_of_a_result_is_not_lent_again() -> None:
    lent, weight = Lent(), narrow(1024, 512)
    result = lent.widened(weight, torch.float32).view(-1)
    lent.end((result,))
    Lent().widened(narrow(1024, 512), torch.float32)
    torch.testing.assert_close(result, weight.float().view(-1), rtol=0, atol=0)


@pytest.mark.parametrize("weight", [narrow(10, 10), narrow(1024, 1024)[:, ::2], torch.randn(1024, 512)])
def test_small_sparse_and_wide_weights_have_memory_of_their_own(weight: Tensor) -> None:
    lent = Lent()
    torch.testing.assert_close(lent.widened(weight, torch.float32), weight.float(), rtol=0, atol=0)
    lent.end(None)
    assert not lent_memory._spare


def test_operators_on_stored_weights_lend_memory() -> None:
    """An operator that returns its weight's numbers, and then another one."""
    first, second = narrow(1024, 512), narrow(1024, 512)
    kept = torch.ops.aten._unsafe_view.default(Stored(InMemory(first), torch.float32), [512, 1024])
    product = torch.mm(torch.ones(1, 1024), Stored(InMemory(second), torch.float32))
    torch.testing.assert_close(kept, first.float().view(512, 1024), rtol=0, atol=0)
    torch.testing.assert_close(product, torch.ones(1, 1024) @ second.float(), rtol=0, atol=0)
    assert len(lent_memory._spare) == 1
