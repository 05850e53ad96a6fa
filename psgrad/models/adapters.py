"""Adapters of peft on a pretrained model, read or made new. Only their parameters are differentiated."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from psgrad.config.model import ModelConfig, NewAdapterConfig
from psgrad.errors import CheckpointError, ConfigError, ModelError
from psgrad.models.hub import library, located, quiet
from psgrad.models.model_folders import (
    SETTINGS,
    WEIGHTS,
    adapter_weights,
    base_notes,
    read_adapter_settings,
)
from psgrad.models.pretrained import PretrainedModel
from psgrad.wording import first_line, first_of

_SHOWN = 8


@dataclass(frozen=True)
class Adapted:
    """A model with its adapters in.

    virtual: how many positions the adapters put before a sample's own (prompt tuning). weights: the files of
    the adapters' weights. names: what the manifest says of each.
    """

    model: nn.Module
    virtual: int = 0
    weights: list[Path] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    names: list[str] = field(default_factory=list)


def with_adapters(
    base: PretrainedModel, config: ModelConfig, at: Path, *, allow_download: bool = False
) -> Adapted:
    """The model with the adapters that `config.adapter` names, relative to `at`, or with the one that it says
    to make. Their parameters require a gradient, and no others. Raises ConfigError, ModelError or
    CheckpointError.
    """
    assert config.adapter is not None
    peft = library("peft")
    if isinstance(config.adapter, NewAdapterConfig):
        return _made(peft, base.model, config.adapter)
    folders, notes = [], []
    for name in config.adapter:
        place = located(name, at, key="model.adapter", holds=WEIGHTS, allow_download=allow_download)
        folders.append(place.folder)
        notes += [place.downloaded] if place.downloaded else []
        notes += base_notes(read_adapter_settings(place.folder), place.folder, base.location, config)
    names = _names(folders)
    model: Any = base.model
    for name, folder in zip(names, folders, strict=True):
        model = _with_one(peft, model, folder, name)
    if len(names) > 1:
        _activate(model, names, config.adapter)
    said = [_described(model.peft_config[name]) for name in names]
    count = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    notes += [
        f"the adapter {place} ({words}) lies on top of {config.pretrained}, not merged into it"
        for place, words in zip(config.adapter, said, strict=True)
    ]
    notes.append(f"{count:,} parameters of the adapters require a gradient, and no others")
    return Adapted(
        model,
        sum(getattr(model.peft_config[name], "num_virtual_tokens", 0) or 0 for name in names),
        [adapter_weights(folder) for folder in folders],
        notes,
        [f"{place} ({words})" for place, words in zip(config.adapter, said, strict=True)],
    )


def _with_one(peft: Any, model: Any, folder: Path, name: str) -> Any:
    """The model with one more adapter, whose weights all have a place and fill all of its own."""
    adapter_weights(folder)
    options = {"torch_device": "cpu"}
    try:
        with quiet(), torch.random.fork_rng(devices=[]):
            settings = peft.PeftConfig.from_pretrained(folder)
            trained = not settings.is_prompt_learning
            if isinstance(model, peft.PeftModel):
                report = model.load_adapter(folder, name, is_trainable=trained, **options)
            else:
                model = peft.PeftModel.from_pretrained(model, folder, name, is_trainable=trained, **options)
                report = model.load_adapter(folder, name, is_trainable=trained, **options)
    except Exception as error:
        if "size mismatch" in str(error):
            lines = [line.strip() for line in str(error).splitlines() if "size mismatch" in line]
            raise _other_base(folder, lines[0]) from error
        if "arget modules" in str(error):
            raise _other_base(folder, first_line(error)) from error
        raise ModelError(
            f"peft can't put the adapter {folder} in: {type(error).__name__}: {first_line(error)}",
            hint=(
                "an adapter of a newer peft, of another base model, or damaged files; load it with peft"
                " alone to see more"
            ),
        ) from error
    # peft places prompt embeddings itself
    extra = [name for name in report.unexpected_keys if name != "prompt_embeddings"]
    odd = [("missing", report.missing_keys), ("without a place", extra)]
    lost = [f"{len(names)} {what} ({first_of(names, _SHOWN)})" for what, names in odd if names]
    if lost:
        raise _other_base(folder, "; ".join(lost))
    if settings.is_prompt_learning:
        for parameter in model.prompt_encoder[name].parameters():
            parameter.requires_grad_(True)
    return model


def _other_base(folder: Path, what: str) -> CheckpointError:
    return CheckpointError(
        f"the adapter {folder} does not fit the model: {what}",
        hint=(
            "it was made for another base model, or for another version of it; compare"
            f" base_model_name_or_path in {folder / SETTINGS} with model.pretrained"
        ),
    )


def _activate(model: Any, names: list[str], given: list[str]) -> None:
    """Make all adapters active at once."""
    try:
        model.base_model.set_adapter(names)
    except Exception as error:
        raise ConfigError(
            f"model.adapter: {', '.join(given)} can't be active together: {first_line(error)}; expected"
            " adapters of one kind that add up, such as several of LoRA",
            hint="name one of them",
        ) from error


def _names(folders: Iterable[Path]) -> list[str]:
    """Each adapter's name in the model: that of its folder, without dots, and each once."""
    found: list[str] = []
    for folder in folders:
        name = folder.name.replace(".", "_") or "adapter"
        found.append(name if name not in found else f"{name}_{len(found)}")
    return found if len(found) > 1 else ["default"]


