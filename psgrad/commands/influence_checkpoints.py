"""The model, loss and training data of an influence run at each of its checkpoints, and what is refused of
them.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from psgrad.commands.loaded_parts import Trained, load
from psgrad.commands.setup import Setup, draws_at_random, setup_of
from psgrad.config import CheckpointConfig, Config, is_callable_spec
from psgrad.engine.execution.ranks import Processes
from psgrad.errors import ConfigError
from psgrad.models.factory import checkpoint_hash, load_model


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
