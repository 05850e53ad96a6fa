"""Where a run's weights live: on the device, or where they are stored, or in parts on the ranks of a group,
from where operators bring them in. On the CPU all processes of a host have them in memory once.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from psgrad.config import Config, ModelConfig
from psgrad.engine.execution.placement import (
    SHARE,
    Where,
    fit,
    is_quantised,
    memory_for_others,
    memory_for_parts,
    smallest_group,
)
from psgrad.engine.execution.ranks import OneProcess, Processes
from psgrad.engine.execution.sharded import WeightParts
from psgrad.engine.execution.stored import Stored
from psgrad.engine.execution.weight_sources import InMemory
from psgrad.engine.execution.weight_supply import Supply
from psgrad.engine.free_memory import free_host_memory, free_memory
from psgrad.errors import ConfigError
from psgrad.models.checkpoint_files import checkpoint_files
from psgrad.models.model_identity import tensor_digest
from psgrad.reports.words import amount
from psgrad.run.host_files import is_shared, made_once, remove_when_all_have, turn


@dataclass(frozen=True)
class Residence:
    """Where the weights live.

    Attributes:
        why: in words.
        room: bytes that weights may take on the device where they do not live there; None where they do.
        shard_ranks: of how many ranks each keeps a part of a weight; 1 where none does.
        supply: brings them to the device; None for weights that live there.
    """

    why: str
    room: int | None = None
    shard_ranks: int = 1
    supply: Supply | None = None

    @property
    def where(self) -> Where:
        if self.room is None:
            return "resident"
        return "offloaded" if self.shard_ranks == 1 else "sharded"

    def memory(self, limit: int | Literal["auto"]) -> int | None:
        """Bytes for a chunk under a limit of memory, without those of weights; None for what is free."""
        if limit == "auto":
            return None
        return limit if self.supply is None else limit - self.supply.budget

    def ranks(self, rank: int) -> range:
        """The group of a rank, which keeps all parts."""
        first = rank // self.shard_ranks * self.shard_ranks
        return range(first, first + self.shard_ranks)

    def supplied(self, model: nn.Module, device: torch.device, automatic: bool) -> Residence:
        """This residence for a model that is built but not on a device yet. automatic: whether the room is
        the free memory; then sharded weights take at most a rank's part of it, or the two largest weights.
        """
        if self.room is None:
            return self
        room = self.room
        if automatic and self.shard_ranks > 1:
            sizes = [each.numel() * each.element_size() for each in model.parameters()]
            room = memory_for_parts(room, sum(sizes), max(sizes, default=0), self.shard_ranks)
        return replace(self, supply=Supply(device, room))

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
                f" {amount(self.supply.budget)}, half of engine.memory",
                expected="room for the largest weight, as an operator needs the whole of it",
                next_step=f"set engine.memory to {amount(2 * sizes[name])} or more",
            )


@dataclass(frozen=True)
class Ranks:
    """The processes of a run.

    Attributes:
        processes: with this one.
        count: how many the run has. per_host: how many of them are on one host.
    """

    processes: Processes
    count: int
    per_host: int

    @classmethod
    def of(cls, processes: Processes | None) -> Ranks:
        found = OneProcess() if processes is None else processes
        return cls(found, found.size, int(os.environ.get("LOCAL_WORLD_SIZE") or 1))

    def parts(self, residence: Residence) -> WeightParts | None:
        """What this process keeps of sharded weights; None where it keeps them all, or none."""
        if residence.shard_ranks == 1 or self.processes.size == 1:
            return None
        return WeightParts(self.processes, residence.ranks(self.processes.rank))


def agreed_residence(config: Config, device: torch.device, ranks: Ranks) -> Residence:
    """As rank 0 finds it: what is free differs from rank to rank, and ranks have to take the same steps."""
    found, processes = residence_of(config, device, ranks), ranks.processes
    if processes.size == 1:
        return found
    own = [int(found.room is not None), found.shard_ranks]
    elsewhere, shard_ranks = processes.agreed("where weights live", lambda: own)
    if not elsewhere:
        return Residence(found.why)
    room = _room(config, free_memory(device)) if found.room is None else found.room
    return Residence(found.why, room, shard_ranks)


def residence_of(config: Config, device: torch.device, ranks: Ranks) -> Residence:
    """As `engine.parameters` says; auto by the size of the model's files and the free memory. Raises
    ConfigError for a group that the ranks can't be divided into.
    """
    if config.model.load is not None:
        return Residence(f"model.load: {config.model.load} keeps them on the device")
    engine, free = config.engine, free_memory(device)
    size = weight_bytes(config.model, config.base)
    compared = f"the model's files have {amount(size)}, and {amount(free)} are free"
    if engine.parameters == "resident" or (engine.parameters == "auto" and fit(size, free)):
        return Residence("engine.parameters says so" if engine.parameters == "resident" else compared)
    room, why = _room(config, free), compared
    if engine.parameters != "auto":
        why = "engine.parameters says so"
    group = 1 if engine.parameters == "offloaded" else _group(engine.shard_ranks, ranks, size, free)
    if engine.parameters == "sharded":
        if ranks.count == 1:
            return Residence("engine.parameters is sharded, and there is one process: in their file", room)
        group = group or ranks.count
    return Residence(why, room, group or 1)


def _room(config: Config, free: int) -> int:
    """Bytes that weights may take on the device where they do not live there."""
    memory = config.engine.memory
    return memory_for_others(free // SHARE if memory == "auto" else memory)


def _group(wanted: int | str, ranks: Ranks, size: int, free: int) -> int | None:
    """How many ranks keep the parts of a weight, as wanted or as few as have room for them; None where none
    do. size: bytes of all weights. free: bytes of a rank.
    """
    if wanted != "auto":
        if ranks.count > 1 and ranks.count % int(wanted):
            raise ConfigError(
                f"engine.shard_ranks: {wanted}, and there are {ranks.count} ranks",
                expected=f"a number that {ranks.count} can be divided by, or auto",
                next_step="start another number of processes, or set engine.shard_ranks: auto",
            )
        return int(wanted) if ranks.count > 1 else None
    return smallest_group(size, free, ranks.count, ranks.per_host)


def weight_bytes(config: ModelConfig, base: Path) -> int:
    """The bytes of a model's files, of its checkpoint and its folder; 0 for files that are not on this
    machine yet, such as those of a hub id.
    """
    files: list[Path] = []
    for path in (base / each for each in (config.checkpoint, config.pretrained) if each is not None):
        files += path.rglob("*") if path.is_dir() else checkpoint_files(path) if path.is_file() else []
    return sum(file.stat().st_size for file in files if file.is_file())


_ALIGNED = 64  # bytes, as PyTorch allocates: kernels take the same steps in all processes


@contextmanager
def turn_to_read(config: ModelConfig, base: Path) -> Iterator[None]:
    """Inside are as many processes of this host as have room for two copies of the files of a model."""
    processes = int(os.environ.get("LOCAL_WORLD_SIZE") or 1)
    room = processes * free_host_memory() // (2 * max(1, weight_bytes(config, base)))
    with turn("model", min(processes, max(1, room))):
        yield


def share_weights(model: nn.Module) -> nn.Module:
    """The model itself. On the CPU its weights lie in a file that the processes of this host share.

    Each process builds and fills the model, since that runs code. Then one of them writes the weights to a
    file, and all map it and let go of their own. The checkpoint's file itself is not mapped: it may be
    written again while the run goes on, and its tensors do not lie where kernels expect them.

    Nothing is done in a process alone. A process that writes into a tensor gets memory of its own for that
    page, so that no other one sees it.
    """
    tensors = list(_shareable(model))
    sizes = [-(-each.nbytes // _ALIGNED) * _ALIGNED for each in tensors]
    if not tensors or not is_shared():
        return model
    digest = hashlib.sha256("".join(map(tensor_digest, tensors)).encode())
    file = made_once(f"weights {digest.hexdigest()}", lambda target: _write(target, tensors, sizes))
    if file is None:
        return model
    mapped = torch.from_file(str(file), shared=False, size=sum(sizes), dtype=torch.uint8)
    parts = torch.split(mapped, sizes)
    for tensor, found in zip(tensors, parts, strict=True):
        tensor.data = found[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
    remove_when_all_have(file)
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


def _write(target: Path, tensors: list[Tensor], sizes: list[int]) -> None:
    with target.open("wb") as file:
        for tensor, size in zip(tensors, sizes, strict=True):
            file.write(tensor.detach().reshape(-1).view(torch.uint8).numpy().data)
            file.write(bytes(size - tensor.nbytes))
