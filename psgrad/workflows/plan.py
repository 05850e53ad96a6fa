"""`psgrad plan`: what a run would do, and what it would take."""

from __future__ import annotations

from collections.abc import Callable

from psgrad.config import Config
from psgrad.engine.execution.calibration import measure
from psgrad.engine.execution.run_plan import RunPlan, plan_run
from psgrad.engine.gradients import machine
from psgrad.engine.gradients.costs import Machine
from psgrad.results import ParameterPlan, PlanResult
from psgrad.user_code import with_code_beside
from psgrad.workflows.setup import set_up


@with_code_beside
def plan(config: Config, *, say: Callable[[str], None] = lambda _: None) -> PlanResult:
    """What `analyze` would do with the config, and what it would take: the whole of `psgrad plan`.

    Runs the first few rows, and no more. On a machine that was never measured, it is measured first, which
    takes seconds, and kept. Raises PsgradError as `analyze` does.
    """
    run = set_up(config)
    if not machine.is_known(run.device):
        say(f"measuring {machine.device_name(run.device)}, once")
        if machine.keep(measure(run.device), run.device) is None:
            say("what was measured could not be kept, and will be measured again next time")
    return plan_of(plan_run(run.stream(say), len(run.samples)), machine.machine(run.device))


def plan_of(found: RunPlan, on: Machine) -> PlanResult:
    """The plan of a run as a plain record."""
    parameters = [
        ParameterPlan(
            p.name,
            "x".join(map(str, p.shape)) or "scalar",
            p.kinds,
            p.way,
            1e6 * p.seconds,
            p.bytes,
            p.factored,
        )
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
        machine=f"{on.name} ({on.origin})",
    )
