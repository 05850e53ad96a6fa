"""What every test of transforms is held to: nothing of a transform is left behind, whatever happened
in it.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from psgrad.engine.transforms.state import state

FUNCTION_BASE = torch.autograd.Function.__mro__[1]


@pytest.fixture(autouse=True)
def _nothing_is_left_behind() -> Iterator[None]:
    before = (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.backends.mha.get_fastpath_enabled(),
    )
    yield
    after = (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.backends.mha.get_fastpath_enabled(),
    )
    assert after == before
    assert state.stack == []
    assert not state.interpreting
    assert not state.watchers
    assert not state.draws
    assert state.outside is None
    assert "apply" not in vars(FUNCTION_BASE)
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None


@pytest.fixture
def float64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)
