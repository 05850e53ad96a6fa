"""`psgrad validate --deep`: the model and the data loaded, and loss and gradients of a few rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from psgrad.config import Config
from psgrad.engine.execution.run_plan import plan_run
from psgrad.engine.execution.streaming import Stream
from psgrad.errors import ConfigError
from psgrad.user_code import with_code_beside
from psgrad.workflows.influence_setup import method_from
from psgrad.workflows.measure_setup import measures_of
from psgrad.workflows.plan import plan_of
from psgrad.workflows.setup import set_up
from psgrad.workflows.validation import Validation

# Rows whose loss and gradient are taken, from all over the dataset.
_ROWS = 32


@with_code_beside
def validate_deep(config: Config, found: Validation, say: Callable[[str], None]) -> None:
    """Add to what was found: options of measures and methods, the fit of weights and model, the losses of
    some rows, the self-check, and the memory that a run would take.
    """
    with found.problems_at("analyze.measures"):
        measures_of(config)
    with found.problems_at("influence.method"):
        method_from(config.influence.method, config.base)
    with found.problems_at(""):
        run = set_up(config)
        trainable = sum(parameter.numel() for parameter in run.objective.params.values())
        found.facts["trained"] = (
            f"{trainable:,} numbers in {len(run.objective.params):,} parameters, on {run.device}"
        )
        found.facts["rows"] = f"{len(run.samples.ids):,}"  # ids are read, too
        names, classes = config.data.class_names, run.reader.classes
        if names is not None and classes is not None and len(names) != classes:
            wrong = ConfigError(
                f"the names are {', '.join(names[:5])} ({len(names)}), and the model has {classes} classes",
                expected="a name for each class, in the order of the outputs",
            )
            found.add("data.class_names", [wrong])
        stream, count = run.stream(say), min(_ROWS, len(run.samples))
        rows = [place * len(run.samples) // count for place in range(count)]
        found.facts["losses"] = _losses(stream, rows)
        check = run.self_check(stream)
        found.facts["self-check"] = (
            "left out, as the model draws at random"
            if check is None
            else f"worst relative error {check.worst:.2g}, against a plain one-sample gradient"
        )
        plan = plan_of(plan_run(run.stream(say), len(run.samples)))
        found.facts["memory"] = (
            f"about {plan.total_bytes / 1e6:,.1f} MB at its highest, {plan.chunk_size:,} rows at a time"
        )


def _losses(stream: Stream, rows: Sequence[int]) -> str:
    losses = stream.gradients_at(rows).losses
    finite = losses[losses.isfinite()]
    words = (
        f"{finite.min():.4g} to {finite.max():.4g} over {len(rows)} rows"
        if len(finite)
        else f"none of {len(rows)} is finite"
    )
    return words + (
        f", {len(losses) - len(finite)} of them not finite" if 0 < len(finite) < len(losses) else ""
    )
