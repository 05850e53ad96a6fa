"""Each command's whole way, on one screen: from a config to a run folder. The command line and the Python API both call these."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.metadata import version
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import nn

from psgrad.config import Config
from psgrad.engine.gradients.planning import machines
from psgrad.engine.gradients.planning.calibration import measure
from psgrad.engine.gradients.planning.costs import Machine
from psgrad.engine.gradients.planning.forecast import Forecast, forecast
from psgrad.engine.gradients.streaming import Columns, Stream
from psgrad.engine.measures.norms import GradientNorms
from psgrad.engine.measures.predictions import Predictions, summary_for
from psgrad.engine.objective import Objective
from psgrad.engine.verify import SelfCheck, self_check
from psgrad.errors import ConfigError
from psgrad.inputs.data import load_data
from psgrad.inputs.imports import module_of
from psgrad.inputs.losses import Criterion, check_targets, resolve_loss
from psgrad.inputs.models import LoadedModel, load_model
from psgrad.inputs.samples import Block, Samples
from psgrad.reports.write import write_report
from psgrad.results import (
    PARAMETER_COLUMNS,
    AnalyzeResult,
    ParameterPlan,
    PlanResult,
    Progress,
    TopSample,
    rank_samples,
    top_samples,
)
from psgrad.storage import RunFolder

# Finished rows are made durable this often: what a crash or a full disk can cost.
_ROWS_PER_SHARD = 4096
_SECONDS_PER_SHARD = 30.0
_PICTURES = 40

Say = Callable[[Progress], None]


def analyze(config: Config, *, overwrite: bool = False, progress: Say = lambda _: None) -> AnalyzeResult:
    """Rank the samples of a dataset by the norm of their gradient: the whole of `psgrad analyze`.

    Raises PsgradError for everything that can be wrong with the config, the model, the data or the disk. What is finished by
    then stays in the run folder.
    """
    RunFolder.require_free(config.output, overwrite)
    clock = Clock()
    with clock("load"):
        device = pick_device(config.engine.device)
        use_machine(config, device)
        dtype, autocast = pick_precision(config.engine.dtype)
        loaded = load_model(config.model, config.base)
        criterion = resolve_loss(config.loss, config.base)
        samples = load_data(config.data, config.base)
        model = loaded.model.to(device, dtype)
        summary = summary_for(criterion.kind, criterion.ignore_index)
        objective = Objective(model, criterion.function, summary, autocast=autocast)
        first_output = partial(output_of_first_row, model, samples, device, dtype)
        reader = CheckedReader(samples, criterion, class_count(first_output, criterion))
        stream = Stream(
            objective.loss,
            objective.params,
            reader,
            chunk_size=config.engine.chunk_size,
            memory=None if config.engine.memory == "auto" else config.engine.memory,
            randomness="different" if model.training else "error",
            capture=config.engine.capture,
            compile=config.engine.compile,
            say=lambda message: progress(Progress(0, len(samples), "samples", message)),
        )
    with clock("self-check"):
        check = None if draws_at_random(first_output, model, device) else self_check(objective, stream, len(samples), config.engine.verify)
    folder = RunFolder.create(config.output, overwrite)
    facts = describe_run(config, loaded, criterion, samples, device, check)
    with recorded(folder, facts, clock):
        norms = GradientNorms()
        with clock("gradients"):
            rows = collect(stream, reader, [norms, Predictions()], folder, progress)
        with clock("tables"):
            frame = rank_samples(rows, config.analyze.review_fraction)
            parameters = parameter_table(norms, objective.params)
            folder.finish_samples(frame)
            folder.write_table("parameters.parquet", parameters)
        facts["engine"] |= {"chunk_size": stream.chunk_size, "out_of_memory_retries": stream.retries, **stream.replayed}
        facts["engine"]["materialised"] = norms.unfactored
        if norms.unfactored:
            progress(Progress(len(samples), len(samples), "samples", unfactored_words(norms.unfactored)))
        facts["counts"] = {"samples": len(frame), "nonfinite": int((frame["status"] != "ok").sum())}
        facts["timings"] = clock.seconds
        inputs = top_inputs(samples, frame, max(_PICTURES, config.analyze.top)) if config.report.include_inputs else []
        result = AnalyzeResult(frame, parameters, facts, folder.path, inputs, config.data.class_names)
        with clock("report"):
            write_report(result, folder.write_bytes)
    return result


def plan(config: Config, *, say: Callable[[str], None] = lambda _: None) -> PlanResult:
    """What `analyze` would do with the config, and what it would take: the whole of `psgrad plan`.

    Runs the first few rows, and no more. On a machine that was never measured, it is measured first, which takes seconds, and kept.
    Raises PsgradError as `analyze` does.
    """
    device = pick_device(config.engine.device)
    use_machine(config, device)
    dtype, autocast = pick_precision(config.engine.dtype)
    loaded = load_model(config.model, config.base)
    criterion = resolve_loss(config.loss, config.base)
    samples = load_data(config.data, config.base)
    model = loaded.model.to(device, dtype)
    if not machines.is_known(device):
        say(f"measuring {machines.device_name(device)}, once")
        if machines.keep(measure(device), device) is None:
            say("what was measured could not be kept, and will be measured again next time")
    objective = Objective(model, criterion.function, summary_for(criterion.kind, criterion.ignore_index), autocast=autocast)
    first_output = partial(output_of_first_row, model, samples, device, dtype)
    stream = Stream(
        objective.loss,
        objective.params,
        CheckedReader(samples, criterion, class_count(first_output, criterion)),
        chunk_size=config.engine.chunk_size,
        memory=None if config.engine.memory == "auto" else config.engine.memory,
        randomness="different" if model.training else "error",
        capture=config.engine.capture,
        compile=config.engine.compile,
        say=say,
    )
    return plan_of(forecast(stream, len(samples)), machines.machine(device))


# -- the steps ------------------------------------------------------------------------------------------------------------------------


def pick_device(name: str) -> torch.device:
    """The device of a config; 'auto' is a GPU where there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(
            f"engine.device: {name!r} can't be used: {str(error).splitlines()[0]}",
            expected="auto, cpu, cuda or cuda:N",
            next_step="set engine.device: auto, or install a PyTorch build for this device",
        ) from error
    return device


