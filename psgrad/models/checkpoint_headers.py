"""The headers of checkpoint files: which files and tensors there are, before anything is loaded. No torch."""

from __future__ import annotations

import json
import posixpath
import re
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import safetensors

from psgrad.errors import CheckpointError, ConfigError
from psgrad.run.input_files import require_file
from psgrad.wording import first_line

INDEX_SUFFIX = ".safetensors.index.json"
FOLDERS = ("config.json", "adapter_config.json", ".metadata")
"""The files by one of which a folder is known as a checkpoint."""
TORCH_SUFFIXES = (".pt", ".pth", ".ckpt", ".pth.tar")
SAVE_SAFELY = (
    "where it was made, save the state dict alone: safetensors.torch.save_file(model.state_dict(), path)"
)


class TensorHeader(NamedTuple):
    """A tensor of a checkpoint: its type as safetensors calls it (F32, BF16, I64), and its shape."""

    dtype: str
    shape: tuple[int, ...]


def checkpoint_header(path: Path, key: str | None = None) -> dict[str, TensorHeader] | None:
    """name -> type and shape, of a safetensors file or of all shards of an index; None for a .pt, .pth or
    .ckpt file, of which only the outside is looked at: what is in it, torch alone can tell. None, too, for a
    folder of torch.distributed.checkpoint.

    Raises as `read_checkpoint` in checkpoints.py does.
    """
    kind = checkpoint_kind(path, key)
    if kind == "torch":
        require_plain_archive(path)
    if kind in ("torch", "distributed"):
        return None
    if kind == "safetensors":
        return _tensors_in(path)
    found: dict[str, TensorHeader] = {}
    shards: dict[str, dict[str, TensorHeader]] = {}
    for name, shard in weight_map(path).items():
        if shard not in shards:
            shards[shard] = _tensors_in(require_file(path.parent / shard, "shard", CheckpointError))
        if name not in shards[shard]:
            raise CheckpointError(
                f"the index {path} says that {name} is in {shard}, and it is not",
                cause="a shard of another checkpoint, or an interrupted download",
            )
        found[name] = shards[shard][name]
    return found


def checkpoint_kind(path: Path, key: str | None = None) -> str:
    """'torch', 'safetensors', 'index' or 'distributed' (a folder), once it is known that there is a file, and
    that `key` goes with it. Raises ConfigError, and CheckpointError for an empty file.
    """
    name = path.name.lower()
    if path.is_dir() and (path / ".metadata").is_file():
        return "distributed"
    if name.endswith(TORCH_SUFFIXES):
        require_file(path, "checkpoint", CheckpointError)
        return "torch"
    kind = (
        "index" if name.endswith(INDEX_SUFFIX) else "safetensors" if name.endswith(".safetensors") else None
    )
    require_file(path, "checkpoint", CheckpointError)
    if kind is None:
        raise ConfigError(
            f"the checkpoint {path} has a suffix that psgrad does not read",
            expected=f".safetensors, {INDEX_SUFFIX}, {', '.join(TORCH_SUFFIXES)}",
            cause=(
                "exported programs (.pt2), TorchScript and plain pickles are code, and psgrad runs no code of"
                " a checkpoint"
            ),
        )
    if key is not None:
        raise ConfigError(
            f"model.state_dict_key is {key!r}, but {path.name} holds tensors only",
            next_step="leave the key out",
        )
    return kind


def require_checkpoint(path: Path) -> Path:
    """`path`, once it is known to be a file, or a folder that a trainer or Hugging Face wrote. Raises
    ConfigError and CheckpointError.
    """
    if not path.is_dir():
        return require_file(path, "checkpoint", CheckpointError)
    if any((path / name).is_file() for name in FOLDERS):
        return path
    if any(path.glob("global_step*")) or (path / "zero_to_fp32.py").exists():
        raise ConfigError(
            f"the checkpoint {path} is one of DeepSpeed ZeRO, whose shards are pickles",
            next_step="run the zero_to_fp32.py in it, and name the folder that it writes",
        )
    raise ConfigError(
        f"the checkpoint {path} is a folder with none of {', '.join(FOLDERS)}",
        expected=(
            "a file, or a folder of save_pretrained, of a peft adapter, or of torch.distributed.checkpoint"
        ),
        next_step="name the file inside it",
    )


