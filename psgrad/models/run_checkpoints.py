"""Saves a few checkpoints of a training run, from any loop, at steps that grow by a constant factor; and
reads what Adam kept of each parameter when a checkpoint was saved, without running code: from the file that
RunCheckpoints writes beside the weights, or from the optimizer.pt of a Hugging Face trainer.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import nn

from psgrad.errors import CheckpointError, ConfigError
from psgrad.models.checkpoint_files import read_torch
from psgrad.run.durable_files import make_folder, write_atomically

_WRAPPINGS = ("_orig_mod.", "module.")
OPTIMIZER_SUFFIX = ".optimizer"
"""Of the file beside a checkpoint with the optimiser's state, itself in the format safetensors."""
BETA2 = "beta2"
"""In the metadata of that file: by how much Adam keeps its mean of squared gradients at each step."""


@dataclass(frozen=True)
class RunCheckpoints:
    """Checkpoints of a run for `influence.checkpoints: "run/*.safetensors"`.

        checkpoints = psgrad.RunCheckpoints("run", epochs=60)
        for epoch in range(60):
            ...
            checkpoints.save(model, epoch + 1, optimizer)

    Attributes:
        folder: made if it is not there.
        epochs, steps: one of them, the length of the run; `save` is called after each epoch, or each step.
        count: how many checkpoints, at numbers that grow by a constant factor up to the last one.
        steps_per_epoch: optimiser steps in an epoch, for the metadata; None where they are not known.
    """

    folder: str | PathLike[str]
    epochs: int | None = None
    steps: int | None = None
    count: int = 5
    steps_per_epoch: int | None = None

    def __post_init__(self) -> None:
        if (self.epochs is None) == (self.steps is None):
            raise ConfigError(
                f"RunCheckpoints: epochs is {self.epochs} and steps is {self.steps}; expected one of them",
            )
        given = (self.length, self.count, 1 if self.steps_per_epoch is None else self.steps_per_epoch)
        if any(type(each) is not int or each < 1 for each in given):
            raise ConfigError(
                f"RunCheckpoints: {self.unit}s {self.length!r}, count {self.count!r}, steps_per_epoch"
                f" {self.steps_per_epoch!r}; expected whole numbers from 1 on",
            )
        names = {self._path(number).name for number in self.numbers}
        there = sorted(each.name for each in Path(self.folder).glob("*.safetensors"))
        other = [name for name in there if name not in names]
        if other:
            raise ConfigError(
                f"the folder {self.folder} has {other[0]}, which is none of this run's checkpoints",
                hint="name another folder, or delete the files of the other run",
            )

    @property
    def length(self) -> int:
        """The length of the run, in epochs or steps."""
        return self.epochs if self.epochs is not None else self.steps  # type: ignore[return-value]

    @property
    def unit(self) -> str:
        return "epoch" if self.epochs is not None else "step"

    @property
    def numbers(self) -> tuple[int, ...]:
        """After which epochs, or steps, a checkpoint is saved."""
        return geometric(self.length, self.count)

    def save(
        self, model: nn.Module, number: int, optimizer: torch.optim.Optimizer | None = None
    ) -> Path | None:
        """Save the weights if this is one of `numbers`; returns the file, or None.

        number: how many epochs (or steps) are done, from 1. optimizer: its learning rate is kept in the
        file's metadata, and the state of each parameter in a file beside it. Raises ConfigError for a number
        that the run does not have.
        """
        if type(number) is not int or not 1 <= number <= self.length:
            raise ConfigError(
                f"RunCheckpoints.save: {self.unit} {number!r} of a run of {self.length} {self.unit}s;"
                f" expected how many {self.unit}s are done, from 1 to {self.length}",
            )
        if number not in self.numbers:
            return None
        path = self._path(number)
        make_folder(path.parent)
        state = optimizer_state(model, optimizer) if optimizer is not None else {}
        if state:
            write_atomically(path.with_suffix(OPTIMIZER_SUFFIX), save(state, _betas(optimizer)))
        write_atomically(path, save(weights_of(model), self._metadata(number, optimizer)))
        return path

    def _path(self, number: int) -> Path:
        return Path(self.folder) / f"{self.unit}-{number:0{len(str(self.length))}d}.safetensors"

    def _metadata(self, number: int, optimizer: torch.optim.Optimizer | None) -> dict[str, str]:
        """Text, as the format has it."""
        found = {"format": "pt", self.unit: str(number)}
        if self.epochs is not None and self.steps_per_epoch is not None:
            found["step"] = str(number * self.steps_per_epoch)
        if optimizer is not None:
            rates = {float(group["lr"]) for group in optimizer.param_groups}
            found["optimizer"] = type(optimizer).__name__
            if len(rates) == 1 and math.isfinite(rate := rates.pop()):
                found["learning_rate"] = repr(rate)
        return found


