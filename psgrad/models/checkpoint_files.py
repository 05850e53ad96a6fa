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
from psgrad.wording import first_line, first_of

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
# Folders of sharded training -> the program that makes one file of them.
_CONVERTERS = {
    ".metadata": "python -m torch.distributed.checkpoint.format_utils dcp_to_torch FOLDER FILE.pt",
    "zero_to_fp32.py": "the zero_to_fp32.py in it",
    "latest": "DeepSpeed's zero_to_fp32.py",
}
_SHOWN = 10

# -- which files there are -----------------------------------------------------------------------------------


def checkpoint_kind(path: Path, key: str | None = None) -> str:
    """'torch', 'safetensors' or 'index', once it is known that there is a file, and that `key` goes with it.
    Raises ConfigError, and CheckpointError for an empty file.
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
    if key is not None:
        raise ConfigError(f"model.state_dict_key is {key!r}, but {path.name} holds tensors only")
    return "index" if name.endswith(INDEX_SUFFIX) else "safetensors"


def require_checkpoint(path: Path) -> Path:
    """`path`, once it is known to be a file, or a folder that a trainer or Hugging Face wrote. Raises
    ConfigError and CheckpointError.
    """
    if not path.is_dir():
        return require_file(path, "checkpoint", CheckpointError)
    if any((path / name).is_file() for name in FOLDERS):
        return path
    converter = next((program for name, program in _CONVERTERS.items() if (path / name).exists()), None)
    if converter is not None:
        raise ConfigError(
            f"the checkpoint {path} is a folder of sharded training, whose files are not read",
            hint=f"make one file of it by {converter.replace('FOLDER', str(path))}, and name that file",
        )
    raise ConfigError(
        f"the checkpoint {path} is a folder with none of {', '.join(FOLDERS)}", hint="name the file inside it"
    )


def checkpoint_files(path: Path) -> list[Path]:
    """The files that a checkpoint consists of: itself, and the shards that it names."""
    if not path.name.endswith(".index.json"):
        return [path]
    return [path, *(path.parent / shard for shard in sorted(set(weight_map(path).values())))]


def json_content(path: Path, named: str = "") -> Any:
    """The content of a JSON file. named: the words before its path in messages. Raises CheckpointError."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{named}{path} is not valid JSON: {error}", hint="copy it again") from error


def weight_map(index: Path) -> dict[str, str]:
    """Tensor name to shard, a file of the same kind as the index. Every shard's path is checked: nothing
    outside the index's own folder is ever opened.
    """
    content = json_content(index, "the index ")
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(
            f'the index {index} has no weight_map, such as {{"tensor": "file.safetensors"}}'
        )
    suffix = ".bin" if index.name.endswith(".bin.index.json") else ".safetensors"
    for name, shard in weight_map.items():
        if not _stays_inside(shard, suffix):
            raise CheckpointError(
                f"the index {index} sends {name!r} to {shard!r}; no file was opened",
                hint=f"a shard is a {suffix} file below the index's own folder; copy the checkpoint again",
            )
    return weight_map


def _stays_inside(shard: object, suffix: str) -> bool:
    # By its letters and not by where links lead: a download cache links every shard to a folder of its own.
    if not isinstance(shard, str) or not shard.endswith(suffix) or re.search(r"[\\\0]|^/|^[A-Za-z]:", shard):
        return False
    return ".." not in shard.split("/") and not posixpath.normpath(shard).startswith("..")


def shards_of(path: Path) -> dict[Path, list[str] | None]:
    """The files of a checkpoint's tensors -> the names that are in each; None for all. Raises ConfigError for
    a shard that is not there.
    """
    if not path.name.lower().endswith(".index.json"):
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


def read_checkpoint(path: Path, key: str | None = None) -> StateDict:
    """What a checkpoint holds; nothing in the file is ever executed.

    `.safetensors`, `.safetensors.index.json` (sharded), and `.pt`, `.pth`, `.ckpt` as torch.save writes them.
    `key` names the state dict inside a larger object, dotted where it lies deeper. Raises ConfigError for a
    path that is no checkpoint, CheckpointError for a file that can't be read, or only by running it.
    """
    if checkpoint_kind(path, key) != "torch":
        shards = shards_of(path).items()
        return StateDict({name: each for file, names in shards for name, each in _tensors(file, names)})
    content = read_torch(path)
    chosen = _only_candidate(content) if key is None else None
    notes = (f"took the weights {chosen!r} of {path.name}",) if chosen is not None else ()
    return StateDict(state_dict_in(content, key if chosen is None else chosen, path), notes)


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
    require_plain_archive(path)
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


def require_plain_archive(path: Path) -> None:
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


def _only_candidate(loaded: object) -> str | None:
    """The one of the usual keys below which there is a state dict; None where there is none, or several."""
    if _is_state_dict(loaded) or not isinstance(loaded, dict):
        return None
    found = [key for key in _CANDIDATES if _is_state_dict(loaded.get(key))]
    return found[0] if len(found) == 1 else None


def state_dict_in(loaded: object, key: str | None, path: Path) -> dict[str, Tensor]:
    """The state dict in what was read of `path`, at `key`. Raises ConfigError and CheckpointError."""
    found = loaded if key is None else _at(loaded, key)
    if _is_state_dict(found):
        return dict(found)  # type: ignore[call-overload, no-any-return]
    keys = list(loaded) if isinstance(loaded, dict) else []
    usable = [str(each) for each in keys if _is_state_dict(loaded[each])]  # type: ignore[index]
    step = f"it holds {', '.join(map(repr, keys[:_SHOWN])) if keys else f'a {type(loaded).__name__}'}"
    if usable:
        step = f"set model.state_dict_key to the state dict that you mean: {first_of(usable, _SHOWN)}"
    if key is not None and found is None:
        raise ConfigError(f"the checkpoint {path} has no {key!r}", hint=step)
    what = f"{key!r} in the checkpoint {path}" if key is not None else f"the checkpoint {path}"
    raise CheckpointError(f"{what} is no state dict: tensors by name", hint=step)


def _at(loaded: object, key: str) -> object:
    """What lies at a key, or at a dotted path of keys; None where there is nothing."""
    if not isinstance(loaded, dict) or key in loaded:
        return loaded[key] if isinstance(loaded, dict) else None
    first, dot, rest = key.partition(".")
    return _at(loaded.get(first), rest) if dot else None


def _is_state_dict(value: object) -> bool:
    if not isinstance(value, dict) or not value:
        return False
    return all(isinstance(name, str) and isinstance(each, Tensor) for name, each in value.items())
