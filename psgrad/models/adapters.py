"""The adapter of peft on a pretrained model. Only its parameters are differentiated."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from psgrad.config.model import ModelConfig
from psgrad.errors import CheckpointError, ModelError
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

    weights: the file of the adapter's weights. name: what the manifest says of it.
    """

    model: nn.Module
    weights: Path
    notes: list[str]
    name: str


def with_adapter(base: PretrainedModel, config: ModelConfig, at: Path) -> Adapted:
    """The model with the adapter that `config.adapter` names, relative to `at`. Its parameters require a
    gradient, and no others. Raises ConfigError, ModelError or CheckpointError.
    """
    assert config.adapter is not None
    peft = library("peft")
    folder = located(config.adapter, at, key="model.adapter", holds=WEIGHTS).folder
    notes = base_notes(read_adapter_settings(folder), folder, base.location, config)
    weights = adapter_weights(folder)
    model = _read(peft, base.model, folder)
    words = _described(model.peft_config["default"])
    count = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    notes += [
        f"the adapter {config.adapter} ({words}) lies on top of {config.pretrained}, not merged into it",
        f"{count:,} parameters of the adapter require a gradient, and no others",
    ]
    return Adapted(model, weights, notes, f"{config.adapter} ({words})")


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


def adapter_files(model: nn.Module, state: Mapping[str, torch.Tensor]) -> dict[str, bytes]:
    """The folder of a model's adapter with these weights, as peft writes it: path in it -> content.

    state: the model's state dict.
    """
    adapted: Any = model
    with tempfile.TemporaryDirectory() as place, quiet():
        adapted.save_pretrained(place, state_dict=dict(state), save_embedding_layers=False)
        kept = [path for path in sorted(Path(place).rglob("*")) if path.name in (SETTINGS, WEIGHTS[0])]
        return {path.relative_to(place).as_posix(): path.read_bytes() for path in kept}


def _described(settings: Any) -> str:
    """An adapter's kind and size, for people."""
    kind = str(getattr(settings.peft_type, "value", settings.peft_type)).replace("_", " ")
    kind = "DoRA" if getattr(settings, "use_dora", False) else {"LORA": "LoRA"}.get(kind, kind)
    rank, scale = getattr(settings, "r", None), getattr(settings, "lora_alpha", None)
    parts = [kind, rank and f"rank {rank}", scale and f"alpha {scale}"]
    return ", ".join(str(part) for part in parts if part)