def _made(peft: Any, model: nn.Module, wanted: NewAdapterConfig) -> Adapted:
    alpha = wanted.alpha if wanted.alpha is not None else float(wanted.rank)
    settings = peft.LoraConfig(
        r=wanted.rank,
        lora_alpha=int(alpha) if alpha == math.floor(alpha) else alpha,
        target_modules=wanted.target,
    )
    try:
        with quiet(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(wanted.seed)
            adapted = peft.get_peft_model(model, settings)
    except ValueError as error:
        leaves = sorted({name.rpartition(".")[2] for name, each in model.named_modules() if _is_linear(each)})
        raise ConfigError(
            f"model.adapter: a new LoRA adapter can't be put in: {first_line(error)}; expected target:"
            f" ends of names of layers such as {', '.join(leaves[:_SHOWN])}",
        ) from error
    name = f"new ({_described(adapted.peft_config['default'])}, seed {wanted.seed})"
    count = sum(parameter.numel() for parameter in adapted.parameters() if parameter.requires_grad)
    note = f"a {name} adapter, not merged: its {count:,} parameters require a gradient, and no others"
    return Adapted(adapted, notes=[note], names=[name])


def adapter_files(model: nn.Module, state: Mapping[str, torch.Tensor]) -> dict[str, bytes]:
    """The folder of a model's adapters with these weights, as peft writes it: path in it -> content.

    state: the model's state dict.
    """
    adapted: Any = model
    with tempfile.TemporaryDirectory() as place, quiet():
        adapted.save_pretrained(place, state_dict=dict(state), save_embedding_layers=False)
        kept = [path for path in sorted(Path(place).rglob("*")) if path.name in (SETTINGS, WEIGHTS[0])]
        return {path.relative_to(place).as_posix(): path.read_bytes() for path in kept}


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear | nn.Embedding) or type(module).__name__ == "Conv1D"


def _described(settings: Any) -> str:
    """An adapter's kind and size, for people."""
    kind = str(getattr(settings.peft_type, "value", settings.peft_type)).replace("_", " ")
    kind = "DoRA" if getattr(settings, "use_dora", False) else {"LORA": "LoRA"}.get(kind, kind)
    rank, scale = getattr(settings, "r", None), getattr(settings, "lora_alpha", None)
    virtual = getattr(settings, "num_virtual_tokens", None)
    parts = [kind, rank and f"rank {rank}", scale and f"alpha {scale}", virtual and f"{virtual} positions"]
    return ", ".join(str(part) for part in parts if part)
