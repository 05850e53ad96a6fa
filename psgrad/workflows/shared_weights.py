"""The weights of a model in memory once for all processes of a host.

Each process builds and fills the model, since that runs code. Then one of them writes the weights to a file,
and all map it and let go of their own. The checkpoint's file itself is not mapped: it may be written again
while the run goes on, and its tensors do not lie where kernels expect them.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from psgrad.config import ModelConfig
from psgrad.engine.execution.stored import InMemory, Stored
from psgrad.engine.free_memory import free_host_memory
from psgrad.inputs.models.identity import tensor_digest
from psgrad.inputs.sources.host_files import is_shared, made_once, remove_when_all_have, turn
from psgrad.workflows.residence import weight_bytes

_ALIGNED = 64  # bytes, as PyTorch allocates: kernels take the same steps in all processes


@contextmanager
def turn_to_read(config: ModelConfig, base: Path) -> Iterator[None]:
    """Inside are as many processes of this host as have room for two copies of the files of a model."""
    with turn("model", _at_once(config, base)):
        yield


def _at_once(config: ModelConfig, base: Path) -> int:
    processes = int(os.environ.get("LOCAL_WORLD_SIZE") or 1)
    size = weight_bytes(config, base)
    return min(processes, max(1, processes * free_host_memory() // (2 * max(1, size))))


def share_weights(model: nn.Module) -> nn.Module:
    """The model itself. On the CPU its weights lie in a file that the processes of this host share.

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