def use_machine(config: Config, device: torch.device) -> None:
    """Have the machine's constants that the config names in force, if it names any. Raises ConfigError where they can't be used."""
    machines.use(None if config.engine.machine is None else config.base / config.engine.machine)
    machines.machine(device)


def plan_of(found: Forecast, on: Machine) -> PlanResult:
    """The forecast as a plain record."""
    parameters = [
        ParameterPlan(p.name, "x".join(map(str, p.shape)) or "scalar", p.kinds, p.way, 1e6 * p.seconds, p.bytes, p.factored)
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


def pick_precision(name: str) -> tuple[torch.dtype, torch.dtype | None]:
    """(the type of parameters and inputs, the type that autocast computes in) of a config's dtype; None without autocast.

    A checkpoint in bfloat16 is loaded as float32 just the same, which holds each of its numbers exactly.
    """
    kind: torch.dtype = getattr(torch, name)
    return (torch.float32, kind) if kind == torch.bfloat16 else (kind, None)


def output_of_first_row(model: nn.Module, samples: Samples, device: torch.device, dtype: torch.dtype) -> Any:
    """What the model says to the first row as a batch of one, without psgrad's transforms."""
    inputs = samples.read(0, 1).inputs
    with torch.no_grad():
        return model(*[x.to(device, dtype if x.is_floating_point() else None) for x in inputs])


class CheckedReader:
    """Reads blocks whose targets fit the loss. Where all targets are at hand they are checked at once, before any work.

    `targets` are those of one number per row, for the table: [n], None where there are none. For a dataset that yields its targets
    with its rows only, they are noted as the rows pass by.
    """

    def __init__(self, samples: Samples, criterion: Criterion, classes: int | None) -> None:
        self.samples, self.criterion, self.classes = samples, criterion, classes
        self.targets = samples.targets
        self._known = samples.targets is not None
        if samples.targets is not None:
            check_targets(criterion, torch.as_tensor(samples.targets), classes)

    def __call__(self, start: int, stop: int) -> Block:
        block = self.samples.read(start, stop)
        if not self._known:
            check_targets(self.criterion, block.target, self.classes, first_row=start)
            if block.target is not None and block.target.dim() == 1:
                self._note(start, stop, block.target.numpy())
        return block

    def _note(self, start: int, stop: int, target: np.ndarray[Any, Any]) -> None:
        if self.targets is None:
            self.targets = np.zeros(len(self.samples), target.dtype)
        self.targets[start:stop] = target


def class_count(first_output: Callable[[], Any], criterion: Criterion) -> int | None:
    """The size of the output's class axis, from one sample; None where the loss knows no classes, or the model fails (told later)."""
    if criterion.kind not in ("class", "token"):
        return None
    try:
        output = first_output()
    except Exception:
        return None
    if not isinstance(output, torch.Tensor) or output.dim() < 2:
        return None
    return int(output.shape[-1 if criterion.kind == "token" else 1])


def draws_at_random(first_output: Callable[[], Any], model: nn.Module, device: torch.device) -> bool:
    """Whether the model draws random numbers: then a plain gradient is no witness, as it draws anew."""
    if not model.training:
        return False  # psgrad's own pass refuses random operators there
    before = random_state(device)
    try:
        first_output()
    except Exception:
        return False
    return not torch.equal(before, random_state(device))


def random_state(device: torch.device) -> torch.Tensor:
    """The state of the generator that operators on this device draw from."""
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def collect(stream: Stream, reader: CheckedReader, measures: list[Any], folder: RunFolder, progress: Say) -> pd.DataFrame:
    """One row a sample, in dataset order; finished rows go to the run folder as shards on the way."""
    samples = reader.samples
    done: list[pd.DataFrame] = []
    waiting: list[pd.DataFrame] = []
    last = time.monotonic()

    def keep() -> None:
        if waiting:
            done.append(pd.concat(waiting, ignore_index=True))
            folder.append_rows(done[-1])
            waiting.clear()

    progress(Progress(0, len(samples), "samples"))
    try:
        for columns in stream.run(len(samples), measures):
            waiting.append(rows_of(columns, samples.ids, reader.targets))
            progress(Progress(columns.stop, len(samples), "samples"))
            if sum(map(len, waiting)) >= _ROWS_PER_SHARD or time.monotonic() - last > _SECONDS_PER_SHARD:
                keep()
                last = time.monotonic()
    finally:
        keep()  # after an interrupt too: what is computed is not thrown away
    return pd.concat(done, ignore_index=True)


def rows_of(columns: Columns, ids: np.ndarray[Any, Any], targets: np.ndarray[Any, Any] | None) -> pd.DataFrame:
    """The rows of one chunk: who they are, and what the measures said of them."""
    rows = slice(columns.start, columns.stop)
    target = {} if targets is None else {"target": targets[rows]}
    values = {name: column.numpy() for name, column in columns.values.items()}
    return pd.DataFrame({"id": ids[rows], "index": np.arange(columns.start, columns.stop), **target, **values})


def unfactored_words(names: list[str]) -> str:
    """Which parameters' gradients could not be kept as factors, for people."""
    shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    return f"written out sample by sample, which takes more time and memory: the gradients of {shown}"


def parameter_table(norms: GradientNorms, params: dict[str, torch.Tensor]) -> pd.DataFrame:
    """One row a parameter: the distribution of the samples' gradient norms in it, and its share of the mean squared norm."""
    total = sum(d.mean_square for d in norms.parameters.values())
    rows = [
        {
            "parameter": name,
            "module": name.rpartition(".")[0],
            "shape": "x".join(map(str, params[name].shape)) or "scalar",
            "numel": params[name].numel(),
            "mean_norm": d.mean if d.count else np.nan,
            "std_norm": d.std,
            "min_norm": d.minimum if d.count else np.nan,
            "q05": d.quantile(0.05),
            "median": d.quantile(0.5),
            "q95": d.quantile(0.95),
            "max_norm": d.maximum if d.count else np.nan,
            "share": d.mean_square / total if total else np.nan,
            "computed_as": norms.computed_as[name],
        }
        for name, d in norms.parameters.items()
    ]
    return pd.DataFrame(rows, columns=list(PARAMETER_COLUMNS))


def top_inputs(samples: Samples, frame: pd.DataFrame, count: int) -> list[TopSample]:
    """The inputs of the samples with the largest norms, as far as a person can look at them."""
    found = []
    for row, sample_id in top_samples(frame, count)[["index", "id"]].itertuples(index=False):
        text = samples.describe(int(row))
        image = as_image(samples.read(int(row), int(row) + 1).inputs) if text is None else None
        found.append(TopSample(sample_id, image, text))
    return found if any(sample.image is not None or sample.text is not None for sample in found) else []


def as_image(inputs: tuple[torch.Tensor, ...]) -> np.ndarray[Any, Any] | None:
    """The first input as [H, W] or [C, H, W], if that is its shape: one, three or four channels, or none."""
    image = inputs[0][0]
    if image.is_floating_point() and (image.dim() == 2 or (image.dim() == 3 and image.shape[0] in (1, 3, 4))) and min(image.shape[-2:]) > 1:
        array: np.ndarray[Any, Any] = image.numpy()
        return array
    return None


# -- the record -----------------------------------------------------------------------------------------------------------------------


class Clock:
    """Seconds spent in each phase."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[phase] = round(time.perf_counter() - start, 3)


def describe_run(
    config: Config, loaded: LoadedModel, criterion: Criterion, samples: Samples, device: torch.device, check: SelfCheck | None
) -> dict[str, Any]:
    """What manifest.json says of a run before it starts."""
    parameters = list(loaded.model.parameters())
    return {
        "version": 1,
        "command": "analyze",
        "config": config.model_dump(mode="json"),
        "versions": {"psgrad": version("psgrad"), "torch": torch.__version__, "python": platform.python_version()},
        "model": {
            "factory": config.model.factory,
            "parameters": sum(p.numel() for p in parameters),
            "trainable": sum(p.numel() for p in parameters if p.requires_grad),
            "checkpoint": config.model.checkpoint,
            "sha256": loaded.sha256,
            "notes": loaded.notes,
            "modules_imported": [
                *loaded.modules_imported,
                *criterion.modules_imported,
                *([module_of(config.data.factory)] if config.data.factory else []),
            ],
        },
        "data": {"source": config.data.path or config.data.factory, "fingerprint": samples.fingerprint},
        "engine": {
            "device": str(device) if device.type == "cpu" else f"{device} ({torch.cuda.get_device_name(device)})",
            "dtype": config.engine.dtype,
            "threads": torch.get_num_threads(),
        },
        "self_check": {"samples": 0, "reason": "the model draws at random in train mode"}
        if check is None
        else {"samples": len(check.rows), "rows": check.rows, "worst_relative_error": check.worst}
        | ({"worst_error_of_autocast": check.worst_rounding} if check.rounding else {}),
        "contains_private_statistics": True,
    }


@contextmanager
def recorded(folder: RunFolder, facts: dict[str, Any], clock: Clock) -> Iterator[None]:
    """Keeps manifest.json true to what has happened: running, finished, failed or interrupted."""
    folder.write_manifest({**facts, "state": "running"})
    try:
        yield
    except BaseException as error:
        state = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
        try:
            counts = {"finished_samples": folder.rows}
            folder.write_manifest({**facts, "state": state, "error": str(error), "counts": counts, "timings": clock.seconds})
        except Exception:
            pass  # the disk may be full, and what has gone wrong first is what the user must hear
        raise
    folder.write_manifest({**facts, "state": "finished", "timings": clock.seconds})
