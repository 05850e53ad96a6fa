"""The folders of models and of adapters as save_pretrained writes them, before anything is loaded: their
settings, the files of their weights, and whether an adapter fits the base model.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from psgrad.config.model import ModelConfig
from psgrad.errors import CheckpointError, ConfigError
from psgrad.models.checkpoint_files import checkpoint_files, json_content, tensor_kinds
from psgrad.models.hub import LocalFolder, is_hub_id
from psgrad.run.identity import files_sha256

NAMES = ("model.safetensors", "model.safetensors.index.json")
SETTINGS = "adapter_config.json"
WEIGHTS = ("adapter_model.safetensors",)
_SHOWN = 8
# Tensors that belong to weights of fewer bits, as bitsandbytes names them.
_OF_BITS = ("absmax", "quant_map", "SCB")
_FLOATS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
# The ends of the names of the classes that do a task; one that ends otherwise may be any.
_ENDS: Mapping[str, tuple[str, ...]] = {
    "sequence-classification": ("ForSequenceClassification",),
    "regression": ("ForSequenceClassification",),
    "token-classification": ("ForTokenClassification",),
    "causal-lm": ("ForCausalLM", "LMHeadModel"),
    "masked-lm": ("ForMaskedLM",),
    "seq2seq-lm": ("ForConditionalGeneration", "ForSeq2SeqLM"),
    "image-classification": ("ForImageClassification",),
}


def require_model_folder(folder: Path) -> None:
    """Raises ConfigError for a folder without config.json, and for an adapter's folder."""
    is_adapter = (folder / SETTINGS).is_file()
    if not (folder / "config.json").is_file():
        inner = [each.parent.name for each in sorted(folder.glob("*/config.json"))]
        step = "save it with model.save_pretrained(folder); for other weights, use model.factory"
        step = f"name one of the folders of models in it: {', '.join(inner[:_SHOWN])}" if inner else step
        step = (
            "name the base model in model.pretrained, and this folder in model.adapter"
            if is_adapter
            else step
        )
        raise ConfigError(f"model.pretrained: the folder {folder} has no config.json", hint=step)
    if is_adapter:
        raise ConfigError(
            f"model.pretrained: the folder {folder} holds a model and an adapter ({SETTINGS})",
            hint="move the adapter to a folder of its own, and name it in model.adapter",
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
        raise CheckpointError(f"{path} holds a {type(content).__name__}; expected an object")
    return content


def require_head(model: ModelConfig, folder: Path) -> None:
    """Raises CheckpointError for a folder of a model with the head of another task, whose weights may fit by
    their names and shapes.
    """
    saved, task = saved_as(folder), str(model.task)
    others = [end for name, ends in _ENDS.items() for end in ends if end not in _ENDS[task]]
    if saved is not None and saved.endswith(tuple(others)) and task != "causal-lm":
        raise CheckpointError(
            f"model.task is {task}, and the folder {folder} was saved as {saved}, whose head is another",
            hint="name the fine-tuned folder, or set model.task to what it was trained for",
        )


def weights_file(folder: Path, names: tuple[str, ...] = NAMES, what: str = "folder") -> Path:
    """The file of a folder's weights, or the index of its shards, in the order in which libraries look for
    them. Raises CheckpointError where there is none, and where it is damaged. what: a word for the folder.
    """
    found = next((folder / name for name in names if (folder / name).exists()), None)
    if found is None:
        others = sorted(path.name for path in folder.iterdir() if path.is_file())
        raise CheckpointError(
            f"the {what} {folder} has no weights ({', '.join(names)}), but"
            f" {', '.join(others[:_SHOWN]) or 'no files'}",
            hint="copy it again, to its end; save_pretrained writes .safetensors, where it has .bin files",
        )
    tensor_kinds(found)
    return found


def adapter_weights(folder: Path) -> Path:
    """The file of an adapter's weights. Raises CheckpointError where there is none or it is damaged."""
    return weights_file(folder, WEIGHTS, "adapter's folder")


def precision_of_weights(path: Path) -> str:
    """The floating-point type of most numbers of the weights, such as bfloat16; config.json may be of another
    copy.
    """
    counts: Counter[str] = Counter()
    for name, (dtype, shape) in tensor_kinds(path).items():
        if dtype in _FLOATS and not name.endswith(_OF_BITS):
            counts[_FLOATS[dtype]] += math.prod(shape)
    return counts.most_common(1)[0][0] if counts else "float32"


def read_adapter_settings(folder: Path) -> dict[str, Any]:
    """A folder's adapter_config.json. Raises ConfigError without one, CheckpointError for a damaged one."""
    path = folder / SETTINGS
    if not path.is_file():
        whole = (folder / "config.json").exists()
        step = "it holds a whole model: name it in model.pretrained" if whole else "name an adapter's folder"
        raise ConfigError(f"model.adapter: the folder {folder} has no {SETTINGS}", hint=step)
    content: dict[str, Any] = json_content(path)
    if not isinstance(content, dict) or not isinstance(content.get("peft_type"), str):
        raise CheckpointError(f"{path} names no peft_type; expected a file that peft wrote")
    return content


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
        f"the adapter {folder} was made for another base model, {named}, and not for {ours}",
        hint=f"set model.pretrained to {named}, or correct base_model_name_or_path in {folder / SETTINGS}",
    )


def _same_weights(one: Path, other: Path) -> bool:
    """Whether two folders hold the same weights: files of the same content."""
    try:
        ours, theirs = (checkpoint_files(weights_file(folder)) for folder in (one, other))
    except CheckpointError:
        return False
    return files_sha256(ours) == files_sha256(theirs)
