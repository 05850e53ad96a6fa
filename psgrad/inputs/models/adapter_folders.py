"""The folder of an adapter, before anything is loaded, and whether it fits the base model. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from psgrad.config.model import ModelConfig
from psgrad.errors import CheckpointError, ConfigError
from psgrad.inputs.models.checkpoint_headers import (
    TensorHeader,
    checkpoint_header,
    json_content,
    require_plain_archive,
)
from psgrad.inputs.models.hub import LocalFolder, is_hub_id
from psgrad.inputs.models.model_folders import weight_files, weights_file
from psgrad.inputs.sources.files import require_file, sha256_of

SETTINGS = "adapter_config.json"
WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")


def read_adapter_settings(folder: Path) -> dict[str, Any]:
    """A folder's adapter_config.json. Raises ConfigError without one, CheckpointError for a damaged one."""
    path = folder / SETTINGS
    if not path.is_file():
        raise ConfigError(
            f"model.adapter: the folder {folder} has no {SETTINGS}",
            expected="the folder of an adapter as peft's save_pretrained writes it",
            cause=(
                "it holds a whole model: name it in model.pretrained"
                if (folder / "config.json").exists()
                else "another folder"
            ),
        )
    content: dict[str, Any] = json_content(path)
    if not isinstance(content, dict) or not isinstance(content.get("peft_type"), str):
        raise CheckpointError(f"{path} names no peft_type", expected="a file that peft wrote")
    return content


def adapter_weights(folder: Path) -> Path:
    """The file of an adapter's weights. Raises CheckpointError where there is none or it is damaged."""
    found = next((folder / name for name in WEIGHTS if (folder / name).exists()), None)
    if found is None:
        raise CheckpointError(
            f"the adapter's folder {folder} has no weights",
            expected=f"one of {', '.join(WEIGHTS)}",
            cause="an interrupted copy or download",
        )
    adapter_headers(found)
    return found


def adapter_headers(path: Path) -> dict[str, TensorHeader] | None:
    """Type and shape of each tensor of an adapter; None for pickled ones."""
    if path.suffix != ".bin":
        return checkpoint_header(path)
    require_plain_archive(require_file(path, "adapter", CheckpointError))
    return None


def base_notes(
    settings: Mapping[str, Any], folder: Path, base: LocalFolder, config: ModelConfig
) -> list[str]:
    """What is to be said where nobody can tell whether the adapter was made for the base model. Raises
    ConfigError where it was made for another one.

    Names tell where both are hub ids, and weights where both are folders of this machine. Else the adapter's
    shapes must fit, which is checked when it is read.
    """
    named, ours = settings.get("base_model_name_or_path"), str(config.pretrained)
    if not isinstance(named, str) or not named or named.rstrip("/") == ours.rstrip("/"):
        return []
    theirs = next((each for each in (Path(named), folder / named) if each.is_dir()), None)
    if theirs is None and Path(named).name == Path(ours).name:
        return []
    if theirs is not None and (theirs.samefile(base.folder) or _same_weights(theirs, base.folder)):
        return []
    if theirs is None and (base.commit is None or not is_hub_id(named)):
        return [f"the adapter {folder} names {named} as its base, and shapes alone tell that {ours} is that"]
    raise ConfigError(
        f"the adapter {folder} was made for another base model, {named}",
        expected=f"an adapter of {ours}",
        next_step=(
            f"set model.pretrained to {named}; or if {ours} is the same model, say so in"
            f" base_model_name_or_path of {folder / SETTINGS}"
        ),
    )


def _same_weights(one: Path, other: Path) -> bool:
    """Whether two folders hold the same weights: files of the same content."""
    try:
        files = [weight_files(weights_file(folder)) for folder in (one, other)]
    except CheckpointError:
        return False
    if [file.stat().st_size for file in files[0]] != [file.stat().st_size for file in files[1]]:
        return False
    return all(sha256_of(a) == sha256_of(b) for a, b in zip(*files, strict=True))
