"""The checkpoints of a training run: a setup at another of them, those of `analyze.checkpoints`, one at a
time, and those of `influence.checkpoints`, all at once. Each is known to be there and to fit the model before
any work.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

from psgrad.commands.setup import Setup
from psgrad.config import CheckpointConfig, Config
from psgrad.engine.execution.objective import Objective
from psgrad.engine.execution.placement import place
from psgrad.engine.measures.measure import CheckpointModel
from psgrad.errors import CheckpointError, ConfigError
from psgrad.models.checkpoint_files import require_checkpoint
from psgrad.models.factory import checkpoint_hash
from psgrad.models.model_identity import identify
from psgrad.wording import first_of


def at_checkpoint(setup: Setup, path: Path) -> Setup:
    """The setup with the weights of another checkpoint. Raises CheckpointError for the checkpoint of a
    model with other parameters.
    """
    loaded = setup.model_at(path)
    model = place(loaded.model, setup.device, setup.dtype, setup.config.model.dtype, setup.supply)
    if setup.recompute is not None:
        setup.recompute.add(model)
    objective = setup.objective.with_model(model)
    ours, theirs = (
        {name: tuple(value.shape) for name, value in each.params.items()}
        for each in (setup.objective, objective)
    )
    odd = sorted({name for name, _ in ours.items() ^ theirs.items()})
    if odd:
        raise CheckpointError(
            f"the model of the checkpoint {path} has other parameters than the config's model:"
            f" {first_of(odd, 1)}; expected checkpoints of one training run",
            hint="a folder of another model, or an adapter where the config has none",
        )
    return replace(setup, checkpoint=path, loaded=loaded, model=model, objective=objective)


def same_weights(first: object, second: object, key: str) -> ConfigError:
    """What is said of two checkpoints of the config's `key` with equal weights. Files are not compared, as
    torch.save writes a file's name into it.
    """
    return ConfigError(
        f"the checkpoints {first} and {second} hold the same weights; expected each checkpoint once",
        hint=(
            "one file under two names, or a training run that did not train in between; leave one of"
            f" them out of {key}; it would count double"
        ),
    )


# -- of analyze ---------------------------------------------------------------------------------------------


def checkpoint_models(setup: Setup) -> list[CheckpointModel]:
    """The checkpoints of `analyze.checkpoints`, named as in the config; one at a time is in memory.

    Raises ConfigError for a file that is not there and for the same weights twice, CheckpointError for a file
    that can't be read or does not fit the model.
    """
    paths, base = setup.config.analyze.checkpoints or [], setup.config.base
    for path in paths:  # all of them, before the first is read
        require_checkpoint(base / path)
    met: dict[str, Path] = {}
    for path in paths:
        weights = identify(setup.model_at(path).model).weights_sha256
        if weights in met:
            raise same_weights(met[weights], path, "analyze.checkpoints")
        met[weights] = path
    return [CheckpointModel(str(path), partial(_objective, setup, path)) for path in paths]


def _objective(setup: Setup, path: Path) -> Objective:
    return at_checkpoint(setup, path).objective.with_summary(None)


def checkpoints_sha256(setup: Setup) -> dict[str, str]:
    """The hash of each checkpoint's file, by its name in the config."""
    return {
        str(path): checkpoint_hash(setup.config.base / path)
        for path in setup.config.analyze.checkpoints or []
    }


# -- of influence -------------------------------------------------------------------------------------------


def checkpoints_of(config: Config) -> list[CheckpointConfig | None]:
    """The checkpoints that a config lists; None stands for the model's own."""
    return list(config.influence.checkpoints) if config.influence.checkpoints else [None]


def setup_at(setup: Setup, number: int) -> Setup:
    """The setup at another of its checkpoints. setup: at the first one."""
    checkpoint = checkpoints_of(setup.config)[number]
    return setup if number == 0 or checkpoint is None else at_checkpoint(setup, checkpoint.path)


def sha256_at(config: Config, number: int) -> str | None:
    """The hash of a checkpoint's file; None where the weights are those that the factory gave."""
    checkpoint = checkpoints_of(config)[number]
    path = config.model.checkpoint if checkpoint is None else checkpoint.path
    return None if path is None else checkpoint_hash(config.base / path)
