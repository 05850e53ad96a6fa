"""Where a run's weights live: on the device, or where they are stored, from where operators bring them in."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from psgrad.config import Config, ModelConfig
from psgrad.engine.execution.residence_plan import SHARE, Where
from psgrad.engine.execution.stored import Stored, Supply
from psgrad.engine.free_memory import free_memory
from psgrad.errors import ConfigError
from psgrad.inputs.models.checkpoint_headers import checkpoint_files
from psgrad.reports.words import amount


@dataclass(frozen=True)
class Residence:
    """Where the weights live.

    Attributes:
        why: in words.
        supply: brings them to the device; None for weights that live there.
    """

    why: str
    supply: Supply | None = None

    @property
    def where(self) -> Where:
        return "resident" if self.supply is None else "offloaded"

    def require_room(self, model: nn.Module) -> None:
        """Raises ConfigError for a weight that is larger than all that may be on the device at a time."""
        if self.supply is None:
            return
        sizes = {
            name: parameter.numel() * parameter.element_size()
            for name, parameter in model.named_parameters()
            if isinstance(parameter.data, Stored)
        }
        name = max(sizes, key=lambda name: sizes[name], default=None)
        if name is not None and sizes[name] > self.supply.budget:
            raise ConfigError(
                f"the weight {name} takes {amount(sizes[name])}, and offloaded weights have"
                f" {amount(self.supply.budget)}, half of engine.memory",
                expected="room for the largest weight, as an operator needs the whole of it",
                next_step=f"set engine.memory to {amount(2 * sizes[name])} or more",
            )


def residence_of(config: Config, device: torch.device) -> Residence:
    """As `engine.parameters` says; auto by the size of the model's files and the free memory."""
    engine, free = config.engine, free_memory(device)
    size = weight_bytes(config.model, config.base)
    compared = f"the model's files have {amount(size)}, and {amount(free)} are free"
    if engine.parameters == "resident" or (engine.parameters == "auto" and size <= free // SHARE):
        return Residence("engine.parameters says so" if engine.parameters == "resident" else compared)
    room = (free // SHARE if engine.memory == "auto" else engine.memory) // SHARE
    why = "engine.parameters says so" if engine.parameters == "offloaded" else compared
    return Residence(why, Supply(device, room))


def weight_bytes(config: ModelConfig, base: Path) -> int:
    """Of the files of a model; 0 for those that are not on this machine yet."""
    return sum(_size(base / each) for each in (config.checkpoint, config.pretrained) if each is not None)


def _size(path: Path) -> int:
    """Bytes of a checkpoint or of a model's folder; 0 for a hub id."""
    files = path.rglob("*") if path.is_dir() else checkpoint_files(path) if path.is_file() else []
    return sum(file.stat().st_size for file in files if file.is_file())
