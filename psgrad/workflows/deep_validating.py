"""`psgrad validate --deep`: the model and the data loaded, and a few rows taken through loss and gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from psgrad.config import Config
from psgrad.engine.gradients.planning import machines
from psgrad.engine.gradients.planning.forecast import forecast
from psgrad.engine.gradients.streaming import Stream
from psgrad.errors import PsgradError
from psgrad.workflows.foretelling import plan_of
from psgrad.workflows.influence_method import method_from
from psgrad.workflows.measure_setup import measures_of
from psgrad.workflows.setup import set_up
from psgrad.workflows.validating import Problem, Validation

_ROWS = 32


def look_inside(config: Config, found: Validation, say: Callable[[str], None]) -> None:
    """Add to what was found: options of measures and methods, the fit of weights and model, the losses of some rows, the self-check, and
    the memory that a run would take."""
    with _told(found, "analyze.measures"):
        measures_of(config)
    with _told(found, "influence.method"):
        method_from(config.influence.method, config.base)
    with _told(found, ""):
        run = set_up(config)
        trainable = sum(parameter.numel() for parameter in run.objective.params.values())
        found.facts["trained"] = f"{trainable:,} numbers in {len(run.objective.params):,} parameters, on {run.device}"
        found.facts["rows"] = f"{len(run.samples):,}"
        stream, count = run.stream(say), min(_ROWS, len(run.samples))
        rows = [place * len(run.samples) // count for place in range(count)]
        found.facts["losses"] = _losses(stream, rows)
        check = run.self_check(stream)
        worst = None if check is None else f"worst relative error {check.worst:.2g}, against a plain one-sample gradient"
        found.facts["self-check"] = worst or "left out, as the model draws at random"
        plan = plan_of(forecast(run.stream(say), len(run.samples)), machines.machine(run.device))
        found.facts["memory"] = f"about {plan.total_bytes / 1e6:,.1f} MB at its highest, {plan.chunk_size:,} rows at a time"


def _losses(stream: Stream, rows: Sequence[int]) -> str:
    losses = stream.gradients_at(rows).losses
    finite = losses[losses.isfinite()]
    words = f"{finite.min():.4g} to {finite.max():.4g} over {len(rows)} rows" if len(finite) else f"none of {len(rows)} is finite"
    return words + (f", {len(losses) - len(finite)} of them not finite" if 0 < len(finite) < len(losses) else "")


@contextmanager
def _told(found: Validation, where: str) -> Iterator[None]:
    try:
        yield
    except PsgradError as error:
        found.problems.append(Problem(where, error))
