"""The checkpoints of `analyze.checkpoints`: each known to be there and to fit the model before any work, and
loaded when asked for.
"""

from __future__ import annotations

import hashlib
from functools import partial
from pathlib import Path

import torch
from torch import nn

from psgrad.engine.execution.objective import Objective
from psgrad.engine.measures.measure import CheckpointModel
from psgrad.errors import CheckpointError, ConfigError
from psgrad.inputs.models.checkpoint_headers import require_checkpoint
from psgrad.inputs.models.factory import checkpoint_hash, load_model
from psgrad.workflows.residence import turn_to_read
from psgrad.workflows.setup import Setup


def checkpoints_of(run: Setup) -> list[CheckpointModel]:
    """The checkpoints of a run, named as in the config; one at a time is in memory.

    Raises ConfigError for a file that is not there and for the same weights twice, CheckpointError for a file
    that can't be read or does not fit the model.
    """
    paths, base = run.config.analyze.checkpoints or [], run.config.base
    for path in paths:  # all of them, before the first is read
        require_checkpoint(base / path)
    met: dict[str, Path] = {}
    for path in paths:
        with turn_to_read(run.config.model.model_copy(update={"checkpoint": path}), base):
            weights = _digest(_loaded(run, path))
        if weights in met:
            raise same_weights(met[weights], path, "analyze.checkpoints")
        met[weights] = path
    return [CheckpointModel(str(path), partial(_objective, run, path)) for path in paths]


def same_weights(first: object, second: object, key: str) -> ConfigError:
    """What is said of two checkpoints of the config's `key` with equal weights. Files are not compared, as
    torch.save writes a file's name into it.
    """
    return ConfigError(
        f"the checkpoints {first} and {second} hold the same weights",
        expected="each checkpoint once",
        cause="one file under two names, or a training run that did not train in between",
        next_step=f"leave one of them out of {key}; it would count double",
    )


def checkpoints_sha256(run: Setup) -> dict[str, str]:
    """The hash of each checkpoint's file, by its name in the config."""
    return {
        str(path): checkpoint_hash(run.config.base / path) for path in run.config.analyze.checkpoints or []
    }


def _objective(run: Setup, path: Path) -> Objective:
    config = run.config
    with turn_to_read(config.model.model_copy(update={"checkpoint": path}), config.base):
        model = run.placed(_loaded(run, path), config.model.dtype)
    return at_weights(run.objective, model, path).with_summary(None)


def at_weights(objective: Objective, model: nn.Module, path: object) -> Objective:
    """The objective with the model of another checkpoint. Raises CheckpointError where it has other
    parameters.
    """
    found = objective.with_model(model)
    ours, theirs = (
        {name: tuple(value.shape) for name, value in each.params.items()} for each in (objective, found)
    )
    odd = sorted({name for name, _ in ours.items() ^ theirs.items()})
    if odd:
        raise CheckpointError(
            f"the model of the checkpoint {path} has other parameters than the config's model: {odd[0]}"
            + (f" and {len(odd) - 1} more" if len(odd) > 1 else ""),
            expected="checkpoints of one training run",
            cause="a folder of another model, or an adapter where the config has none",
        )
    return found


def _loaded(run: Setup, path: Path) -> nn.Module:
    config = run.config
    return load_model(
        config.model.model_copy(update={"checkpoint": path}),
        config.base,
        config.analyze.trainable,
        "analyze.trainable",
        allow_download=config.allow_download,
        in_files=run.supply is not None,
    ).model


def _digest(model: nn.Module) -> str:
    """Of the weights; not of the file, into which torch.save writes its name."""
    digest = hashlib.blake2b(digest_size=16)
    for name, value in model.state_dict().items():
        digest.update(f"{name}{value.dtype}{tuple(value.shape)}".encode())
        digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
