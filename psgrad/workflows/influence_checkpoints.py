"""The model, loss and training data of an influence run at each of its checkpoints, and what is refused of
them.
"""

from __future__ import annotations

from dataclasses import replace

from psgrad.config import CheckpointConfig, Config, is_callable_spec
from psgrad.engine.execution.ranks import Processes
from psgrad.errors import ConfigError
from psgrad.inputs.models.factory import checkpoint_hash, load_model
from psgrad.workflows.analyze_checkpoints import at_weights
from psgrad.workflows.loaded_parts import Trained, load
from psgrad.workflows.residence import Ranks, turn_to_read
from psgrad.workflows.setup import Setup, draws_at_random, require_precision_of_all, setup_of


def checkpoints_of(config: Config) -> list[CheckpointConfig | None]:
    """The checkpoints that a config lists; None stands for the model's own."""
    return list(config.influence.checkpoints) if config.influence.checkpoints else [None]


def first_run(config: Config, processes: Processes) -> Setup:
    """Model, loss and training data at the first checkpoint. Raises ConfigError for a model that draws at
    random.
    """
    require_precision_of_all(config, "influence")
    run = setup_of(
        load(
            _at(config, 0),
            trained=Trained(config.influence.parameters, "influence.parameters"),
            ranks=Ranks.of(processes),
        )
    )
    require_of_weights(config, run)
    require_of_groups(config, run)
    if draws_at_random(run.first_output, run.model):
        raise ConfigError(
            "the model draws random numbers in train mode, and its gradients would be others each time they"
            " are taken",
            expected=(
                "a model with one gradient an example: dropout is switched off where influence is measured"
            ),
            next_step="set model.mode: eval",
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
        f"data.weight: {problem} is not computed for losses with weights",
        expected=f"{', '.join(_FIRST_ORDER)}, influence by the gauss_newton or hessian curvature, or ekfac"
        " with fisher: sampled or exact",
        cause="its curvature is of products of gradients, which have the square of a weight",
        next_step="choose one of these, or leave data.weight out",
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
            f"{problem} is not computed for groups of rows",
            expected=(
                f"where data.group is set: {', '.join(_FIRST_ORDER)}, or influence with leverage: false and"
                " change: gradient; and the measurement loss"
            ),
            next_step="choose one of these, or leave data.group out",
        )


def later_run(run: Setup, config: Config, number: int) -> Setup:
    """The same with the model of another checkpoint."""
    there = _at(config, number)
    with turn_to_read(there.model, config.base):
        loaded = load_model(
            there.model,
            config.base,
            config.influence.parameters,
            "influence.parameters",
            allow_download=config.allow_download,
            in_files=run.supply is not None,
        )
        model = run.placed(loaded.model, there.model.dtype)
    return replace(
        run,
        config=there,
        loaded=loaded,
        model=model,
        objective=at_weights(run.objective, model, there.model.checkpoint),
    )


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
