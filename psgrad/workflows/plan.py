"""`psgrad plan`: what a run would do, and what it would take."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace

from psgrad.config import Config
from psgrad.engine.execution.cluster import Cluster, Workload, efficiencies
from psgrad.engine.execution.machine_calibration import measure
from psgrad.engine.execution.run_plan import RunPlan, plan_run
from psgrad.engine.execution.streaming import Stream
from psgrad.engine.execution.weight_supply import Supply
from psgrad.engine.gradients import machine
from psgrad.engine.gradients.costs import Machine
from psgrad.engine.gradients.per_sample import per_sample_square_norms
from psgrad.errors import ConfigError
from psgrad.inputs.image_samples import DIGEST
from psgrad.inputs.sources.file_checks import Stamp
from psgrad.inputs.sources.file_hashes import SAMPLE, SAMPLES
from psgrad.inputs.sources.load import image_bytes
from psgrad.inputs.sources.source import data_files, files_read_again
from psgrad.results import ParameterPlan, PlanResult, ProcessesPlan
from psgrad.user_code import with_code_beside
from psgrad.workflows.measure_setup import measures_of, prepare
from psgrad.workflows.residence import Ranks
from psgrad.workflows.setup import Setup, set_up

# Bytes of a row on the disk, seconds of verdicts, tables and report for a row, and those of the same beside:
# as benchmarks/scale_out.py has measured them.
_BYTES_A_ROW, _TABLE_SECONDS = 200, 18.5e-6
_REPORT_SECONDS = 1.8
# Costs of reading a dataset first, by one thread: seconds for each hashed byte, for an image in addition to
# its bytes, and for the work of each process on the name of an image. Measured by the same script.
_BYTE_SECONDS, _IMAGE_SECONDS, _NAME_SECONDS = 0.83e-9, 194e-6, 3.6e-6
_FEW = 8


@with_code_beside
def plan(
    config: Config, *, processes: int | None = None, say: Callable[[str], None] = lambda _: None
) -> PlanResult:
    """What `analyze` would do with the config, and what it would take: the whole of `psgrad plan`.

    processes: of how many the run is also predicted, on machines like this one; None for none.

    Runs the first few rows, and no more. On a machine that was never measured, it is measured first, which
    takes seconds, and kept. Raises PsgradError as `analyze` does.
    """
    if processes is not None and processes < 1:
        raise ConfigError(f"--processes {processes}", expected="a whole number, at least 1")
    planned = None if processes is None else Ranks.planned(processes, Cluster().ranks_per_host)
    run = set_up(config, ranks=planned)
    if not machine.is_known(run.device):
        say(f"measuring {machine.device_name(run.device)}, once")
        if machine.keep(measure(run.device), run.device) is None:
            say("what was measured could not be kept, and will be measured again next time")
    stream = run.stream(say)
    found = plan_of(plan_run(stream, len(run.samples)), machine.machine(run.device))
    found = replace(
        found,
        parameters_live=run.residence.where,
        shard_ranks=run.residence.shard_ranks,
        parameters_reason=run.residence.why,
        recomputed=run.recompute.modules if run.recompute is not None and run.recompute.on else [],
    )
    if run.supply is not None:
        found = replace(
            found,
            moved_bytes=_moved(run.supply, stream, min(found.chunk_size, _FEW, len(run.samples))),
            parameter_bytes=_on_device(found.parameter_bytes, run),
        )
    return found if processes is None else replace(found, processes=_of_processes(processes, found, run, say))


def _of_processes(processes: int, one: PlanResult, run: Setup, say: Callable[[str], None]) -> ProcessesPlan:
    """The prediction for `processes` processes. one: the prediction for one process."""
    cluster, gathered = Cluster(), _gathered_bytes(run, say)
    work = Workload(
        one.rows,
        one.chunk_size,
        one.seconds * one.chunk_size / one.rows,
        read=one.input_bytes / one.chunk_size,
        written=_BYTES_A_ROW,
        loaded=one.parameter_bytes,
        gathered=gathered,
        table_seconds=_TABLE_SECONDS,
        report_seconds=_REPORT_SECONDS,
    )
    work = _with_first_look(work, run)
    ((times, efficiency),) = efficiencies(work, cluster, (processes,))
    return ProcessesPlan(
        processes,
        times.seconds,
        efficiency,
        times.parts,
        times.bottleneck,
        gathered,
        round(times.sent),
        round(times.stored),
        asdict(cluster),
        run.residence.where,
        run.residence.shard_ranks,
        one.parameter_bytes,
        one.moved_bytes,
    )


def _with_first_look(work: Workload, run: Setup) -> Workload:
    """The work with what is read of the dataset's files before the first chunk: by all processes together,
    for hashes and the look at all images, and by each host, for a sample and for formats that are converted.
    """
    data, base = run.config.data, run.config.base
    files = [Stamp.of(path) for path in data_files(data, base)] if data.path is not None else []
    size = sum(file.size for file in files)
    by_host = min(size, SAMPLES * SAMPLE) if files_read_again(data, base) else size
    work = replace(work, hashed_bytes=size, hash_seconds=size * _BYTE_SECONDS, loaded=work.loaded + by_host)
    if data.images is None and data.image is None:
        return work
    image = image_bytes(data, base, _FEW, run.config.allow_download)
    return replace(
        work,
        read=image,
        hashed_bytes=size + work.rows * image,
        hash_seconds=work.hash_seconds + work.rows * (_IMAGE_SECONDS + image * _BYTE_SECONDS),
        # Rank 0 lists a folder again, for the manifest.
        listing_seconds=0.0 if data.images is None else 2 * work.rows * _NAME_SECONDS,
        broadcast_bytes=work.rows * DIGEST,
    )


def _gathered_bytes(run: Setup, say: Callable[[str], None]) -> int:
    """Bytes that a process sends to another: what the measures have gathered of the first few rows."""
    setting, every = prepare(run, measures_of(run.config), len(run.samples), say)
    for _ in setting.examples.stream.run(min(_FEW, len(run.samples)), every):
        pass
    return sum(value.nbytes for measure in every for value in measure.state().values())


def _on_device(weights: int, run: Setup) -> int:
    """Bytes that weights take on the device, where not all of them live there. weights: bytes of all."""
    assert run.supply is not None
    kept = weights // run.residence.shard_ranks if run.device.type == "cpu" else 0
    return min(weights, run.supply.budget) + (kept if run.residence.where == "sharded" else 0)


def _moved(supply: Supply, stream: Stream, rows: int) -> int:
    """Bytes of weights that come to the device for a chunk, after the first one."""
    block = stream.load_block(0, rows)
    for _ in range(2):
        before = supply.moved
        stream.computed(per_sample_square_norms, block)
    return supply.moved - before


def plan_of(found: RunPlan, on: Machine) -> PlanResult:
    """The plan of a run as plain values."""
    parameters = [
        ParameterPlan(
            p.name,
            "x".join(map(str, p.shape)) or "scalar",
            p.kinds,
            p.order,
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
