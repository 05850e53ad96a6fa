"""Memory that widened weights take in turn."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from psgrad.engine.execution import reused_memory
from psgrad.engine.execution.reused_memory import ReusedMemory
from psgrad.engine.execution.stored import Stored
from psgrad.engine.execution.weight_sources import InMemory


@pytest.fixture(autouse=True)
def _without_spare(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reused_memory, "_spare", [])


def narrow(*shape: int) -> Tensor:
    return torch.randn(*shape).bfloat16()


def test_widened_weights_take_one_memory_in_turn() -> None:
    places = []
    for weight in (narrow(1024, 1024), narrow(1024, 512).t(), narrow(512, 1024)):
        reused = ReusedMemory()
        wide = reused.widened(weight, torch.float32)
        torch.testing.assert_close(wide, weight.float(), rtol=0, atol=0)
        assert wide.stride() == weight.float().stride()
        places.append(wide.data_ptr())
        reused.end(wide @ wide.t())
    assert len(set(places)) == 1


def test_two_weights_of_one_operator_take_two_memories() -> None:
    reused, first, second = ReusedMemory(), narrow(1024, 512), narrow(1024, 512)
    wide = reused.widened(first, torch.float32), reused.widened(second, torch.float32)
    torch.testing.assert_close(wide[0], first.float(), rtol=0, atol=0)
    assert wide[0].data_ptr() != wide[1].data_ptr()
    reused.end(None)
    assert len(reused_memory._spare) == 1


def test_memory_of_a_result_is_not_reused() -> None:
    reused, weight = ReusedMemory(), narrow(1024, 512)
    result = reused.widened(weight, torch.float32).view(-1)
    reused.end((result,))
    ReusedMemory().widened(narrow(1024, 512), torch.float32)
    torch.testing.assert_close(result, weight.float().view(-1), rtol=0, atol=0)


@pytest.mark.parametrize("weight", [narrow(10, 10), narrow(1024, 1024)[:, ::2], torch.randn(1024, 512)])
def test_small_sparse_and_wide_weights_have_memory_of_their_own(weight: Tensor) -> None:
    reused = ReusedMemory()
    torch.testing.assert_close(reused.widened(weight, torch.float32), weight.float(), rtol=0, atol=0)
    reused.end(None)
    assert not reused_memory._spare


def test_operators_on_stored_weights_lend_memory() -> None:
    """An operator that returns its weight's numbers, and then another one."""
    first, second = narrow(1024, 512), narrow(1024, 512)
    kept = torch.ops.aten._unsafe_view.default(Stored(InMemory(first), torch.float32), [512, 1024])
    product = torch.mm(torch.ones(1, 1024), Stored(InMemory(second), torch.float32))
    torch.testing.assert_close(kept, first.float().view(512, 1024), rtol=0, atol=0)
    torch.testing.assert_close(product, torch.ones(1, 1024) @ second.float(), rtol=0, atol=0)
    assert len(reused_memory._spare) == 1
