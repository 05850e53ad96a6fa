"""`psgrad analyze`: a dataset's samples, each measured by its own gradient, ranked and judged."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pandas as pd
import torch

from psgrad.config import Config
from psgrad.engine.execution.streaming import Stream
from psgrad.engine.measures.measure import Gathered, Measure
from psgrad.engine.measures.norms import GradientNorms
from psgrad.errors import ConfigError
from psgrad.inputs.rows import Samples
from psgrad.inputs.shown import input_of, vocabulary_of
from psgrad.inputs.sources.files import Stamp, require_unchanged
from psgrad.inputs.sources.source import files_read_again
from psgrad.quality.gates import share_of
from psgrad.reports.analyze_page import write_report
from psgrad.results import (
    PARAMETER_COLUMNS,
    AnalyzeResult,
    MeasureResult,
    Progress,
    Say,
    TopSample,
    top_samples,
)
from psgrad.results.manifest import Counts, EngineFacts
from psgrad.storage import RunFolder
from psgrad.storage.finished import load_run
from psgrad.storage.folders import SHARDS
from psgrad.user_code import with_code_beside
from psgrad.wording import listed_names
from psgrad.workflows.check import GateFiles, check_samples, gate_files
from psgrad.workflows.identity import NAMES, identity, measure_specs, names_of, reopen, require_judged_alike
from psgrad.workflows.judging import Judging
from psgrad.workflows.measures import frame_of, measures_of, prepare
from psgrad.workflows.measuring import Passes, about_rows
from psgrad.workflows.running import LOADING, Clock, describe_run, read_ahead, recorded
from psgrad.workflows.setup import set_up

_PICTURES = 40
_TOLD = 10  # rows that can not be read


@with_code_beside
def analyze(
    config: Config,
    *,
    overwrite: bool = False,
    resume: bool = False,
    limit: int | float | None = None,
    sample: bool = False,
    report: bool = True,
    progress: Say = lambda _: None,
) -> AnalyzeResult:
    """Measure the samples of a dataset by their gradients: the whole of `psgrad analyze`.

    Args:
        overwrite: replace an earlier run in the output folder.
        resume: continue the run in the output folder, where there is one.
        limit: how many rows are measured, from the first one on: a number of them, or a fraction between 0
            and 1; None for all.
        sample: whether these rows are drawn at random instead, by analyze.seed.
        report: write report.html and plots/.

    Raises PsgradError for everything that can be wrong with the config, the model, the data or the disk. What
    is finished by then stays in the run folder.
    """
    if not resume:
        RunFolder.require_free(config.output, overwrite)
    clock = Clock()
    config = config if sample else _streamed_to(config, limit)
    progress(LOADING)
    with clock("load"):
        measures = measures_of(config)
        gate = gate_files(config.gate, config.base)
        run = set_up(config, config.output / SHARDS)
        in_dataset, count = len(run.samples), limited(len(run.samples), limit)
        if sample:
            require_limit(limit)
            read_ahead(run.samples, 0, progress)  # ids, where rows hold them
            run = run.with_drawn_rows(count, config.analyze.seed)
        stamps = [Stamp.of(file) for file in files_read_again(config.data, config.base)]
        read_ahead(run.samples, count, progress)
        run = run.with_rows_described()
        setting, every = prepare(
            run, measures, count, lambda message: progress(Progress(0, 0, "samples", message))
        )
        stream = setting.examples.stream
        judging = Judging(run, measures)
        judging.read_ahead(progress)
    now = identity(run, count) | judging.identity() | ({"rows are drawn at random": True} if sample else {})
    folder = reopen(config.output, now, run) if resume else None
    if folder is not None and folder.finished:
        folder.drop_shards()  # if it was killed just before
        return judged_before(config, folder, gate)
    with clock("self-check"):
        check = run.self_check(stream)
    if folder is None:
        folder = RunFolder.create(config.output, overwrite or resume)
        folder.write_json(NAMES, names_of(run))
    manifest = describe_run("analyze", run, check, measure_specs(config))
    seed = config.analyze.seed if sample else None
    with recorded(folder, replace(manifest, identity=now, limit=limit, sampled_by=seed), clock) as record:
        with clock("gradients"):
            measured = Passes(setting, stream, every, about_rows(run), folder, progress).run()
            reference = judging.reference(folder, progress)
            require_unchanged(stamps)
        with clock("tables"):
            judged = judging.judge(measured, reference)
            frame = judged.frame
            norms = next(each for each in every if isinstance(each, GradientNorms))
            parameters = parameter_table(norms, run.objective.params)
            results = {
                each.name: result_of(each, measured.gathered[each.name], run.criterion.unit)
                for each in every
                if each.name
            }
            folder.finish_samples(frame)
            folder.write_table("parameters.parquet", parameters)
            folder.write_measures(results)
        for row, reason in sorted(run.reader.unreadable.items())[:_TOLD]:
            progress(Progress(0, 0, "samples", f"row {row} is not finite: {reason}"))
        if norms.unfactored:
            progress(Progress(0, 0, "samples", unfactored_words(norms.unfactored)))
        shows = config.report.include_inputs
        inputs = top_inputs(run.samples, frame, max(_PICTURES, config.analyze.top), results) if shows else []
        words = vocabulary_of(run.samples, results.values()) if shows else {}
        facts = record.add(
            outliers=judged.facts,
            engine=engine_facts(manifest.engine, stream, norms),
            counts=counts_of(frame, in_dataset),
            timings=clock.seconds,
        )
        verdict = check_samples(frame, facts, folder, gate)
        names = run.config.data.class_names
        result = AnalyzeResult(frame, parameters, facts, folder.path, inputs, names, results, verdict, words)
        with clock("report"):
            folder.write_inputs(inputs, words)
            if report:
                write_report(result, folder.write_bytes)
    folder.drop_shards()
    return result


def judged_before(config: Config, folder: RunFolder, gate: GateFiles) -> AnalyzeResult:
    """The run that is finished in a folder, with the verdict of the gate as it is now. Raises ConfigError
    where samples were judged otherwise than this config says.
    """
    found = load_run(folder.path)
    require_judged_alike(folder.path, found.manifest, config)
    asked = config.model_dump(mode="json")["gate"]
    if found.manifest["config"].get("gate") != asked:  # psgrad check reads it there
        found = replace(
            found, manifest={**found.manifest, "config": {**found.manifest["config"], "gate": asked}}
        )
        folder.write_manifest(found.manifest)
    return replace(found, check=check_samples(found.samples, found.manifest, folder, gate))


def engine_facts(before: EngineFacts, stream: Stream, norms: GradientNorms) -> EngineFacts:
    """What manifest.json says of the engine after the passes."""
    return replace(
        before,
        chunk_size=stream.chunk_size,
        out_of_memory_retries=stream.retries,
        **stream.replayed,
        materialised=norms.unfactored,
    )


def counts_of(frame: pd.DataFrame, in_dataset: int) -> Counts:
    """How many samples the table has, and how many of them are not finite."""
    return Counts(len(frame), int((frame["status"] == "nonfinite").sum()), in_dataset)


def limited(count: int, limit: int | float | None) -> int:
    """How many rows are looked at. Raises ConfigError for a limit that is no number of rows, and no fraction
    of them.
    """
    if limit is None:
        return count
    whole = float(limit).is_integer() and limit >= 1
    if not whole and not 0 < limit < 1:
        raise ConfigError(
            f"--limit {limit}",
            expected="a number of samples (at least 1), or a fraction of them between 0 and 1",
        )
    return min(count, int(limit) if whole else max(1, math.floor(share_of(limit, count))))


def _streamed_to(config: Config, limit: int | float | None) -> Config:
    """The config with no more rows of a stream than are measured."""
    if limit is None or not float(limit).is_integer() or limit < 1:
        return config
    rows = min(config.data.stream_rows, int(limit))
    return config.model_copy(update={"data": config.data.model_copy(update={"stream_rows": rows})})


def require_limit(limit: int | float | None) -> None:
    """Raises ConfigError for a sample of all rows."""
    if limit is None:
        raise ConfigError(
            "--sample was given without --limit",
            expected="both: how many rows are drawn, such as --limit 0.1 --sample",
        )


def result_of(measure: Measure, gathered: Gathered, unit: str | None) -> MeasureResult:
    """What a measure gathered, without torch. unit: of the loss; None where it is not known."""
    unit = unit or "loss"
    tables = {name: frame_of(table) for name, table in gathered.tables.items()}
    arrays = {name: array.cpu().numpy() for name, array in gathered.arrays.items()}
    return MeasureResult(
        measure.name,
        measure.title or measure.name,
        measure.formula,
        measure.unit.replace("{loss}", unit),
        measure.source,
        {column: meaning.replace("{loss}", unit) for column, meaning in measure.meanings.items()},
        dict(gathered.numbers),
        tables,
        arrays,
    )


def unfactored_words(names: list[str]) -> str:
    """Which parameters' gradients could not be kept as factors, for people."""
    return (
        "written out sample by sample, which takes more time and memory: the gradients of"
        f" {listed_names(names)}"
    )


def parameter_table(norms: GradientNorms, params: dict[str, torch.Tensor]) -> pd.DataFrame:
    """One row a parameter: the distribution of the samples' gradient norms in it, and its share of the mean
    squared norm.
    """
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


def top_inputs(
    samples: Samples, frame: pd.DataFrame, count: int, measures: Mapping[str, MeasureResult]
) -> list[TopSample]:
    """The inputs of the first ranks, and of what measures kept maps of, as far as a person can look
    at them.
    """
    mapped = [
        row
        for measure in measures.values()
        if "rows" in measure.arrays
        for row in measure.arrays["rows"].tolist()
    ]
    rows = dict.fromkeys([*map(int, top_samples(frame, count)["index"]), *map(int, mapped)])
    found = [input_of(samples, row) for row in rows]
    return (
        found
        if any(sample.image is not None or sample.text is not None or sample.values for sample in found)
        else []
    )
