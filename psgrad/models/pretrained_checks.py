"""What can be known of a model section without loading weights: the folder's config, the headers of its
files, and whether adapters were made for it. No torch.
"""

from __future__ import annotations

import importlib.util
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from psgrad.config.model import ModelConfig, NewAdapterConfig
from psgrad.errors import CheckpointError, ConfigError, ModelError
from psgrad.models.checkpoint_headers import TensorHeader, checkpoint_header
from psgrad.models.hub import (
    QUANTISED,
    LocalFolder,
    is_hub_id,
    located,
    not_installed,
    what_is_fetched,
)
from psgrad.models.model_folders import (
    SETTINGS,
    WEIGHTS,
    adapter_weights,
    automatic_precision,
    base_notes,
    config_of,
    precision_of_weights,
    read_adapter_settings,
    require_model_folder,
    saved_as,
    weight_headers,
    weights_file,
)

# The ends of the names of the classes that do a task; one that ends otherwise may be any.
_ENDS: Mapping[str, tuple[str, ...]] = {
    "sequence-classification": ("ForSequenceClassification",),
    "regression": ("ForSequenceClassification",),
    "token-classification": ("ForTokenClassification",),
    "causal-lm": ("ForCausalLM", "LMHeadModel"),
    "masked-lm": ("ForMaskedLM",),
    "seq2seq-lm": ("ForConditionalGeneration", "ForSeq2SeqLM"),
    "image-classification": ("ForImageClassification",),
    "multiple-choice": ("ForMultipleChoice",),
    "question-answering": ("ForQuestionAnswering",),
}
_LORA = ".lora_A.weight"


def library_problems(model: ModelConfig) -> Iterator[ModelError]:
    """The libraries that a model section needs and that are not installed."""
    if model.timm is not None and importlib.util.find_spec("timm") is None:
        yield not_installed("timm", "vision")
    needed = [*(["transformers"] if model.pretrained else []), *(["peft"] if model.adapter else [])]
    for name in needed:
        if importlib.util.find_spec(name) is None:
            yield not_installed(name, "hugging-face")
    for name in QUANTISED if model.load is not None else ():
        if importlib.util.find_spec(name) is None:
            yield not_installed(name, "quantised")


def pretrained_facts(model: ModelConfig, base: Path, *, allow_download: bool = False) -> str:
    """What a pretrained model's folder holds, in words; of a hub id that may be downloaded, what would be.
    Raises ConfigError and CheckpointError, as loading it would.
    """
    location = _location(model, base, allow_download)
    if isinstance(location, str):
        return location
    require_model_folder(location.folder)
    settings = config_of(location.folder)
    headers = weight_headers(weights_file(location.folder))
    require_head(model, location.folder, {**settings, **model.kwargs})
    if headers is None:
        return f"{model.pretrained}: {settings.get('model_type')}, {model.task}, pickled weights"
    numbers: Counter[str] = Counter()
    for tensor in headers.values():
        numbers[tensor.dtype] += math.prod(tensor.shape)
    kinds = ", ".join(f"{count:,} {kind}" for kind, count in numbers.most_common())
    computed = automatic_precision(precision_of_weights(weights_file(location.folder)))
    return (
        f"{model.pretrained}: {settings.get('model_type')}, {model.task}; numbers: {kinds};"
        f" engine.dtype: auto is {computed}"
    )


def adapter_facts(
    model: ModelConfig, base: Path, *, allow_download: bool = False
) -> Iterator[tuple[str, list[str]]]:
    """(in words, notes) of each adapter that a model section names. Raises ConfigError and CheckpointError
    for one that was made for another base model.
    """
    location = _location(model, base, allow_download)
    if model.adapter is None or isinstance(model.adapter, NewAdapterConfig) or isinstance(location, str):
        return
    theirs = weight_headers(weights_file(location.folder))
    for name in model.adapter:
        found = _located(name, base, "model.adapter", WEIGHTS, allow_download)
        if isinstance(found, str):
            yield found, []
            continue
        settings = read_adapter_settings(found.folder)
        headers = weight_headers(adapter_weights(found.folder), "adapter")
        if headers is not None and theirs is not None:
            _require_places(found.folder, headers, theirs)
        size = sum(math.prod(each.shape) for each in (headers or {}).values())
        words = f"{name}: {settings['peft_type']}, {size:,} numbers"
        yield words, base_notes(settings, found.folder, location, model)


