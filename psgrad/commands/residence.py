"""Where a run's weights live: on the device, or where they are stored, from where operators bring them in. On
the CPU all processes of a host have them in memory once.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from psgrad.config import Config, ModelConfig
from psgrad.engine.execution.placement import SHARE, Where, fit, is_quantised, memory_for_others
from psgrad.engine.execution.ranks import Processes
from psgrad.engine.execution.stored import Stored
from psgrad.engine.execution.weight_sources import InMemory
from psgrad.engine.execution.weight_supply import Supply
from psgrad.engine.free_memory import free_memory
from psgrad.errors import ConfigError
from psgrad.models.checkpoint_files import checkpoint_files
from psgrad.models.model_identity import tensor_digest
from psgrad.reports.words import amount


@dataclass(frozen=True)
class Residence:
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
    def where(self) -> Where:
        return "resident" if self.room is None else "offloaded"

    def memory(self, limit: int | Literal["auto"]) -> int | None:
        """Bytes for a chunk under a limit of memory, without those of weights; None for what is free."""
        if limit == "auto":
            return None
        return limit if self.supply is None else limit - self.supply.budget

    def supplied(self, device: torch.device) -> Residence:
        """This residence with what brings the weights to a device."""
        return self if self.room is None else replace(self, supply=Supply(device, self.room))

    def require_room(self, model: nn.Module) -> None:
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


def residence_of(config: Config, device: torch.device, processes: Processes) -> Residence:
    """As `engine.parameters` says; auto by the size of the model's files and the free memory, as rank 0 finds
    it: what is free differs from rank to rank, and ranks have to take the same steps.
    """
    if config.model.load is not None:
        return Residence(f"model.load: {config.model.load} keeps them on the device")
    engine, free = config.engine, free_memory(device)
    size = weight_bytes(config.model, config.base)
    why = "engine.parameters says so"
    offloaded = engine.parameters == "offloaded"
    if engine.parameters == "auto":
        why = f"the model's files have {amount(size)}, and {amount(free)} are free"
        (offloaded,) = map(bool, processes.agreed("where weights live", lambda: [not fit(size, free)]))
    if not offloaded:
        return Residence(why)
    return Residence(why, memory_for_others(free // SHARE if engine.memory == "auto" else engine.memory))


def weight_bytes(config: ModelConfig, base: Path) -> int:
    """The bytes of a model's files, of its checkpoint and its folder; 0 for files that are not on this
    machine yet, such as those of a hub id.
    """
    files: list[Path] = []
    for path in (base / each for each in (config.checkpoint, config.pretrained) if each is not None):
        files += path.rglob("*") if path.is_dir() else checkpoint_files(path) if path.is_file() else []
    return sum(file.stat().st_size for file in files if file.is_file())


_ALIGNED = 64  # bytes, as PyTorch allocates: kernels take the same steps in all processes


def share_weights(model: nn.Module, processes: Processes) -> nn.Module:
    """The model itself. On the CPU its weights lie in a file that the processes of this host share.

    Each process builds and fills the model, since that runs code. Then the first one of each host writes the
    weights to a file, and all map it and let go of their own. The checkpoint's file itself is not mapped: it
    may be written again while the run goes on, and its tensors do not lie where kernels expect them.

    Nothing is done in a process alone, nor where the file can't be written. A process that has other weights
    keeps them. A process that writes into a tensor gets memory of its own for that page, so that no other one
    sees it.
    """
    if processes.size == 1:
        return model
    tensors = list(_shareable(model))
    sizes = [-(-each.nbytes // _ALIGNED) * _ALIGNED for each in tensors]
    digest = hashlib.sha256("".join(map(tensor_digest, tensors)).encode()).hexdigest()
    place = int(os.environ.get("LOCAL_RANK", "0"))
    file = _written(digest, tensors, sizes) if tensors and place == 0 else ""
    try:
        shared = Path(processes.texts("the file of weights", file)[processes.rank - place])
        if shared.name == digest:
            mapped = torch.from_file(str(shared), shared=False, size=sum(sizes), dtype=torch.uint8)
            for tensor, found in zip(tensors, torch.split(mapped, sizes), strict=True):
                tensor.data = found[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        processes.meet("weights are mapped")
    finally:  # a file stays in memory for as long as a process maps it
        if file:
            shutil.rmtree(Path(file).parent)
    return model


def _shareable(model: nn.Module) -> Iterator[Tensor]:
    """Each tensor once, with a storage to itself."""
    found = {id(each): each for each in (*model.parameters(), *model.buffers())}.values()
    stored = [
        each.view_of_source if isinstance(each, Stored) and isinstance(each.source, InMemory) else each
        for each in found
    ]
    plain = [each for each in stored if type(each) in (Tensor, nn.Parameter) and each.device.type == "cpu"]
    dense = [each for each in plain if each.layout == torch.strided and each.is_contiguous() and each.numel()]
    places = [each.untyped_storage().data_ptr() for each in dense]
    return (each for each, place in zip(dense, places, strict=True) if places.count(place) == 1)


def _written(name: str, tensors: list[Tensor], sizes: list[int]) -> str:
    """A file of this name with these weights, in a new folder that no other user can open; empty where it
    can't be written, as on a full disk.
    """
    folder = ""
    try:
        folder = tempfile.mkdtemp(prefix="psgrad-")
        with (Path(folder) / name).open("wb") as file:
            for tensor, size in zip(tensors, sizes, strict=True):
                file.write(tensor.detach().reshape(-1).view(torch.uint8).numpy().data)
                file.write(bytes(size - tensor.nbytes))
    except OSError:
        shutil.rmtree(folder, ignore_errors=True)
        return ""
    return str(Path(folder) / name)
