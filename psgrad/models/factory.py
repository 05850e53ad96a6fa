"""The model of a config: built by its factory, filled from its checkpoint, and checked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import jit, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy

from psgrad.config import ModelConfig, did_you_mean
from psgrad.errors import ConfigError, ModelError
from psgrad.models.checkpoint_files import StateDict, checkpoint_files, read_checkpoint, require_checkpoint
from psgrad.models.checkpoints import load_into
from psgrad.run.identity import files_sha256
from psgrad.run.results.manifest import ModelOrigin
from psgrad.user_code import call_factory, module_of
from psgrad.wording import first_of

if TYPE_CHECKING:
    from psgrad.models.pretrained import Pretrained


@dataclass(frozen=True)
class LoadedModel:
    """A model ready for use, and what a person should know about its origin.

    `notes` are sentences for the manifest and the terminal, `modules_imported` the modules and files whose
    code was run, `sha256` the hash of the checkpoint (of the hashes of its files, where it has several); None
    without a checkpoint. `pick` takes the part that the loss reads out of the model's output; None for all of
    it. `pretrained` is what a pretrained model's folder tells; None for other models. `origin` says where a
    model that no factory built came from.
    """

    model: nn.Module
    notes: list[str]
    modules_imported: list[str]
    sha256: str | None
    pick: Callable[[Any], Any] | None = None
    pretrained: Pretrained | None = None
    origin: ModelOrigin = field(default_factory=ModelOrigin)


def load_model(
    config: ModelConfig,
    base: Path,
    trainable: Sequence[str] | None = None,
    trainable_key: str = "privacy.trainable",
    *,
    in_files: bool = False,
) -> LoadedModel:
    """Builds the model, loads the checkpoint and sets the mode; paths are relative to `base`.

    `trainable` are patterns of the parameters that are to require a gradient, and no others, `trainable_key`
    is the config's name for them; None leaves the parameters as they were made. The model stays on the CPU,
    in the dtype that it was made in. `in_files`: parameters stay in their safetensors files, where there are
    some and it can be known that the numbers are the same (see in_files.py).

    Raises ConfigError, ModelError or CheckpointError.
    """
    config = at_checkpoint(config, base)
    if config.pretrained is not None:
        made = _from_pretrained(config, base, trainable is None, in_files and config.checkpoint is None)
    else:
        made = (_in_files(config, base) if in_files else None) or _of_factory(_built(config, base), config)
    if config.checkpoint is not None and (config.pretrained is not None or made.sha256 is None):
        if config.pretrained is not None:
            from psgrad.models.quantised import require_whole

            require_whole(made.model, config)
        made = _filled(made, config, base / config.checkpoint)
    elif config.pretrained is None:
        made.notes.append("no checkpoint: the weights are those that the factory gave")
    if trainable is not None:
        choose_trainable(made.model, trainable, trainable_key)
    if config.pretrained is not None:
        from psgrad.models.quantised import require_frozen

        require_frozen(made.model, config, trainable is not None)
    _require_usable_parameters(made.model, str(config.factory or config.pretrained))
    made.model.train(config.mode == "train")
    _require_independent_samples(made.model)
    return made


def at_checkpoint(config: ModelConfig, base: Path) -> ModelConfig:
    """The config with a checkpoint that is a folder of save_pretrained in the model's place, and one that is
    an adapter's folder in the adapter's. Raises ConfigError for such folders of a model that is no pretrained
    one.
    """
    if config.checkpoint is None:
        return config
    folder = require_checkpoint(base / config.checkpoint)
    key = next((key for name, key in _FOLDERS.items() if (folder / name).is_file()), None)
    if key is None:
        return config
    if config.pretrained is None:
        raise ConfigError(
            f"the checkpoint {folder} is a folder of Hugging Face, and there is no model.pretrained",
            hint=f"set model.{key}: {config.checkpoint}, and model.task, in place of model.factory",
        )
    name = str(config.checkpoint)
    there = {"adapter": name} if key == "adapter" else {"pretrained": name}
    return config.model_copy(update={"checkpoint": None, **there})


_FOLDERS = {"adapter_config.json": "adapter", "config.json": "pretrained"}


def _of_factory(model: nn.Module, config: ModelConfig) -> LoadedModel:
    assert config.factory is not None
    return LoadedModel(model, [], [module_of(config.factory)], None)


def _in_files(config: ModelConfig, base: Path) -> LoadedModel | None:
    """The factory's model, its parameters in the checkpoint's files; None where they must be in memory."""
    if config.checkpoint is None or config.mode == "train":  # which draws after what the factory has drawn
        return None
    from psgrad.models.in_files import built_without_memory, tensors_in_files

    tensors = tensors_in_files(base / config.checkpoint)
    model = None if tensors is None else built_without_memory(lambda: _built(config, base))
    if model is None or tensors is None:
        return None
    made = _filled(_of_factory(model, config), config, base / config.checkpoint, StateDict(tensors))
    return None if any(each.is_meta for each in made.model.parameters()) else made


def _filled(
    made: LoadedModel, config: ModelConfig, path: Path, found: StateDict | None = None
) -> LoadedModel:
    """The model with the weights of a checkpoint. found: what was read of it."""
    found = read_checkpoint(path) if found is None else found
    note = load_into(
        made.model,
        found.tensors,
        str(config.checkpoint),
        as_saved=config.pretrained is not None,
    )
    notes = [*made.notes, *found.notes, *([note] if note else [])]
    return replace(made, notes=notes, sha256=checkpoint_hash(path))


def _from_pretrained(config: ModelConfig, base: Path, narrow: bool, in_files: bool) -> LoadedModel:
    """A pretrained model with its adapter. `narrow`: of a model with an adapter nothing else is trained."""
    from psgrad.models.adapters import with_adapter
    from psgrad.models.pretrained import load_pretrained, pick_for

    found = load_pretrained(config, base, narrow=narrow and config.adapter is not None, in_files=in_files)
    model, notes, names, files = found.model, found.notes, [], checkpoint_files(found.weights)
    if config.adapter is not None:
        adapted = with_adapter(found, config, base)
        model, notes, names = adapted.model, [*notes, *adapted.notes], [adapted.name]
        files = [*files, adapted.weights]
    location = found.location
    return LoadedModel(
        model,
        notes,
        found.modules_imported,
        files_sha256(files),
        pick_for(found.pretrained.task, found.pretrained.config),
        found.pretrained,
        ModelOrigin(
            config.pretrained, str(location.folder), location.commit, config.task, names, config.dtype
        ),
    )


def _built(config: ModelConfig, base: Path) -> nn.Module:
    factory = config.factory
    assert factory is not None
    model: Any = call_factory(factory, base, config.kwargs, raises=ModelError)
    if not isinstance(model, nn.Module):
        raise ModelError(
            f"the factory {factory} returned an object of type {type(model).__name__}; expected a"
            " torch.nn.Module",
        )
    if any(isinstance(module, jit.ScriptModule) for module in model.modules()):
        raise ModelError(
            f"the factory {factory} returned a model that holds a module of TorchScript, whose parameters"
            " can't be replaced",
            hint="return the module before torch.jit.script or torch.jit.trace",
        )
    lazy = [name for name, parameter in model.named_parameters() if is_lazy(parameter)]
    if lazy:
        raise ModelError(
            f"the parameter {lazy[0]} of a lazy layer has no shape yet ({len(lazy)} in all)",
            hint="name the sizes in the factory, or run one batch through the model there",
        )
    return model


def checkpoint_hash(path: Path) -> str:
    """The SHA-256 of a checkpoint: of its file, or of its files' hashes."""
    kind = next((key for name, key in _FOLDERS.items() if (path / name).is_file()), None)
    if kind is not None:
        from psgrad.models.model_folders import adapter_weights, weights_file

        path = adapter_weights(path) if kind == "adapter" else weights_file(path)
    return files_sha256(checkpoint_files(path))


