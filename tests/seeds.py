"""The seed of PyTorch's generators, which tests set tens of thousands of times."""

from __future__ import annotations

import torch


def set_seed(seed: int) -> None:
    """`torch.manual_seed`, and as good where there is no accelerator: then the CPU's generator is the only
    one.

    `torch.manual_seed` takes milliseconds there: for each kind of accelerator that might be loaded later it
    writes down the whole stack.
    """
    if torch.accelerator.is_available():
        torch.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)
