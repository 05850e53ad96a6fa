"""Pretrained models of transformers: a folder as save_pretrained writes it, or a hub id, becomes a model that
does a task, with all weights read and none made up.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from psgrad.config.model import TASKS, ModelConfig, Task
from psgrad.errors import CheckpointError, ConfigError, ModelError, PsgradError
from psgrad.models.checkpoints import load_into
from psgrad.models.hub import LocalFolder, library, located, quiet
from psgrad.models.in_files import built_without_memory, plain_tensors, tensors_in_files
from psgrad.models.model_folders import (
    precision_of_weights,
    require_head,
    require_model_folder,
    saved_as,
    weights_file,
)
from psgrad.models.quantised import in_fewer_bits, store_weights
from psgrad.wording import did_you_mean, first_line, first_of

AUTO_CLASSES: Mapping[Task, str] = {
    "sequence-classification": "AutoModelForSequenceClassification",
    "token-classification": "AutoModelForTokenClassification",
    "causal-lm": "AutoModelForCausalLM",
    "masked-lm": "AutoModelForMaskedLM",
    "seq2seq-lm": "AutoModelForSeq2SeqLM",
    "image-classification": "AutoModelForImageClassification",
    "regression": "AutoModelForSequenceClassification",
}
_SHOWN = 8


@dataclass(frozen=True)
class Pretrained:
    """The facts in a pretrained model's folder for preparing its data.

    Attributes:
        folder: the local folder of the model: the one that the config names, or a cached snapshot.
        task: what the model does.
        config: transformers' config object of the model (id2label, pad_token_id, problem_type, ...).
        precision: the floating-point type of most numbers of its files, such as bfloat16.
    """

    folder: Path
    task: Task
    config: Any
    precision: str = "float32"

    @property
    def automatic_dtype(self) -> str:
        """What `engine.dtype: auto` is: float32 for float16, in which small gradients vanish. Widening is
        exact.
        """
        return "float32" if self.precision == "float16" else self.precision


@dataclass(frozen=True)
class PretrainedModel:
    """A pretrained model as it was read, before adapters.

    weights: the file of its weights, or the index of its shards. notes: sentences for the manifest.
    """

    model: nn.Module
    pretrained: Pretrained
    location: LocalFolder
    weights: Path
    notes: list[str]
    modules_imported: list[str]


def load_pretrained(
    config: ModelConfig, base: Path, *, narrow: bool = False, in_files: bool = False
) -> PretrainedModel:
    """The model that `config.pretrained` names, on the CPU, in the type that its weights have on the disk.

    `narrow`: no parameter of it is going to be differentiated, so that all may be read in `config.dtype`.
    `in_files`: parameters stay in their files where these have the model's own names and shapes.
    Raises ConfigError, ModelError or CheckpointError; no weight is ever made up.
    """
    assert config.pretrained is not None
    assert config.task is not None
    location = located(config.pretrained, base, key="model.pretrained", holds=("*.safetensors",))
    settings = read_settings(location.folder, config)
    weights = weights_file(location.folder)
    kind = _class_for(config.task, settings)
    precision = precision_of_weights(weights)
    dtype = getattr(torch, config.dtype if narrow and config.dtype != "as-saved" else precision)
    with quiet(), torch.random.fork_rng(devices=[]):
        fewer_bits = in_fewer_bits(settings)
        files = in_files and not fewer_bits
        read = _read_in_files(kind, weights, settings, config, dtype) if files else None
        model, report = read or _read(kind, location.folder, settings, config, dtype)
    notes = _checked(report, config, location.folder)
    if fewer_bits:
        notes.append(store_weights(model))
    require_head(config, location.folder)
    for part in {id(each): each for each in _settings_of(model)}.values():
        part.use_cache = False  # keys and values that no loss reads
    pretrained = Pretrained(location.folder, config.task, model.config, precision)
    return PretrainedModel(model, pretrained, location, weights, notes, [f"{type(model).__module__}"])


def read_settings(folder: Path, config: ModelConfig) -> Any:
    """The config object of a model's folder, with `config.kwargs` put in. Raises ConfigError for a folder
    that holds no model and for unknown keys, ModelError for an architecture that transformers does not know.
    """
    require_model_folder(folder)
    transformers = library("transformers")
    try:
        with quiet():
            settings = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    except Exception as error:
        raise _unreadable(folder, error) from error
    for name, value in config.kwargs.items():
        if not hasattr(settings, name):
            meant = did_you_mean(name, list(settings.to_dict()))
            raise ConfigError(
                f"model.kwargs: the config of {folder} has no {name!r}{meant}; expected keys of"
                f" {type(settings).__name__}",
            )
        setattr(settings, name, copy.deepcopy(value))
    return settings


def _unreadable(folder: Path, error: Exception) -> PsgradError:
    if "trust_remote_code" in str(error):
        return ConfigError(
            f"model.pretrained: {folder} brings Python code of its own, and it was not run",
            hint="read the code, and load the model in a factory of your own",
        )
    return ModelError(
        f"transformers can't read the config of {folder}: {first_line(error)}",
        hint="upgrade transformers, or compare config.json with the source's",
    )


def _class_for(task: Task, settings: Any) -> Any:
    """The Auto class of a task. Raises ConfigError where transformers has no such head for the architecture,
    and where the head's kind of label is another.
    """
    transformers = library("transformers")
    kind = getattr(transformers, AUTO_CLASSES[task])
    if task not in _tasks_of(settings, [task]):
        known = _tasks_of(settings, TASKS)
        raise ConfigError(
            f"model.task is {task}, and transformers has no such head for a {settings.model_type} model",
            hint=f"expected one of {', '.join(known)}" if known else None,
        )
    problem, labels = getattr(settings, "problem_type", None), getattr(settings, "num_labels", None)
    if task == "sequence-classification" and (problem == "regression" or labels == 1):
        raise ConfigError(
            f"model.task is {task}, and the head returns {labels} number{'s'[: labels != 1]} without classes",
            hint="set model.task: regression",
        )
    if task == "regression" and problem not in (None, "regression"):
        raise ConfigError(
            f"model.task is regression, and the model's problem_type is {problem}",
            hint="set model.task: sequence-classification",
        )
    return kind


def _tasks_of(settings: Any, tasks: Iterable[Any]) -> list[Task]:
    """The `tasks` for which transformers has a head of this architecture."""
    transformers = library("transformers")
    found: list[Task] = []
    for task in tasks:
        kind = getattr(transformers, AUTO_CLASSES[task])
        if type(settings) in kind._model_mapping:
            found.append(task)
    return found


def _read_in_files(
    kind: Any, weights: Path, settings: Any, config: ModelConfig, dtype: torch.dtype
) -> tuple[Any, Mapping[str, Any]] | None:
    """What `_read` returns, with parameters in the files of `weights`; None where transformers has to rename
    or change tensors on their way into the model, or would say more of them.
    """
    if config.mode == "train":
        return None
    tensors = tensors_in_files(weights)
    model = None
    if tensors is not None and getattr(settings, "quantization_config", None) is None:
        model = built_without_memory(lambda: kind.from_config(copy.deepcopy(settings), dtype=dtype))
    if tensors is None or model is None:
        return None
    try:
        load_into(model, tensors, str(weights))
    except PsgradError:
        return None
    if any(each.is_meta for each in model.parameters()):
        return None
    # as from_pretrained leaves them: attributes are part of a model's identity
    vars(model)["_use_kernels"] = False
    for tensor in (*model.buffers(), *plain_tensors(model)):
        vars(tensor).clear()
    report: dict[str, list[Any]] = {"missing_keys": [], "mismatched_keys": [], "unexpected_keys": []}
    return model.eval(), report


def _read(
    kind: Any, folder: Path, settings: Any, config: ModelConfig, dtype: torch.dtype
) -> tuple[Any, Mapping[str, Any]]:
    """(the model, transformers' report about its keys)."""
    where = {"device_map": {"": "cpu"}} if in_fewer_bits(settings) else {}
    try:
        return kind.from_pretrained(  # type: ignore[no-any-return]
            folder, config=settings, dtype=dtype, local_files_only=True, output_loading_info=True, **where
        )
    except Exception as error:
        if "size mismatch" in str(error) or "mismatched" in str(error):
            raise _misfit(folder, error, config) from error
        raise ModelError(
            f"transformers can't load {folder}: {type(error).__name__}: {first_line(error)}",
            hint="load it with transformers alone to see more",
        ) from error


def _misfit(folder: Path, error: Exception, config: ModelConfig) -> CheckpointError:
    lines = [line.strip() for line in str(error).splitlines() if "mismatch" in line.lower()]
    return CheckpointError(
        f"the weights in {folder} have other shapes than the model of its config: {lines[0]}",
        hint=f"model.kwargs change the sizes: {', '.join(config.kwargs)}"
        if config.kwargs
        else "config.json belongs to another model",
    )


def _checked(report: Mapping[str, Any], config: ModelConfig, folder: Path) -> list[str]:
    """Notes about weights that the model does not have. Raises CheckpointError for those that the folder does
    not have: transformers would draw them at random.
    """
    missing = sorted(report["missing_keys"]) + [str(each[0]) for each in report["mismatched_keys"]]
    if missing:
        saved = saved_as(folder)
        raise CheckpointError(
            f"the folder {folder}, saved as {saved}, has no weights for {first_of(missing, _SHOWN)}: the"
            f" model of task {config.task} would start with random numbers there",
            hint="name the fine-tuned folder, or set model.task to what it was trained for",
        )
    extra = sorted(report["unexpected_keys"])
    words = f"left out {len(extra)} tensors of {folder} for which there is no place"
    return [f"{words}: {first_of(extra, _SHOWN)}"] if extra else []


def _settings_of(model: nn.Module) -> list[Any]:
    """The config objects of a model and of its parts, where a part has its own."""
    found = [getattr(each, "config", None) for each in model.modules()]
    return [each for each in found if hasattr(each, "use_cache")]


@dataclass(frozen=True)
class Pick:
    """Takes what the loss reads out of a model's output, sample axis in front: logits, and of a single number
    a row that number as [n].
    """

    single: bool = False

    def __call__(self, output: Any) -> torch.Tensor:
        logits: torch.Tensor = output.logits
        return logits[..., 0] if self.single else logits


def pick_for(task: Task, settings: Any) -> Pick:
    """What the loss of a task reads of the output of a model with this config."""
    return Pick(task == "regression" and settings.num_labels == 1)


def model_inputs(pretrained: Pretrained) -> frozenset[str] | None:
    """The names of what the model's forward takes; None for a class that transformers does not know."""
    kind = _model_class(pretrained)
    return None if kind is None else frozenset(inspect.signature(kind.forward).parameters)


def shift_of(pretrained: Pretrained) -> Callable[[list[int]], list[int]]:
    """What makes the decoder's inputs of labels: the model's own function."""
    with quiet(), torch.device("meta"):
        model = _model_class(pretrained)(pretrained.config)

    def shifted(labels: list[int]) -> list[int]:
        made = model.prepare_decoder_input_ids_from_labels(labels=torch.tensor([labels]))
        return [int(each) for each in made[0]]

    return shifted


def _model_class(pretrained: Pretrained) -> Any:
    auto = getattr(library("transformers"), AUTO_CLASSES[pretrained.task])
    if type(pretrained.config) not in auto._model_mapping:
        return None
    kind = auto._model_mapping[type(pretrained.config)]
    return kind[0] if isinstance(kind, tuple) else kind