def _require_usable_parameters(model: nn.Module, factory: str) -> None:
    parameters = dict(model.named_parameters())
    if not any(parameter.requires_grad for parameter in parameters.values()):
        what = "has only frozen parameters (requires_grad is False)" if parameters else "has no parameters"
        raise ModelError(f"the model of {factory} {what}; expected at least one parameter to differentiate")
    for name, parameter in parameters.items():
        if parameter.is_meta:
            raise ModelError(
                f"the parameter {name} is on the meta device, without values",
                hint="build the model on the CPU in the factory",
            )
        wide = parameter.is_floating_point() and parameter.dtype.itemsize > 1
        if parameter.requires_grad and not wide:
            raise ModelError(
                f"the parameter {name} is of type {parameter.dtype}; expected real floating-point"
                " parameters of 16 bits or more; others with requires_grad=False",
            )


def _require_independent_samples(model: nn.Module) -> None:
    """Refuses layers whose output for one sample depends on the others in its batch."""
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
            f"the layer {name} ({type(layer).__name__}){more} is in train mode: each output depends on the"
            " whole batch",
            hint="set model.mode: eval, or replace the layer by nn.GroupNorm and train again",
        )
    raise ModelError(
        f"the layer {name} ({type(layer).__name__}){more} keeps no running statistics: each output depends on"
        " the whole batch",
        hint="build it with track_running_stats=True, or replace it by nn.GroupNorm and train again",
    )


_SHOWN = 8


def choose_trainable(model: nn.Module, patterns: Sequence[str], key: str) -> list[str]:
    """Has the parameters that match one of the patterns require a gradient, and no others; the names of the
    chosen ones.

    Patterns are shell globs over whole names, such as `head.*` or `*lora*`; case counts. A parameter with
    several names (tied weights) is chosen by any of them, and frozen only if none matches. What the factory
    had frozen is trained where a pattern names it.

    `key` is the config's name for the patterns. Raises ConfigError for a pattern that no parameter matches,
    and where there is none; ModelError where a chosen one can't have a gradient.
    """
    named = list(model.named_parameters(remove_duplicate=False))
    names = [name for name, _ in named]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise _no_match(pattern, names, key)
    matching = {name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)}
    chosen = {name: parameter for name, parameter in named if name in matching}
    if not chosen:
        raise ConfigError(
            f"{key} chooses no parameter; expected at least one pattern, such as head.*",
            hint="leave it out to train all that the model's factory left trainable",
        )
    for name, parameter in chosen.items():
        if not parameter.is_floating_point():
            raise ModelError(
                f"{key} chooses {name}, which is of type {parameter.dtype} and can't have a gradient",
                hint="choose parameters of floating-point numbers, such as adapters beside quantised weights",
            )
    identities = {id(parameter) for parameter in chosen.values()}
    for _, parameter in named:
        parameter.requires_grad_(id(parameter) in identities)
    return list(chosen)


def _no_match(pattern: str, names: list[str], key: str) -> ConfigError:
    """Near to a pattern are names, and whole modules written as it is written."""
    modules = dict.fromkeys(
        ".".join(name.split(".")[:depth]) + ".*" for name in names for depth in range(1, name.count(".") + 1)
    )
    return ConfigError(
        f"{key}: no parameter matches {pattern!r}{did_you_mean(pattern, [*names, *modules])}; expected"
        f" patterns of the model's parameters: {first_of(names, _SHOWN)}",
        hint="a pattern is matched with the whole name: head.* is all inside head",
    )