def _betas(optimizer: torch.optim.Optimizer | None) -> dict[str, str]:
    """Adam's second beta, as text, where all groups have one."""
    groups = [] if optimizer is None else optimizer.param_groups
    found = {float(group["betas"][1]) for group in groups if "betas" in group}
    return {BETA2: repr(found.pop())} if len(found) == 1 else {}


def geometric(length: int, count: int) -> tuple[int, ...]:
    """At most `count` whole numbers up to `length`, the last one, each about the same factor larger than the
    one before: from 1 on, where a factor of 2.5 reaches so far. On digits the scores of these checkpoints
    agreed better with retraining than those of as many late ones.
    """
    factor = min(_LARGEST_FACTOR, length ** (1 / max(1, count - 1)))
    return tuple(sorted({max(1, round(length / factor**back)) for back in range(count)}))


_LARGEST_FACTOR = 2.5


def weights_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers by their names in the model as it was built: what torch.compile and
    DistributedDataParallel put before them is left out. Copies, on the CPU, of which none share memory.
    """
    state = {
        name: value.detach().cpu().clone().contiguous()
        for name, value in model.state_dict().items()
        if isinstance(value, torch.Tensor)
    }
    if not state:
        raise CheckpointError("the model has no weights to save; expected a model with parameters")
    return {unwrapped(name): value for name, value in state.items()}


def unwrapped(name: str) -> str:
    """A parameter's name without what wrappers put before it."""
    while name.startswith(_WRAPPINGS):
        name = name.partition(".")[2]
    return name


def optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """`parameter/what` -> what the optimiser keeps of the parameter (Adam's `exp_avg_sq`, `step`)."""
    names = {id(parameter): unwrapped(name) for name, parameter in model.named_parameters()}
    found: dict[str, torch.Tensor] = {}
    for parameter, kept in optimizer.state.items():
        name = names.get(id(parameter))
        entries: dict[str, Any] = kept if name is not None else {}
        for what, value in entries.items():
            if isinstance(value, torch.Tensor):
                found[f"{name}/{what}"] = value.detach().cpu().clone().contiguous()
    return found


_TRAINER_FILE = "optimizer.pt"
# Parameters that a Hugging Face trainer puts into its second group, which has no weight decay.
_NOT_DECAYED = re.compile(r"bias|layer_?norm|rms_?norm|(^|\.)norm($|\.)|_norm($|\.)|ln_|ln\d", re.IGNORECASE)
State = Mapping[str, Any]


def adam_state(checkpoint: Path) -> Path | None:
    """The file beside a checkpoint with the state of Adam or AdamW; None where none is there, or it can't be
    read. Tensors are not read.
    """
    path = _state_file(checkpoint)
    try:
        if path.suffix == OPTIMIZER_SUFFIX:
            with safe_open(path, "pt") as file:
                names = {key.rpartition("/")[2] for key in file.keys()}  # noqa: SIM118 (no mapping)
        else:
            states = _trainer_content(path, "meta")["state"].values()
            names = {name for state in states for name in state}
    except (OSError, SafetensorError, CheckpointError):
        return None
    return path if "exp_avg_sq" in names else None


def _state_file(checkpoint: Path) -> Path:
    """Where the optimiser's state of a checkpoint is, if it is there."""
    return checkpoint / _TRAINER_FILE if checkpoint.is_dir() else checkpoint.with_suffix(OPTIMIZER_SUFFIX)


