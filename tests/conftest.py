"""What holds for every test: the device, the seeds, and a precision at which a difference means a mistake."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from hypothesis import register_random, settings

from tests.workplace import Workplace

# What was measured of the machine at hand, and kept, decides orders of contraction: the tests are the same everywhere.
os.environ["PSGRAD_MACHINE"] = "default"

# The same examples in every run: a test that fails does so for everybody. The first call on a device is slow, so no deadline.
settings.register_profile("psgrad", deadline=None, derandomize=True, max_examples=30)
settings.load_profile("psgrad")


class TorchRandom:
    """torch's generator in the form that hypothesis asks for, so that an example always draws the same tensors."""

    seed = staticmethod(torch.manual_seed)
    getstate = staticmethod(torch.get_rng_state)
    setstate = staticmethod(torch.set_rng_state)


torch_random = TorchRandom()  # hypothesis keeps a weak reference only
register_random(torch_random)

torch.set_num_threads(min(2, torch.get_num_threads()))
# TF32 keeps 10 bits of mantissa, less than any tolerance below.
torch.backends.cuda.matmul.allow_tf32 = False
torch.backends.cudnn.allow_tf32 = False


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The GPU where there is one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Workplace:
    """A folder with a config that works, to be changed by the test."""
    return Workplace(tmp_path, monkeypatch, capfd)
