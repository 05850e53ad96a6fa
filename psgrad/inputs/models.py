"""The model of a config: built by its factory, filled from its checkpoint, and fit to be looked at one sample at a time."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy

from psgrad.config import ModelConfig
from psgrad.errors import ModelError
from psgrad.inputs.checkpoint_headers import checkpoint_files
from psgrad.inputs.checkpoints import load_into, read_state_dict
from psgrad.inputs.files import sha256_of
from psgrad.inputs.imports import call_factory, module_of
from psgrad.inputs.trainable import choose_trainable


@dataclass(frozen=True)
class LoadedModel:
    """A model ready for use, and what a person should know about how it came to be.

    `notes` are sentences for the manifest and the terminal, `modules_imported` the modules and files whose code was run, `sha256`
    the hash of the checkpoint (of the hashes of its files, where it has several); None without a checkpoint.
    """

    model: nn.Module
    notes: list[str]
    modules_imported: list[str]
    sha256: str | None


def load_model(
    config: ModelConfig, base: Path, trainable: Sequence[str] | None = None, trainable_key: str = "privacy.trainable"
) -> LoadedModel:
    """Calls the factory, loads the checkpoint and sets the mode; paths are relative to `base`.

    `trainable` are patterns of the parameters that are to require a gradient, and no others, `trainable_key` is the config's name for
    them; None leaves the parameters as the factory made them. The model stays on the CPU, in the dtype that its factory gave it.
    Raises ConfigError, ModelError or CheckpointError.
    """
    model = _built(config, base)
    notes, sha256 = [], None
    if config.checkpoint is None:
        notes.append("no checkpoint: the weights are those that the factory gave")
    else:
        path = base / config.checkpoint
        note = load_into(model, read_state_dict(path, config.state_dict_key), str(config.checkpoint))
        notes += [note] if note else []
        sha256 = checkpoint_hash(path)
    if trainable is not None:
        choose_trainable(model, trainable, trainable_key)
    _require_usable_parameters(model, config.factory)
    model.train(config.mode == "train")
    _require_independent_samples(model)
    return LoadedModel(model, notes, [module_of(config.factory)], sha256)


def _built(config: ModelConfig, base: Path) -> nn.Module:
    model: Any = call_factory(config.factory, base, config.kwargs, raises=ModelError)
    if not isinstance(model, nn.Module):
        raise ModelError(f"the factory {config.factory} returned an object of type {type(model).__name__}", expected="a torch.nn.Module")
    lazy = [name for name, parameter in model.named_parameters() if is_lazy(parameter)]
    if lazy:
        raise ModelError(
            f"the parameter {lazy[0]} has no shape yet ({len(lazy)} in all)",
            cause="a lazy layer takes its shape from the first batch, and the model has seen none",
            next_step="name the sizes in the factory, or run one batch through the model there",
        )
    return model


def checkpoint_hash(path: Path) -> str:
    """The SHA-256 of a checkpoint: of its file, or of its files' hashes."""
    hashes = [sha256_of(file) for file in checkpoint_files(path)]
    return hashes[0] if len(hashes) == 1 else hashlib.sha256("".join(hashes).encode()).hexdigest()


def _require_usable_parameters(model: nn.Module, factory: str) -> None:
    parameters = dict(model.named_parameters())
    if not any(parameter.requires_grad for parameter in parameters.values()):
        what = "has no parameters" if not parameters else "has only frozen parameters (requires_grad is False)"
        raise ModelError(f"the model of {factory} {what}", expected="at least one parameter to differentiate")
    for name, parameter in parameters.items():
        if parameter.is_meta:
            raise ModelError(
                f"the parameter {name} is on the meta device: it has a shape but no values",
                next_step="build the model on the CPU in the factory",
            )
        if not parameter.is_floating_point():
            raise ModelError(f"the parameter {name} is of type {parameter.dtype}", expected="real floating-point parameters")


def _require_independent_samples(model: nn.Module) -> None:
    """Refuses layers whose output for one sample depends on the others in its batch: it would have no gradient of its own."""
    mixing = [
        (name or "the model itself", layer)
        for name, layer in model.named_modules()
        if isinstance(layer, _BatchNorm) and (layer.training or layer.running_mean is None)
    ]
    if not mixing:
        return
    name, layer = mixing[0]
    more = f" (and {len(mixing) - 1} more)" if len(mixing) > 1 else ""
    if layer.training:
        raise ModelError(
            f"the layer {name} ({type(layer).__name__}){more} is in train mode, where every sample's output depends on its whole batch",
            next_step="set model.mode: eval, or replace the layer by nn.GroupNorm and train again",
        )
    raise ModelError(
        f"the layer {name} ({type(layer).__name__}){more} keeps no running statistics, so even in eval mode "
        "every sample's output depends on its whole batch",
        next_step="build it with track_running_stats=True, or replace it by nn.GroupNorm and train again",
    )
