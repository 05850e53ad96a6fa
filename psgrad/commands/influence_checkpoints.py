"""The model, loss and training data of an influence run at each of its checkpoints, and what is refused of
them; and of `method: replay` the training run, made from its config and computed once: from the initial
weights to the end, which must be the model's checkpoint where there is one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import nn

from psgrad.commands.loaded_parts import Trained, load
from psgrad.commands.setup import Setup, at_weights, draws_at_random, setup_of
from psgrad.config import CheckpointConfig, Config, is_callable_spec
from psgrad.engine.execution.examples import Examples
from psgrad.engine.execution.ranks import Processes
from psgrad.engine.gradients.flat import Vectors
from psgrad.engine.influence.evaluation.jobs import LoadedRows, Recipe
from psgrad.engine.influence.evaluation.retraining import fresh_model
from psgrad.engine.influence.training_run import TrainingRun, distance
from psgrad.errors import CheckpointError, ConfigError
from psgrad.models.factory import checkpoint_hash, load_model

# How far the end of a run may be from the checkpoint, as a share of the way from the initial weights.
_TOLERANCE = 1e-3
_RECIPE = ("optimizer", "epochs", "batch_size", "learning_rate", "schedule", "momentum", "weight_decay")


def fresh_models(config: Config, run: Setup) -> Callable[[int], nn.Module]:
    """seed -> a model with fresh weights, never a copy of the trained one. Those of its parameters are
    trained that the factory left so.
    """
    if config.model.pretrained is not None and not (config.model.checkpoint or config.influence.checkpoints):
        raise ConfigError(
            "models would be trained again from the trained weights: model.pretrained has the only ones",
            hint="set model.pretrained to the model before its training, and model.checkpoint to the result",
        )
    bare = config.model.model_copy(update={"checkpoint": None})

    def fresh(seed: int) -> nn.Module:
        loaded = load_model(bare, config.base)
        return loaded.model.to(run.device, run.dtype)

    return fresh


def recomputed_run(config: Config, run: Setup, say: Callable[[str], None]) -> tuple[Setup, TrainingRun]:
    """Computes the training run again. Returns (`run` with the weights at its end, the training run).

    Raises ConfigError for a run that can't be described so, InfluenceError for one that diverges,
    CheckpointError where it ends at other weights than model.checkpoint.
    """
    wanted = config.influence.training
    assert wanted is not None
    examples = Examples(run.objective, run.reader, len(run.samples), run.stream_options(say))

    if wanted.initial is None:
        initial = fresh_model(fresh_models(config, run), wanted.seed)
    else:
        at = config.model.model_copy(update={"checkpoint": wanted.initial})
        initial = load_model(at, config.base).model
    training = TrainingRun(
        run.objective,
        LoadedRows.of(examples),
        Recipe(**{name: getattr(wanted, name) for name in _RECIPE}),
        wanted.seed,
        of_model(initial, run),
    )
    if config.model.checkpoint is not None:
        require_same_end(training, run.objective.params, str(config.model.checkpoint))
    return with_weights(run, training.final), training


def of_model(model: nn.Module, run: Setup) -> Vectors:
    """name -> parameter of a model, of those that are trained."""
    own = dict(model.named_parameters())
    return {
        name: own[name].detach().to(value.device, value.dtype, copy=True)
        for name, value in run.objective.params.items()
    }


def with_weights(run: Setup, params: Mapping[str, torch.Tensor]) -> Setup:
    """`run` with these parameters, in a model of its own."""
    loaded = run.another(run.config.model)
    own = dict(loaded.model.named_parameters())
    for name, value in params.items():  # in its own type: a base in half precision would round it
        own[name].data = value.detach().to(own[name].device, copy=True)
    model = run.placed(loaded.model)
    return replace(run, model=model, objective=at_weights(run.objective, model, "the end of the run"))


def require_same_end(training: TrainingRun, end: Vectors, path: str) -> None:
    """Raises CheckpointError where the run ends elsewhere than the checkpoint."""
    apart, way = distance(end, training.final), distance(end, training.initial)
    if apart <= _TOLERANCE * way:
        return
    share = f"{apart / way:.3g} times as far" if way else "not there, while the checkpoint is where it began"
    raise CheckpointError(
        f"the training run that influence.training describes does not end at {path}: its end is {share}"
        f" from it as the initial weights are (distance {apart:.3g}, {way:.3g})",
        hint="correct influence.training, or leave model.checkpoint out, which makes that end the model",
    )


def checkpoints_of(config: Config) -> list[CheckpointConfig | None]:
    """The checkpoints that a config lists; None stands for the model's own."""
    return list(config.influence.checkpoints) if config.influence.checkpoints else [None]


