"""The files of checkpoints: which there are, and the tensors in them. No code of a file ever runs."""

from __future__ import annotations

import argparse
import json
import pickle
import posixpath
import re
import warnings
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import torch
from torch import Tensor

from psgrad.errors import CheckpointError, ConfigError
from psgrad.run.input_files import require_file
from psgrad.wording import first_line

INDEX_SUFFIX = ".safetensors.index.json"
FOLDERS = ("config.json", "adapter_config.json")
"""The files by one of which a folder is known as a checkpoint."""
TORCH_SUFFIXES = (".pt", ".pth", ".ckpt", ".pth.tar")
# CVE-2025-32434 and CVE-2026-24747: before this version a file could run code or corrupt memory in spite of
# weights_only.
_SAFE_TORCH = (2, 10)
_SAVE_SAFELY = (
    "where it was made, save the state dict alone: safetensors.torch.save_file(model.state_dict(), path)"
)
_SHOWN = 10

# -- which files there are -----------------------------------------------------------------------------------


def checkpoint_kind(path: Path) -> str:
    """'torch', 'safetensors' or 'index', once it is known that there is a file. Raises ConfigError, and
    CheckpointError for an empty file.
    """
    name = path.name.lower()
    require_file(path, "checkpoint", CheckpointError)
    if name.endswith(TORCH_SUFFIXES):
        return "torch"
    if not name.endswith((".safetensors", INDEX_SUFFIX)):
        raise ConfigError(
            f"the checkpoint {path} has a suffix that psgrad does not read; expected .safetensors,"
            f" {INDEX_SUFFIX}, {', '.join(TORCH_SUFFIXES)}",
            hint="save the state dict alone: exported programs, TorchScript and plain pickles are code",
        )
    return "index" if name.endswith(INDEX_SUFFIX) else "safetensors"


def require_checkpoint(path: Path) -> Path:
    """`path`, once it is known to be a file, or a folder that a trainer or Hugging Face wrote. Raises
    ConfigError and CheckpointError.
    """
    if not path.is_dir():
        return require_file(path, "checkpoint", CheckpointError)
    if any((path / name).is_file() for name in FOLDERS):
        return path
    raise ConfigError(
        f"the checkpoint {path} is a folder with none of {', '.join(FOLDERS)}",
        hint="name the file inside it; of sharded training make one file first",
    )


def checkpoint_files(path: Path) -> list[Path]:
    """The files that a checkpoint consists of: itself, and the shards that it names."""
    if not path.name.endswith(INDEX_SUFFIX):
        return [path]
    return [path, *(path.parent / shard for shard in sorted(set(weight_map(path).values())))]


