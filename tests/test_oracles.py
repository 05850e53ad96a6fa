"""The oracles agree with each other, so that a disagreement with the engine is the engine's."""

from __future__ import annotations

import pytest
import torch

from tests.oracles import one_sample_gradients, torch_func_gradients
from tests.small_models import ARCHITECTURES, Architecture


@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda architecture: architecture.name)
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_the_loop_and_torch_func_agree(architecture: Architecture, device: torch.device) -> None:
    model = architecture.build(dtype=torch.float64).to(device)
    inputs, target = architecture.batch(4, dtype=torch.float64)
    arguments = (model, architecture.loss, tuple(value.to(device) for value in inputs), target.to(device))
    torch.testing.assert_close(
        torch_func_gradients(*arguments), one_sample_gradients(*arguments), rtol=1e-10, atol=1e-12
    )
