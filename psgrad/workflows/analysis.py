"""`psgrad analyze`: a dataset's samples, ranked by the norm of their gradient."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import torch

from psgrad.config import Config
from psgrad.engine.gradients.streaming import Columns, Stream
from psgrad.engine.measures.norms import GradientNorms
from psgrad.engine.measures.predictions import Predictions
from psgrad.inputs.samples import Samples
from psgrad.reports.write import write_report
from psgrad.results import PARAMETER_COLUMNS, AnalyzeResult, Progress, TopSample, rank_samples, top_samples
from psgrad.storage import RunFolder
from psgrad.workflows.record import Clock, describe_run, recorded
from psgrad.workflows.setup import CheckedReader, set_up
from psgrad.workflows.shown_inputs import input_of

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
        run = set_up(config)
        samples = run.samples
        stream = run.stream(lambda message: progress(Progress(0, len(samples), "samples", message)))
    with clock("self-check"):
        check = run.self_check(stream)
    folder = RunFolder.create(config.output, overwrite)
    facts = describe_run("analyze", run, check)
    with recorded(folder, facts, clock):
        norms = GradientNorms()
        with clock("gradients"):
            rows = collect(stream, run.reader, [norms, Predictions()], folder, progress)
        with clock("tables"):
            frame = rank_samples(rows, config.analyze.review_fraction)
            parameters = parameter_table(norms, run.objective.params)
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
    found = [input_of(samples, int(row)) for row in top_samples(frame, count)["index"]]
    return found if any(sample.image is not None or sample.text is not None for sample in found) else []