def checkpoint_tensors(path: Path, key: str | None = None) -> dict[str, TensorHeader] | None:
    """Type and shape of each tensor of a checkpoint: a file, or a folder of Hugging Face; None where they can
    be known by loading alone.
    """
    if (path / SETTINGS).is_file():
        return weight_headers(adapter_weights(path), "adapter")
    if (path / "config.json").is_file():
        return weight_headers(weights_file(path))
    return checkpoint_header(path, key)


def _location(model: ModelConfig, base: Path, allow_download: bool) -> LocalFolder | str:
    holds = ("*.safetensors", "*.bin")
    return _located(
        str(model.pretrained), base, "model.pretrained", holds, allow_download, revision=model.revision
    )


def _located(
    name: str,
    base: Path,
    key: str,
    holds: tuple[str, ...],
    allow_download: bool,
    *,
    revision: str | None = None,
) -> LocalFolder | str:
    """Where a name's folder is; where it would be downloaded, what would be, in words."""
    try:
        return located(name, base, key=key, holds=holds, revision=revision)
    except ConfigError:
        if not allow_download or (base / name).exists() or not is_hub_id(name):
            raise
        return f"would download {what_is_fetched(name, revision, key)}"


def require_head(model: ModelConfig, folder: Path, settings: Mapping[str, Any]) -> None:
    """Raises CheckpointError for a folder of a model with the head of another task, whose weights may fit by
    their names and shapes, and ConfigError for a classification whose head has no classes.
    """
    saved, task = saved_as(folder), str(model.task)
    others = [end for name, ends in _ENDS.items() for end in ends if end not in _ENDS[task]]
    if saved is not None and saved.endswith(tuple(others)) and task != "causal-lm":
        raise CheckpointError(
            f"model.task is {task}, and the folder {folder} was saved as {saved}, whose head is another",
            cause="a model that was not fine-tuned for this task: its head would be random numbers, or one"
            " that was trained for something else",
            next_step="name the fine-tuned folder, or set model.task to what it was trained for",
        )
    single = len(settings.get("id2label") or {"0": 0, "1": 1}) == 1
    if task == "sequence-classification" and (single or settings.get("problem_type") == "regression"):
        raise ConfigError(
            f"model.task is {task}, and the head of {folder} returns numbers without classes",
            next_step="set model.task: regression",
        )


def _require_places(
    folder: Path, headers: Mapping[str, TensorHeader], base: Mapping[str, TensorHeader]
) -> None:
    """Raises CheckpointError where LoRA's matrices and the layers of the base differ in width. Packed bits of
    bitsandbytes have no width.
    """
    whole = {name: each.shape for name, each in base.items() if f"{name}.absmax" not in base}
    ends = {_inner(name.removesuffix(".weight")): shape for name, shape in whole.items()}
    for name, matrix in headers.items():
        layer = ends.get(_inner(name.removesuffix(_LORA))) if name.endswith(_LORA) else None
        if layer is not None and len(layer) == 2 and matrix.shape[-1] not in layer:
            raise CheckpointError(
                f"the adapter {folder} does not fit the model: {name} is {list(matrix.shape)}, and the layer"
                f" of the base is {list(layer)}",
                cause="it was made for another base model, or for another version of it",
                next_step=f"compare base_model_name_or_path in {folder / SETTINGS} with model.pretrained",
            )


def _inner(name: str) -> str:
    """The name of a layer without the prefixes of peft and of the head's class."""
    name = name.removeprefix("base_model.model.")
    return name.partition(".")[2] or name
