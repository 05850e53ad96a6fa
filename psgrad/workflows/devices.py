"""The device, the precision and the machine's constants that a config names."""

from __future__ import annotations

import os

import torch

from psgrad.config import Config
from psgrad.engine.gradients import machine
from psgrad.errors import ConfigError


def pick_device(name: str) -> torch.device:
    """The device of a config; 'auto' is a GPU if there is one. One of several processes on a machine takes
    the GPU of its own number (LOCAL_RANK, as torchrun sets it).
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and "LOCAL_RANK" in os.environ:
        name = f"cuda:{int(os.environ['LOCAL_RANK']) % max(1, torch.cuda.device_count())}"
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(
            f"engine.device: {name!r} can't be used: {str(error).splitlines()[0]}",
            expected="auto, cpu, cuda or cuda:N",
            next_step="set engine.device: auto, or install a PyTorch build for this device",
        ) from error
    return device


def use_machine(config: Config, device: torch.device) -> None:
    """Have the machine's constants that the config names in force, if it names any. Raises ConfigError where
    they can't be used.
    """
    machine.use(None if config.engine.machine is None else config.base / config.engine.machine)
    machine.machine(device)


def pick_precision(name: str) -> tuple[torch.dtype, torch.dtype | None]:
    """(the type of parameters and inputs, the type that autocast computes in) of a config's dtype; None
    without autocast.

    What is differentiated of a checkpoint in half precision is float32, which holds its numbers exactly.
    """
    kind: torch.dtype = getattr(torch, name)
    return (torch.float32, kind) if kind.itemsize == 2 else (kind, None)
