"""The device of the tests; and marks for those that compare it with the CPU, and so need another one."""

from __future__ import annotations

import os

import pytest
import torch

from tests.device.checked import CHECKED, checked_device

NAMED = os.environ.get("PSGRAD_TEST_DEVICE")
STRICT = NAMED == CHECKED
needs_the_strict_device = pytest.mark.skipif(
    not STRICT, reason=f"PSGRAD_TEST_DEVICE={CHECKED} pytest tests/device"
)


def named_device() -> torch.device:
    """The device that PSGRAD_TEST_DEVICE names. Without a name the GPU, if there is one, else the CPU."""
    if STRICT:
        return checked_device()
    device = torch.device(NAMED or ("cuda" if torch.cuda.is_available() else "cpu"))
    # with its number, as tensors on it have it
    return torch.device("cuda", 0) if device == torch.device("cuda") else device


needs_a_device = pytest.mark.skipif(
    not STRICT and named_device().type == "cpu",
    reason=f"PSGRAD_TEST_DEVICE={CHECKED} (or cuda) pytest tests/device",
)
