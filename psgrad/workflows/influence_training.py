"""The training run of `method: replay`, made from its config and computed once: from the initial weights to
the end, which must be the model's checkpoint where there is one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from psgrad.config import Config, TrainingConfig
from psgrad.engine.execution.examples import Examples
from psgrad.engine.gradients.flat import Vectors
from psgrad.engine.influence.evaluation.jobs import LoadedRows, Recipe
from psgrad.engine.influence.evaluation.retraining import fresh_model
from psgrad.engine.influence.training_run import TrainingRun, distance
from psgrad.errors import CheckpointError, ConfigError
from psgrad.inputs.models.factory import load_model
from psgrad.inputs.models.step_function import resolve_batches, resolve_step
from psgrad.workflows.analyze_checkpoints import at_weights
from psgrad.workflows.setup import Setup

_RECIPE = ("optimizer", "epochs", "batch_size", "learning_rate", "schedule", "momentum", "weight_decay")


def fresh_models(config: Config, run: Setup) -> Callable[[int], nn.Module]:
    """seed -> a model with fresh weights, never a copy of the trained one. Those of its parameters are
    trained that the factory left so.
    """
    if config.model.pretrained is not None and not (config.model.checkpoint or config.influence.checkpoints):
        raise ConfigError(
            "models would be trained again from the trained weights: model.pretrained has the only ones",
            expected="the weights that training began with, and those that it ended with",
            next_step=(
                "set model.pretrained to the model that was fine-tuned, and model.checkpoint to the folder of"
                " the result"
            ),
        )
    bare = config.model.model_copy(update={"checkpoint": None, "state_dict_key": None})

    def fresh(seed: int) -> nn.Module:
        loaded = load_model(bare, config.base, allow_download=config.allow_download)
        return loaded.model.to(run.device, run.dtype)

    return fresh


def replayed(config: Config, run: Setup, say: Callable[[str], None]) -> tuple[Setup, TrainingRun]:
    """(the same at the end of the training run, the run).

    Raises ConfigError for a run that can't be described so, InfluenceError for one that diverges,
    CheckpointError where it ends at other weights than model.checkpoint.
    """
    wanted = config.influence.training
    assert wanted is not None
    examples = Examples(run.objective, run.reader, len(run.samples), run.stream_options(say))
    training = TrainingRun(
        run.objective,
        LoadedRows.of(examples),
        Recipe(**{name: getattr(wanted, name) for name in _RECIPE}),
        wanted.seed,
        initial_weights(config, wanted, run),
        fresh=None
        if wanted.initial
        else lambda seed: of_model(fresh_model(fresh_models(config, run), seed), run),
        own=resolve_step(wanted, config.base),
        loader=resolve_batches(wanted, config.base),
        disk=_existing(config.output) if wanted.states == "disk" else None,
    )
    if config.model.checkpoint is not None:
        require_same_end(training, run.objective.params, str(config.model.checkpoint), wanted.tolerance)
    return with_weights(run, training.final), training


def _existing(folder: Path) -> Path:
    """A folder, or the first one above it that exists."""
    return next(each for each in (folder.absolute(), *folder.absolute().parents) if each.is_dir())


def initial_weights(config: Config, wanted: TrainingConfig, run: Setup) -> Vectors:
    """name -> parameter: where the run begins, of those that are trained."""
    if wanted.initial is None:
        model = fresh_model(fresh_models(config, run), wanted.seed)
    else:
        at = config.model.model_copy(update={"checkpoint": wanted.initial, "state_dict_key": None})
        model = load_model(at, config.base, allow_download=config.allow_download).model
    return of_model(model, run)


def of_model(model: nn.Module, run: Setup) -> Vectors:
    """name -> parameter of a model, of those that are trained."""
    own = dict(model.named_parameters())
    return {
        name: own[name].detach().to(value.device, value.dtype, copy=True)
        for name, value in run.objective.params.items()
    }


def with_weights(run: Setup, params: Mapping[str, torch.Tensor]) -> Setup:
    """The same with these parameters in a model of their own."""
    loaded = load_model(
        run.config.model,
        run.config.base,
        run.config.influence.parameters,
        "influence.parameters",
        allow_download=run.config.allow_download,
    )
    with torch.no_grad():
        own = dict(loaded.model.named_parameters())
        for name, value in params.items():
            own[name].copy_(value)
    model = run.placed(loaded.model, run.config.model.dtype)
    return replace(run, model=model, objective=at_weights(run.objective, model, "the end of the run"))


def require_same_end(training: TrainingRun, end: Vectors, path: str, tolerance: float) -> None:
    """Raises CheckpointError where the run ends elsewhere than the checkpoint."""
    apart, way = distance(end, training.final), distance(end, training.initial)
    if apart <= tolerance * way:
        return
    share = f"{apart / way:.3g} times as far" if way else "not there, while the checkpoint is where it began"
    raise CheckpointError(
        f"the training run that influence.training describes does not end at {path}: its end is {share} from"
        f" it as the initial weights are (distance {apart:.3g}, {way:.3g})",
        expected=f"at most {tolerance:g} times (influence.training.tolerance)",
        cause="another optimiser, learning rate, number of epochs, order of the rows or initial weights; or a"
        " run that random numbers or another machine's rounding lead elsewhere",
        next_step="correct influence.training, or leave model.checkpoint out: the end of the replayed run is"
        " then the model",
    )