def _tensors_in(path: Path) -> dict[str, TensorHeader]:
    try:
        with safetensors.safe_open(path, framework="numpy") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (it is no dict)
            return {
                name: TensorHeader(each.get_dtype(), tuple(each.get_shape())) for name, each in slices.items()
            }
    except Exception as error:  # the library raises a dozen types for a damaged file
        raise damaged_safetensors(path, error) from error


def checkpoint_files(path: Path) -> list[Path]:
    """The files that a checkpoint consists of: itself, and the shards that it names."""
    if path.is_dir():
        return [path / ".metadata", *sorted(path.glob("*.distcp"))]
    if not path.name.lower().endswith(INDEX_SUFFIX):
        return [path]
    return [path, *(path.parent / shard for shard in sorted(set(weight_map(path).values())))]


def json_content(path: Path, named: str = "") -> Any:
    """The content of a JSON file. named: the words before its path in messages. Raises CheckpointError."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{named}{path} is not valid JSON: {error}", cause="an interrupted copy or download"
        ) from error


def weight_map(index: Path, suffix: str = ".safetensors") -> dict[str, str]:
    """Tensor name to shard, a file that ends in `suffix`. Every shard's path is checked: nothing outside the
    index's own folder is ever opened.
    """
    content = json_content(index, "the index ")
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(
            f"the index {index} has no weight_map",
            expected='{"weight_map": {"tensor": "shard.safetensors", ...}}',
        )
    for name, shard in weight_map.items():
        if not _stays_inside(shard, suffix):
            raise CheckpointError(
                f"the index {index} sends {name!r} to {shard!r}; no file was opened",
                expected=(
                    f"the path of a {suffix} file below the index's own folder: relative, without '..' or"
                    " backslash"
                ),
                cause="a damaged index, or one made to reach other files of this machine",
            )
    return weight_map


def _stays_inside(shard: object, suffix: str) -> bool:
    # By its letters and not by where links lead: a download cache links every shard to a folder of its own.
    if not isinstance(shard, str) or not shard.endswith(suffix) or re.search(r"[\\\0]|^/|^[A-Za-z]:", shard):
        return False
    return ".." not in shard.split("/") and not posixpath.normpath(shard).startswith("..")


def damaged_safetensors(path: Path, error: Exception) -> CheckpointError:
    with path.open("rb") as file:
        head = file.read(4)
    if head.startswith((b"PK\x03\x04", b"\x80")):
        return CheckpointError(
            f"{path} is named .safetensors, but was written by torch.save or pickle; it was not opened"
            " further",
            next_step="save it with safetensors.torch.save_file, or name it .pt if torch.save wrote it",
        )
    return damaged(path, "safetensors file", first_line(error))


def damaged(path: Path, kind: str, reason: str) -> CheckpointError:
    return CheckpointError(
        f"the checkpoint {path} is damaged: {reason}",
        expected=f"a whole {kind}; this file has {path.stat().st_size} bytes",
        cause="an interrupted copy or download",
        next_step="copy it again and compare its SHA-256 with the source's",
    )


def require_plain_archive(path: Path) -> None:
    """Refuses bare pickles and compressed archives, neither of which torch.save (since 1.6) writes."""
    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
    except Exception as error:
        with path.open("rb") as file:
            bare_pickle = file.read(1) == b"\x80"
        if bare_pickle:
            raise CheckpointError(
                f"the checkpoint {path} is a bare pickle, not a torch.save archive; nothing in it was"
                " executed",
                cause="pickle.dump, or torch.save before 1.6",
                next_step=SAVE_SAFELY,
            ) from error
        raise damaged(path, "torch.save archive", first_line(error)) from error
    if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
        raise CheckpointError(
            f"the checkpoint {path} is compressed",
            expected="an archive as torch.save writes it, uncompressed",
        )
