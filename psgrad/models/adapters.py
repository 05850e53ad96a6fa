"""The adapter of peft on a pretrained model, read or made new. Only its parameters are differentiated."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping
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
    """A model with its adapter in.

    weights: the file of the adapter's weights, where it was read. names: what the manifest says of it.
    """

    model: nn.Module
    weights: list[Path] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    names: list[str] = field(default_factory=list)


def with_adapter(
    base: PretrainedModel, config: ModelConfig, at: Path, *, allow_download: bool = False
) -> Adapted:
    """The model with the adapter that `config.adapter` names, relative to `at`, or with the one that it says
    to make. Its parameters require a gradient, and no others. Raises ConfigError, ModelError or
    CheckpointError.
    """
    assert config.adapter is not None
    peft = library("peft")
    if isinstance(config.adapter, NewAdapterConfig):
        return _made(peft, base.model, config.adapter)
    place = located(config.adapter, at, key="model.adapter", holds=WEIGHTS, allow_download=allow_download)
    notes = [place.downloaded] if place.downloaded else []
    notes += base_notes(read_adapter_settings(place.folder), place.folder, base.location, config)
    weights = adapter_weights(place.folder)
    model = _read(peft, base.model, place.folder)
    words = _described(model.peft_config["default"])
    count = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    notes += [
        f"the adapter {config.adapter} ({words}) lies on top of {config.pretrained}, not merged into it",
        f"{count:,} parameters of the adapter require a gradient, and no others",
    ]
    return Adapted(model, [weights], notes, [f"{config.adapter} ({words})"])


def _read(peft: Any, model: Any, folder: Path) -> Any:
    """The model with the adapter of a folder, whose weights all have a place and fill all of its own."""
    options = {"torch_device": "cpu", "is_trainable": True}
    try:
        with quiet(), torch.random.fork_rng(devices=[]):
            if peft.PeftConfig.from_pretrained(folder).is_prompt_learning:
                raise ModelError(
                    f"the adapter {folder} puts positions of its own before each text (prompt tuning)",
                    hint="train an adapter that changes weights, such as LoRA",
                )
            model = peft.PeftModel.from_pretrained(model, folder, **options)
            report = model.load_adapter(folder, "default", **options)
    except ModelError:
        raise
    except Exception as error:
        mismatches = [line.strip() for line in str(error).splitlines() if "size mismatch" in line]
        if mismatches or "arget modules" in str(error):
            raise _other_base(folder, mismatches[0] if mismatches else first_line(error)) from error
        raise ModelError(
            f"peft can't put the adapter {folder} in: {type(error).__name__}: {first_line(error)}",
            hint="an adapter of a newer peft, or damaged files; load it with peft alone to see more",
        ) from error
    odd = [("missing", report.missing_keys), ("without a place", report.unexpected_keys)]
    lost = [f"{len(names)} {what} ({first_of(names, _SHOWN)})" for what, names in odd if names]
    if lost:
        raise _other_base(folder, "; ".join(lost))
    return model


def _other_base(folder: Path, what: str) -> CheckpointError:
    return CheckpointError(
        f"the adapter {folder} does not fit the model: {what}",
        hint=f"compare base_model_name_or_path in {folder / SETTINGS} with model.pretrained",
    )


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
            f"model.adapter: a new LoRA adapter can't be put in: {first_line(error)}",
            hint=f"set target to ends of names of layers such as {', '.join(leaves[:_SHOWN])}",
        ) from error
    name = f"new ({_described(adapted.peft_config['default'])}, seed {wanted.seed})"
    count = sum(parameter.numel() for parameter in adapted.parameters() if parameter.requires_grad)
    note = f"a {name} adapter, not merged: its {count:,} parameters require a gradient, and no others"
    return Adapted(adapted, notes=[note], names=[name])


def adapter_files(model: nn.Module, state: Mapping[str, torch.Tensor]) -> dict[str, bytes]:
    """The folder of a model's adapter with these weights, as peft writes it: path in it -> content.

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
    parts = [kind, rank and f"rank {rank}", scale and f"alpha {scale}"]
    return ", ".join(str(part) for part in parts if part)
