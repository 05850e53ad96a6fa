"""Folders of torch.distributed.checkpoint, as sharded training (FSDP) writes them, read by its own reader,
without a process group. Their index is a pickle, of which nothing but its own classes is made.
"""

from __future__ import annotations

import pickle
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from psgrad.config.values import require_regular
from psgrad.errors import CheckpointError, ConfigError
from psgrad.wording import first_line

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata

INDEX = ".metadata"
# The classes that an index is made of. All others are refused before they are imported.
_ALLOWED = {
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size", "device"},
    "collections": {"OrderedDict"},
    "pathlib": {"Path", "PosixPath", "PurePosixPath"},
}


def read_distributed(folder: Path, key: str | None = None) -> dict[str, Tensor]:
    """name -> tensor [*shape], put together from all ranks' files; below `key`, where one is given. Without
    one, states of optimisers are left out. Raises ConfigError and CheckpointError.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from torch.distributed.checkpoint.state_dict_loader import load

    metadata = _read_index(folder)

    class Reader(FileSystemReader):
        def read_metadata(self, *_: Any, **__: Any) -> Metadata:
            return metadata

    prefix = "" if key is None else f"{key}."
    found = {
        name: torch.empty(each.size, dtype=each.properties.dtype)
        for name, each in metadata.state_dict_metadata.items()
        if isinstance(each, TensorStorageMetadata) and name.startswith(prefix)
        if key is not None or not name.startswith(("optim", "optimizer"))
    }
    if not found:
        tops = sorted({name.partition(".")[0] for name in metadata.state_dict_metadata})
        raise ConfigError(
            f"the checkpoint {folder} has no tensors{f' below {key!r}' if key is not None else ''}",
            hint=f"set model.state_dict_key to one of {', '.join(tops)}" if tops else None,
        )
    try:
        with warnings.catch_warnings(action="ignore"):  # that there is no process group
            load(found, storage_reader=Reader(folder), no_dist=True)
    except (Exception, CheckpointException) as error:  # the second is not an Exception
        raise CheckpointError(
            f"the checkpoint {folder} is damaged: {_innermost(error)}; expected the files of all ranks, as"
            " torch.distributed.checkpoint wrote them",
            hint="an interrupted copy, or a folder of which some ranks' files are missing",
        ) from error
    return {name.removeprefix(prefix): value for name, value in found.items()}


def _read_index(folder: Path) -> Metadata:
    """What a checkpoint consists of: names, shapes and types. Raises CheckpointError."""
    from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

    path = folder / INDEX
    require_regular(path, "index")
    try:
        with path.open("rb") as file:
            metadata = _IndexReader(file).load()
    except Exception as error:
        raise CheckpointError(
            f"the index {path} can't be read: {first_line(error)}; nothing in it was executed; expected"
            " the index that torch.distributed.checkpoint writes",
            hint="an interrupted copy, or a file made by something else",
        ) from error
    if not isinstance(metadata, Metadata):
        raise CheckpointError(f"the index {path} holds a {type(metadata).__name__}; expected a Metadata")
    if getattr(metadata, "storage_meta", None) is None:
        metadata.storage_meta = StorageMeta()
    for info in (metadata.storage_data or {}).values():
        place = Path(str(info.relative_path))
        if place.is_absolute() or ".." in place.parts:
            raise CheckpointError(
                f"the index {path} sends a tensor to {place}; no file was opened; expected files of the"
                " checkpoint's own folder",
                hint="a damaged index, or one made to reach other files of this machine",
            )
    return metadata


def _innermost(error: BaseException) -> str:
    """What went wrong on the first rank that failed."""
    failures = list(getattr(error, "failures", {}).values())
    cause = failures[0][0] if failures else error
    return f"{type(cause).__name__}: {first_line(cause)}"


class _IndexReader(pickle.Unpickler):
    """Makes the classes of an index, and refuses all else before it is imported."""

    def find_class(self, module: str, name: str) -> Any:
        if name in _ALLOWED.get(module, ()) or (module == "torch" and self._is_dtype(name)):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it refers to {module}.{name}, which is code")

    @staticmethod
    def _is_dtype(name: str) -> bool:
        return isinstance(getattr(torch, name, None), torch.dtype)
