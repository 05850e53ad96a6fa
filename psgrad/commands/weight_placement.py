"""Where a run computes and in which precision; and where its weights live: on the device, or where they are
stored, from where operators bring them in.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from torch import nn

from psgrad.config import Config, ModelConfig
from psgrad.engine.execution.placement import is_quantised
from psgrad.engine.execution.ranks import Processes
from psgrad.engine.execution.stored import Stored
from psgrad.engine.execution.weight_supply import Supply
from psgrad.engine.free_memory import free_memory
from psgrad.errors import ConfigError
from psgrad.models.checkpoint_files import checkpoint_files
from psgrad.reports.words import amount

# Weights live on the device if they take at most the memory divided by this. Otherwise those that are moved
# there for a chunk may take the same share of what is left for them and the chunk.
SHARE = 2


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
            f"engine.device: {name!r} can't be used: {str(error).splitlines()[0]}; expected auto, cpu,"
            " cuda or cuda:N",
            hint="set engine.device: auto, or install a PyTorch build for this device",
        ) from error
    return device


def pick_precision(name: str) -> tuple[torch.dtype, torch.dtype | None]:
    """(the type of parameters and inputs, the type that autocast computes in) of a config's dtype; None
    without autocast.

    What is differentiated of a checkpoint in half precision is float32, which holds its numbers exactly.
    """
    kind: torch.dtype = getattr(torch, name)
    return (torch.float32, kind) if kind.itemsize == 2 else (kind, None)


@dataclass(frozen=True)
class WeightPlacement:
    """Where the weights live.

    Attributes:
        why: in words.
        room: bytes that weights may take on the device where they do not live there; None where they do.
        supply: brings them to the device; None for weights that live there.
    """

    why: str
    room: int | None = None
    supply: Supply | None = None

    @property
    def where(self) -> Literal["resident", "offloaded"]:
        return "resident" if self.room is None else "offloaded"

    def memory(self, limit: int | Literal["auto"]) -> int | None:
        """Bytes for a chunk under a limit of memory, without those of weights; None for what is free."""
        if limit == "auto":
            return None
        return limit if self.supply is None else limit - self.supply.budget

    def supplied(self, device: torch.device) -> WeightPlacement:
        """This placement with what brings the weights to a device."""
        return self if self.room is None else replace(self, supply=Supply(device, self.room))

    def require_memory(self, model: nn.Module) -> None:
        """Raises ConfigError for a weight that is larger than all that may be on the device at a time."""
        if self.supply is None:
            return
        sizes = {
            name: parameter.numel() * parameter.element_size()
            for name, parameter in model.named_parameters()
            if isinstance(parameter.data, Stored) and not is_quantised(parameter)
        }
        name = max(sizes, key=lambda name: sizes[name], default=None)
        if name is not None and sizes[name] > self.supply.budget:
            raise ConfigError(
                f"the weight {name} takes {amount(sizes[name])}, and {self.where} weights have"
                f" {amount(self.supply.budget)}, half of engine.memory; expected room for the largest"
                " weight, as an operator needs the whole of it",
                hint=f"set engine.memory to {amount(2 * sizes[name])} or more",
            )


def weight_placement_of(config: Config, device: torch.device, processes: Processes) -> WeightPlacement:
    """As `engine.parameters` says; auto by the size of the model's files and the free memory, as rank 0 finds
    it: what is free differs from rank to rank, and ranks have to take the same steps.
    """
    engine, free = config.engine, free_memory(device)
    size = weight_bytes(config.model, config.base)
    why = "engine.parameters says so"
    offloaded = engine.parameters == "offloaded"
    if engine.parameters == "auto":
        why = f"the model's files have {amount(size)}, and {amount(free)} are free"
        (offloaded,) = map(bool, processes.agreed("where weights live", lambda: [size > free // SHARE]))
    if not offloaded:
        return WeightPlacement(why)
    memory = free // SHARE if engine.memory == "auto" else engine.memory  # for these weights and a chunk
    return WeightPlacement(why, memory // SHARE)


def weight_bytes(config: ModelConfig, base: Path) -> int:
    """The bytes of a model's files, of its checkpoint and its folder; 0 for files that are not on this
    machine yet, such as those of a hub id.
    """
    files: list[Path] = []
    for path in (base / each for each in (config.checkpoint, config.pretrained) if each is not None):
        files += path.rglob("*") if path.is_dir() else checkpoint_files(path) if path.is_file() else []
    return sum(file.stat().st_size for file in files if file.is_file())
