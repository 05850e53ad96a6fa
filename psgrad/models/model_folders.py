"""The folders of models and of adapters as save_pretrained writes them, before anything is loaded: their
settings, the files of their weights, and whether an adapter fits the base model. No torch, but for the
type of pickled weights.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from psgrad.config.model import ModelConfig
from psgrad.errors import CheckpointError, ConfigError
from psgrad.models.checkpoint_headers import (
    TensorHeader,
    checkpoint_header,
    json_content,
    require_plain_archive,
    weight_map,
)
from psgrad.models.hub import LocalFolder, is_hub_id
from psgrad.run.input_files import require_file, sha256_of

NAMES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
_SHOWN = 8
# Tensors that belong to weights of fewer bits, as bitsandbytes names them.
_OF_BITS = ("absmax", "quant_map", "SCB")
_FLOATS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def require_model_folder(folder: Path) -> None:
    """Raises ConfigError for a folder without config.json, and for an adapter's folder."""
    if not (folder / "config.json").is_file():
        if (folder / "adapter_config.json").is_file():
            cause = "this is the folder of an adapter, which lies on top of another model"
            step = "name the base model in model.pretrained, and this folder in model.adapter"
        elif inner := [each.parent.name for each in sorted(folder.glob("*/config.json"))]:
            cause = f"it holds folders of models: {', '.join(inner[:_SHOWN])}"
            step = "name one of them"
        else:
            cause = "another folder, or a model that was not saved by save_pretrained"
            step = "save it with model.save_pretrained(folder); for other weights, use model.factory"
        raise ConfigError(
            f"model.pretrained: the folder {folder} has no config.json",
            expected="a folder as save_pretrained writes it",
            cause=cause,
            next_step=step,
        )
    if (folder / "adapter_config.json").is_file():
        raise ConfigError(
            f"model.pretrained: the folder {folder} holds a model and an adapter (adapter_config.json)",
            cause="transformers would put the adapter in without a word",
            next_step="move the adapter to a folder of its own, and name it in model.adapter",
        )


def saved_as(folder: Path) -> str | None:
    """The class that a folder's model was saved as, such as BertForMaskedLM."""
    found = config_of(folder).get("architectures")
    return found[0] if isinstance(found, list) and found and isinstance(found[0], str) else None


def config_of(folder: Path) -> dict[str, Any]:
    """The content of a folder's config.json. Raises CheckpointError."""
    path = folder / "config.json"
    content = json_content(path)
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds a {type(content).__name__}", expected="an object")
    return content


def weights_file(folder: Path) -> Path:
    """The file of a folder's weights, or the index of its shards, in the order in which transformers looks
    for them. Raises CheckpointError where there is none, and where it is damaged.
    """
    found = next((folder / name for name in NAMES if (folder / name).exists()), None)
    if found is None:
        others = sorted(path.name for path in folder.iterdir() if path.is_file())
        raise CheckpointError(
            f"the folder {folder} has no weights",
            expected=f"one of {', '.join(NAMES)}",
            cause=f"an interrupted copy or download; it holds {', '.join(others[:8])}",
        )
    weight_headers(found)
    return found


def weight_headers(path: Path, what: str = "weights") -> dict[str, TensorHeader] | None:
    """Type and shape of each tensor; None for pickled weights, of which only the outside is checked. what:
    the word for the file in messages.
    """
    if ".bin" not in path.name:
        return checkpoint_header(path)
    for each in weight_files(path):
        require_plain_archive(require_file(each, what, CheckpointError))
    return None


def weight_files(path: Path) -> list[Path]:
    """The files of the weights: the file itself, or the index and its shards."""
    if path.suffix != ".json":
        return [path]
    suffix = ".bin" if ".bin." in path.name else ".safetensors"
    return [path, *(path.parent / shard for shard in sorted(set(weight_map(path, suffix).values())))]


def precision_of_weights(path: Path) -> str:
    """The floating-point type of most numbers of the weights, such as bfloat16; config.json may be of another
    copy.
    """
    headers = weight_headers(path)
    counts: Counter[str] = Counter()
    if headers is not None:
        for name, tensor in headers.items():
            if tensor.dtype in _FLOATS and not name.endswith(_OF_BITS):
                counts[_FLOATS[tensor.dtype]] += math.prod(tensor.shape)
    else:
        from psgrad.models.checkpoints import state_dict_in
        from psgrad.models.torch_files import read_torch

        for file in weight_files(path):
            if file.suffix == ".json":
                continue
            for value in state_dict_in(read_torch(file, "meta"), None, file).values():
                if value.is_floating_point():
                    counts[str(value.dtype).removeprefix("torch.")] += value.numel()
    return counts.most_common(1)[0][0] if counts else "float32"


def automatic_precision(saved: str) -> str:
    """What `engine.dtype: auto` is for weights that are saved in a precision.

    float32 for float16: only `analyze` scales losses, one by one, so that small gradients do not vanish,
    and a CPU multiplies float16 several times more slowly. Widening is exact.
    """
    return "float32" if saved == "float16" else saved


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
    weight_headers(found, "adapter")
    return found


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