def json_content(path: Path, named: str = "") -> Any:
    """The content of a JSON file. named: the words before its path in messages. Raises CheckpointError."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{named}{path} is not valid JSON: {error}", hint="copy it again") from error


def weight_map(index: Path) -> dict[str, str]:
    """Tensor name to shard. Every shard's path is checked: nothing outside the index's own folder is ever
    opened.
    """
    content = json_content(index, "the index ")
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(
            f'the index {index} has no weight_map, such as {{"tensor": "file.safetensors"}}'
        )
    for name, shard in weight_map.items():
        if not _stays_inside(shard):
            raise CheckpointError(
                f"the index {index} sends {name!r} to {shard!r}; no file was opened",
                hint="a shard is a .safetensors file below the index's own folder; copy the checkpoint again",
            )
    return weight_map


def _stays_inside(shard: object) -> bool:
    # By its letters and not by where links lead: a download cache links every shard to a folder of its own.
    if not isinstance(shard, str) or not shard.endswith(".safetensors"):
        return False
    if re.search(r"[\\\0]|^/|^[A-Za-z]:", shard):
        return False
    return ".." not in shard.split("/") and not posixpath.normpath(shard).startswith("..")


def shards_of(path: Path) -> dict[Path, list[str] | None]:
    """The files of a checkpoint's tensors -> the names that are in each; None for all. Raises ConfigError for
    a shard that is not there.
    """
    if not path.name.lower().endswith(INDEX_SUFFIX):
        return {path: None}
    found: dict[Path, list[str] | None] = {}
    for name, shard in weight_map(path).items():
        names = found.setdefault(path.parent / shard, [])
        assert names is not None
        names.append(name)
    for file in found:
        require_file(file, "shard", CheckpointError)
    return found


# -- what is in them -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StateDict:
    """The tensors of a checkpoint by name, on the CPU. notes: what of it was chosen."""

    tensors: dict[str, Tensor]
    notes: tuple[str, ...] = ()


def read_checkpoint(path: Path) -> StateDict:
    """What a checkpoint holds; nothing in the file is ever executed.

    `.safetensors`, `.safetensors.index.json` (sharded), and `.pt`, `.pth`, `.ckpt` as torch.save writes them.
    Raises ConfigError for a path that is no checkpoint, CheckpointError for a file that can't be read, or
    only by running it.
    """
    if checkpoint_kind(path) != "torch":
        shards = shards_of(path).items()
        return StateDict({name: each for file, names in shards for name, each in _tensors(file, names)})
    return state_dict_in(read_torch(path), path)


def _tensors(path: Path, names: Iterable[str] | None) -> list[tuple[str, Tensor]]:
    try:
        with safetensors.safe_open(path, framework="pt", device="cpu") as file:
            return [(name, file.get_tensor(name)) for name in (file.keys() if names is None else names)]
    except Exception as error:  # the library raises a dozen types for a damaged file
        raise _damaged(path, "safetensors file", error) from error


def tensor_kinds(path: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """name -> (type as safetensors calls it, shape), of a safetensors file or of all shards of an index."""
    found: dict[str, tuple[str, tuple[int, ...]]] = {}
    for file, names in shards_of(path).items():
        try:
            with safetensors.safe_open(file, framework="pt") as opened:
                for name in opened.keys() if names is None else names:
                    part = opened.get_slice(name)
                    found[name] = part.get_dtype(), tuple(part.get_shape())
        except Exception as error:
            raise _damaged(file, "safetensors file", error) from error
    return found


def read_torch(path: Path, device: str = "cpu") -> object:
    """What is in a file of torch.save; on the device "meta" without memory. Raises CheckpointError."""
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < _SAFE_TORCH:
        raise CheckpointError(
            f"the checkpoint {path} is a pickle inside, and torch {torch.__version__} reads those unsafely",
            hint="install torch 2.10 or newer, or save a .safetensors file",
        )
    _require_plain_archive(path)
    try:
        # Warnings are about pickle protocols, which the error below explains better. A Namespace, which many
        # trainers put beside the weights, holds values and runs nothing.
        allowed = torch.serialization.safe_globals([argparse.Namespace])
        with warnings.catch_warnings(action="ignore"), allowed:
            return torch.load(path, map_location=device, weights_only=True)
    except pickle.UnpicklingError as error:
        # The one fact in torch's page of advice on how to switch the safety off is the object's name.
        found = re.search(r"GLOBAL (\S+)", str(error))
        what = f" (it refers to {found[1]}, which is code)" if found else ""
        raise CheckpointError(
            f"the checkpoint {path} holds more than tensors and plain values{what}; nothing in it was"
            " executed",
            hint=_SAVE_SAFELY,
        ) from error
    except Exception as error:  # a damaged archive fails in as many ways as it has readers
        raise _damaged(path, "torch.save archive", error) from error


def _require_plain_archive(path: Path) -> None:
    """Refuses bare pickles and compressed archives, neither of which torch.save (since 1.6) writes."""
    try:
        with zipfile.ZipFile(path) as archive:
            plain = all(entry.compress_type == zipfile.ZIP_STORED for entry in archive.infolist())
    except Exception as error:
        with path.open("rb") as file:
            if file.read(1) == b"\x80":
                raise CheckpointError(
                    f"the checkpoint {path} is a bare pickle, not a torch.save archive; nothing in it was"
                    " executed",
                    hint=_SAVE_SAFELY,
                ) from error
        raise _damaged(path, "torch.save archive", error) from error
    if not plain:
        raise CheckpointError(
            f"the checkpoint {path} is compressed, as torch.save writes none", hint=_SAVE_SAFELY
        )


def _damaged(path: Path, kind: str, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"the checkpoint {path} is damaged: {first_line(error)}; expected a whole {kind}; this file has"
        f" {path.stat().st_size} bytes",
        hint="an interrupted copy or download: copy it again",
    )


_CANDIDATES = ("state_dict", "model_state_dict")


def state_dict_in(loaded: object, path: Path) -> StateDict:
    """The state dict in what was read of `path`: all of it, or what lies at the one of the usual keys below
    which there is one. Raises CheckpointError.
    """
    if _is_state_dict(loaded):
        return StateDict(dict(loaded))  # type: ignore[call-overload]
    held = loaded if isinstance(loaded, dict) else {}
    found = [key for key in _CANDIDATES if _is_state_dict(held.get(key))]
    if len(found) == 1:
        return StateDict(dict(held[found[0]]), (f"took the weights {found[0]!r} of {path.name}",))
    what = ", ".join(map(repr, list(held)[:_SHOWN])) or f"a {type(loaded).__name__}"
    raise CheckpointError(
        f"the checkpoint {path} is no state dict, tensors by name, but holds {what}", hint=_SAVE_SAFELY
    )


def _is_state_dict(value: object) -> bool:
    if not isinstance(value, dict) or not value:
        return False
    return all(isinstance(name, str) and isinstance(each, Tensor) for name, each in value.items())