def second_moments(checkpoint: Path, model: nn.Module) -> dict[str, torch.Tensor] | None:
    """name -> Adam's mean of the squared gradients of a parameter, corrected for its start at zero; None
    where no state lies beside the checkpoint. A parameter that was not trained is not in it.

    Raises CheckpointError for a state of another optimiser, of another model, or a file that can't be read.
    """
    path = _state_file(checkpoint)
    if not path.is_file():
        return None
    states, beta2 = _of_run(path) if path.suffix == OPTIMIZER_SUFFIX else _of_trainer(path, model)
    found = {}
    for name, parameter in model.named_parameters():
        if name not in states:
            continue
        square, step = states[name].get("exp_avg_sq"), states[name].get("step")
        if not isinstance(square, torch.Tensor) or step is None or not float(step) >= 1:
            raise CheckpointError(
                f"the optimiser state {path} has {', '.join(sorted(states[name])) or 'nothing'} of {name};"
                " expected exp_avg_sq and step, as Adam and AdamW keep them",
                hint="leave out influence.method.optimizer: adam",
            )
        if square.shape != parameter.shape:
            raise _of_another_model(
                path, f"{name} of shape {list(square.shape)}, not {list(parameter.shape)}"
            )
        found[name] = square.double() / (1 - beta2.get(name, 0.999) ** float(step))
    if not found:
        raise _of_another_model(path, f"no parameter of the model, but {', '.join(list(states)[:3])}")
    return found


def _of_run(path: Path) -> tuple[dict[str, State], dict[str, float]]:
    try:
        with safe_open(path, "pt") as file:
            told = (file.metadata() or {}).get(BETA2)
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (no mapping)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"the optimiser state {path} can't be read: {error}",
            hint="delete it, or save it again",
        ) from error
    states: dict[str, dict[str, Any]] = {}
    for key, value in tensors.items():
        name, _, what = key.rpartition("/")
        states.setdefault(name, {})[what] = value
    return dict(states), {} if told is None else dict.fromkeys(states, float(told))


def _of_trainer(path: Path, model: nn.Module) -> tuple[dict[str, State], dict[str, float]]:
    content = _trainer_content(path)
    groups = content["param_groups"]
    numbers = [group["params"] for group in groups]
    names = _names_of(groups, model, path)
    states, beta2 = {}, {}
    for group, own_numbers, own_names in zip(groups, numbers, names, strict=True):
        for number, name in zip(own_numbers, own_names, strict=True):
            if number in content["state"]:
                states[name] = content["state"][number]
                beta2[name] = float(group.get("betas", (0.9, 0.999))[1])
    return states, beta2


def _trainer_content(path: Path, device: str = "cpu") -> dict[str, Any]:
    """A trainer's file: `state`, by the number of the parameter, and `param_groups`."""
    content = read_torch(path, device)
    if (
        not isinstance(content, dict)
        or not isinstance(content.get("param_groups"), list)
        or not isinstance(content.get("state"), dict)
    ):
        raise _of_another_model(path, "no state and param_groups")
    return content


def _names_of(groups: Sequence[Mapping[str, Any]], model: nn.Module, path: Path) -> list[list[str]]:
    """The names of the parameters of each group, in order. The file has numbers alone: a trainer counts the
    trained parameters that are decayed, and then the others.
    """
    sizes = [len(group["params"]) for group in groups]
    parameters = dict(model.named_parameters())
    trained = [name for name, parameter in parameters.items() if parameter.requires_grad]
    for names in (list(parameters), trained):
        apart = [
            [each for each in names if bool(_NOT_DECAYED.search(each)) is late] for late in (False, True)
        ]
        for found in ([names], apart):
            if [len(each) for each in found] == sizes:
                return found
    raise _of_another_model(
        path, f"groups of {', '.join(map(str, sizes))} parameters, and the model has {len(parameters)}"
    )


def _of_another_model(path: Path, arrived: str) -> CheckpointError:
    return CheckpointError(
        f"the optimiser state {path} has {arrived}; expected the state of the parameters of this model",
        hint="set influence.method.batch_size, and move the file: the state is then estimated",
    )