def first_run(config: Config, processes: Processes) -> Setup:
    """Model, loss and training data at the first checkpoint. Raises ConfigError for a model that draws at
    random.
    """
    run = setup_of(
        load(
            _at(config, 0),
            trained=Trained(config.influence.parameters, "influence.parameters"),
            processes=processes,
        )
    )
    require_of_weights(config, run)
    require_of_groups(config, run)
    if draws_at_random(run.first_output, run.model):
        raise ConfigError(
            "the model draws random numbers in train mode, so an example has no one gradient",
            hint="set model.mode: eval",
        )
    return run


def require_of_weights(config: Config, run: Setup) -> None:
    """Raises ConfigError for a curvature that weights of losses would enter squared: that of gradients times
    themselves.
    """
    if not run.samples.weighted:
        return
    method, index = config.influence.method, config.influence.index
    options = {"curvature": "gauss_newton", "fisher": "sampled", **method.options}
    by_output = {"influence": options["curvature"] != "fisher", "ekfac": options["fisher"] != "empirical"}
    if not (method.name in _FIRST_ORDER or by_output.get(method.name, is_callable_spec(method.name))):
        problem = f"the method {method.name} with the options {dict(method.options)}"
    elif index is not None and index.features != "loss":
        problem = f"an index of the {index.features}"
    else:
        return
    raise ConfigError(
        f"data.weight: {problem} is not computed for losses with weights: its curvature would have their"
        " squares",
        hint=(
            f"choose {', '.join(_FIRST_ORDER)}, influence by the gauss_newton or hessian curvature, or ekfac"
            " with fisher: sampled or exact"
        ),
    )


# Methods that read gradients alone, whatever rows a gradient is the sum of.
_FIRST_ORDER = ("gradient_dot", "gradient_cosine", "tracin")


def require_of_groups(config: Config, run: Setup) -> None:
    """Raises ConfigError for what reads the output of single rows, where samples are groups of rows."""
    if run.samples.ungrouped is None:
        return
    wanted, method = config.influence, config.influence.method
    first_order = {"leverage": False, "change": "gradient"}.items() <= method.options.items()
    problem = None
    if method.name not in (*_FIRST_ORDER, "influence") and not is_callable_spec(method.name):
        problem = f"the method {method.name}"
    elif method.name == "influence" and not first_order:
        problem = "the method influence with a correction by the output"
    elif wanted.measurement.name != "loss":
        problem = f"the measurement {wanted.measurement.name}"
    elif wanted.index is not None and wanted.index.features != "loss":
        problem = f"an index of the {wanted.index.features}"
    if problem is not None:
        raise ConfigError(
            f"data.group: {problem} is not computed for groups of rows",
            hint=(
                f"choose {', '.join(_FIRST_ORDER)}, or influence with leverage: false and change: gradient;"
                " and the measurement loss"
            ),
        )


def run_at(run: Setup, number: int) -> Setup:
    """The run at another of its checkpoints. run: at the first one."""
    checkpoint = checkpoints_of(run.config)[number]
    return run if number == 0 or checkpoint is None else run.at_checkpoint(checkpoint.path)


def sha256_at(config: Config, number: int) -> str | None:
    """The hash of a checkpoint's file; None where the weights are those that the factory gave."""
    path = _at(config, number).model.checkpoint
    return None if path is None else checkpoint_hash(config.base / path)


def _at(config: Config, number: int) -> Config:
    """The config with this checkpoint in the model's place."""
    checkpoint = checkpoints_of(config)[number]
    if checkpoint is None:
        return config
    return config.model_copy(
        update={"model": config.model.model_copy(update={"checkpoint": checkpoint.path})}
    )
