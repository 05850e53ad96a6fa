"""`psgrad plan`: what a run would do, and what it would take."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from psgrad.commands.completion import completed_for_analyze
from psgrad.commands.setup import Setup, set_up
from psgrad.config import Config
from psgrad.engine.execution.run_plan import RunPlan, plan_run
from psgrad.engine.execution.streaming import Stream
from psgrad.engine.execution.weight_supply import Supply
from psgrad.engine.gradients.per_sample import per_sample_square_norms
from psgrad.run.results import ParameterPlan, PlanResult
from psgrad.user_code import with_code_beside

# Rows of the chunk for which moved weights are counted.
_FEW = 8


@with_code_beside
def plan(config: Config, *, say: Callable[[str], None] = lambda _: None) -> PlanResult:
    """What `analyze` would do with the config, and what it would take: the whole of `psgrad plan`.

    Runs the first few rows, and no more. Raises PsgradError as `analyze` does.
    """
    run = set_up(completed_for_analyze(config))
    stream = run.stream(say)
    found = replace(
        plan_of(plan_run(stream, len(run.samples))),
        parameters_live=run.residence.where,
        parameters_reason=run.residence.why,
        recomputed=run.recompute.modules if run.recompute is not None and run.recompute.on else [],
    )
    if run.supply is None:
        return found
    return replace(
        found,
        moved_bytes=_moved(run.supply, stream, min(found.chunk_size, _FEW, len(run.samples))),
        parameter_bytes=_on_device(found.parameter_bytes, run),
    )


def _on_device(weights: int, run: Setup) -> int:
    """Bytes that weights take on the device, where not all of them live there. weights: bytes of all."""
    assert run.supply is not None
    return min(weights, run.supply.budget)


def _moved(supply: Supply, stream: Stream, rows: int) -> int:
    """Bytes of weights that come to the device for a chunk, after the first one."""
    block = stream.load_block(0, rows)
    for _ in range(2):
        before = supply.moved
        stream.computed(per_sample_square_norms, block)
    return supply.moved - before


def plan_of(found: RunPlan) -> PlanResult:
    """The plan of a run as plain values."""
    parameters = [
        ParameterPlan(p.name, "x".join(map(str, p.shape)) or "scalar", p.kinds, p.order, p.bytes, p.factored)
        for p in found.parameters
    ]
    return PlanResult(
        parameters=parameters,
        rows=found.rows,
        chunk_size=found.chunk_size,
        seconds=found.seconds,
        chunk_seconds=found.chunk_seconds,
        peak_bytes=found.peak_bytes,
        input_bytes=found.input_bytes,
        parameter_bytes=found.parameter_bytes,
        replayed=found.replayed,
        replay_reason=found.why,
        obstacle=found.obstacle,
    )
