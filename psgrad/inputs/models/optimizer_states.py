"""What Adam kept of each parameter when a checkpoint was saved, read without running code: from the file that
RunCheckpoints writes beside the weights, or from the optimizer.pt of a Hugging Face trainer.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from psgrad.errors import CheckpointError
from psgrad.inputs.models.run_checkpoints import BETA2, OPTIMIZER_SUFFIX
from psgrad.inputs.models.torch_files import read_torch

_TRAINER_FILE = "optimizer.pt"
# Parameters that a Hugging Face trainer puts into its second group, which has no weight decay.
_NOT_DECAYED = re.compile(r"bias|layer_?norm|rms_?norm|(^|\.)norm($|\.)|_norm($|\.)|ln_|ln\d", re.IGNORECASE)
State = Mapping[str, Any]


def second_moments(checkpoint: Path, model: nn.Module) -> dict[str, torch.Tensor] | None:
    """name -> Adam's mean of the squared gradients of a parameter, corrected for its start at zero; None
    where no state lies beside the checkpoint. A parameter that was not trained is not in it.

    Raises CheckpointError for a state of another optimiser, of another model, or a file that can't be read.
    """
    if checkpoint.is_dir():
        path = checkpoint / _TRAINER_FILE
        states, beta2 = _of_trainer(path, model) if path.is_file() else ({}, {})
    else:
        path = checkpoint.with_suffix(OPTIMIZER_SUFFIX)
        states, beta2 = _of_run(path) if path.is_file() else ({}, {})
    if not path.is_file():
        return None
    found = {}
    for name, parameter in model.named_parameters():
        if name not in states:
            continue
        square, step = states[name].get("exp_avg_sq"), states[name].get("step")
        if not isinstance(square, torch.Tensor) or step is None or not float(step) >= 1:
            raise CheckpointError(
                f"the optimiser state {path} has {', '.join(sorted(states[name])) or 'nothing'} of {name}",
                expected="exp_avg_sq and step, as Adam and AdamW keep them",
                cause="a run of another optimiser",
                next_step="leave out influence.method.optimizer: adam",
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
            f"the optimiser state {path} can't be read: {error}", next_step="delete it, or save it again"
        ) from error
    states: dict[str, dict[str, Any]] = {}
    for key, value in tensors.items():
        name, _, what = key.rpartition("/")
        states.setdefault(name, {})[what] = value
    return dict(states), {} if told is None else dict.fromkeys(states, float(told))


def _of_trainer(path: Path, model: nn.Module) -> tuple[dict[str, State], dict[str, float]]:
    content = read_torch(path).content
    groups = content.get("param_groups") if isinstance(content, dict) else None
    if (
        not isinstance(content, dict)
        or not isinstance(groups, list)
        or not isinstance(content.get("state"), dict)
    ):
        raise _of_another_model(path, "no state and param_groups")
    numbers = [group["params"] for group in groups]
    names = _names_of(groups, model, path)
    states, beta2 = {}, {}
    for group, own_numbers, own_names in zip(groups, numbers, names, strict=True):
        for number, name in zip(own_numbers, own_names, strict=True):
            if number in content["state"]:
                states[name] = content["state"][number]
                beta2[name] = float(group.get("betas", (0.9, 0.999))[1])
    return states, beta2


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
        f"the optimiser state {path} has {arrived}",
        expected="the state of the parameters of this model",
        cause="a file of another model or another trainer",
        next_step="set influence.method.batch_size, and delete or move the file: the state is then estimated",
    )
