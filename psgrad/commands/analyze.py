"""`psgrad analyze`: a dataset's samples, each measured by its own gradient, ranked and judged."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from psgrad.commands.analyze_passes import Measured, Passes
from psgrad.commands.analyze_tables import (
    about_rows,
    content_of_made,
    engine_facts,
    parameter_table,
    result_of,
    top_inputs,
)
from psgrad.commands.analyze_verdict import Judging
from psgrad.commands.check import GateFiles, check_samples, gate_files
from psgrad.commands.class_names import label_facts_of
from psgrad.commands.completion import completed_for_analyze
from psgrad.commands.measure_setup import measures_of, prepare, require_mergeable
from psgrad.commands.run_identity import (
    NAMES,
    NUMBER_OF_PARTS,
    identity,
    measure_specs,
    reopen,
    require_judged_alike,
    require_same_on_ranks,
)
from psgrad.commands.run_manifest import describe_run, running_manifest
from psgrad.commands.setup import Setup, set_up
from psgrad.config import Config
from psgrad.data.previews import vocabulary_of
from psgrad.engine.execution.ranks import OneProcess, Processes, spread_rows
from psgrad.engine.measures.builtin.norms import GradientNorms
from psgrad.engine.measures.measure import Measure, Setting
from psgrad.errors import ConfigError, DistributedError
from psgrad.quality.gates import share_of
from psgrad.quality.judging import Judged
from psgrad.quality.references import Reference
from psgrad.run import RunFolder
from psgrad.run.finished import load_run
from psgrad.run.folders import SHARDS
from psgrad.run.identity import digest
from psgrad.run.input_files import require_unchanged
from psgrad.run.progress import LOADING, Clock, read_ahead
from psgrad.run.results import AnalyzeResult, Progress, Say
from psgrad.run.results.manifest import Counts, EngineFacts, RunManifest
from psgrad.user_code import with_code_beside
from psgrad.wording import listed_names

_PICTURES = 40
_COMPARED_ROWS = 16  # rows that code makes, before the first is computed
_UNREADABLE_SHOWN = 10  # rows that can not be read
_BEGUN = "the run in the folder"  # its hash, empty where it is finished, from the first process to the others


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
    processes: Processes | None = None,
) -> AnalyzeResult | None:
    """Measure the samples of a dataset by their gradients: the whole of `psgrad analyze`.

    Args:
        overwrite: replace an earlier run in the output folder.
        resume: continue the run in the output folder, where there is one.
        limit: how many rows are measured, from the first one on: a number of them, or a fraction between 0
            and 1; None for all.
        sample: whether these rows are drawn at random instead, by analyze.seed.
        report: write report.html and plots/.
        processes: those that share the rows; None for this one alone.

    Returns None on all ranks but the first, which alone judges and writes.

    Raises PsgradError for everything that can be wrong with the config, the model, the data or the disk. What
    is finished by then stays in the run folder.
    """
    processes = OneProcess() if processes is None else processes
    if not resume and processes.leads:
        RunFolder.require_free(config.output, overwrite)
    clock = Clock()
    progress(LOADING)
    with clock("load"):
        gate = gate_files(config.gate, config.base)
        analysis = load_analysis(config, limit, sample, progress, processes)
    if not processes.leads:
        _follow(analysis, progress, processes)
        return None
    now = analysis.identity(processes.parts)
    folder = reopen(config.output, now, analysis.run) if resume else None
    if folder is not None and folder.finished:
        processes.texts(_BEGUN, "")
        return _judged_before(config, folder, gate)
    with clock("self-check"):
        manifest = analysis.manifest(now)
    folder = folder or new_folder(config.output, analysis.run, overwrite or resume)
    with running_manifest(folder, manifest, clock) as running:
        with clock("gradients"):
            processes.texts(_BEGUN, str(running.manifest.run))
            measured, reference = analysis.measure(folder, progress, processes)
            assert measured is not None, "the process that leads has what all have measured"
            require_unchanged(analysis.run.samples.stamps)
        with clock("tables"):
            judged = analysis.judging.judge(measured, reference)
            result = analysis.result(measured, judged, folder)
            folder.finish_samples(result.samples)
            folder.write_table("parameters.parquet", result.parameters)
            folder.write_measures(result.measures)
        analysis.say_what_to_know(progress)
        said = analysis.facts(measured, judged, running.manifest.engine, processes)
        facts = running.add(**said, timings=clock.seconds)
        verdict = check_samples(result.samples, facts, folder, gate)
        result = replace(result, manifest=facts, check=verdict)
        with clock("report"):
            folder.write_inputs(result.top_inputs, result.vocabulary, result.special_tokens)
            if report:
                from psgrad.reports.analyze_page import write_report  # which is all that needs matplotlib

                write_report(result, folder.write_bytes)
    folder.drop_shards()
    return result


@dataclass(frozen=True)
class Analysis:
    """What a run measures, and how: its model, data and measures, loaded.

    setting, every: of the measures. in_dataset: rows of the whole dataset. limit, sample: as for `analyze`.
    """

    run: Setup
    setting: Setting
    every: list[Measure]
    judging: Judging
    in_dataset: int
    limit: int | float | None
    sample: bool

    @property
    def norms(self) -> GradientNorms:
        return next(each for each in self.every if isinstance(each, GradientNorms))

    def identity(self, parts: int | None = None, *, all_rows: bool = True) -> dict[str, Any]:
        """All that the numbers of the run depend on. parts: of how many the run is made. all_rows: see
        psgrad.commands.run_identity.
        """
        drawn = {"rows are drawn at random": True} if self.sample else {}
        in_parts = {NUMBER_OF_PARTS: parts} if parts is not None else {}
        rows = identity(self.run, len(self.setting), all_rows=all_rows)
        return rows | self.judging.identity(all_rows) | drawn | in_parts

    def require_same_on(self, processes: Processes) -> None:
        """Raises DistributedError where a process has loaded something else than the first one, by all that
        is known without reading rows, and some of the rows that code makes.
        """
        content = content_of_made(self.run.samples)
        rows = spread_rows(len(self.setting), _COMPARED_ROWS)
        some = {} if content is None else {f"data (a sample of {len(rows)} rows)": content(rows)}
        require_same_on_ranks("run", self.identity(all_rows=False) | some, processes)

    def manifest(self, now: dict[str, Any]) -> RunManifest:
        """manifest.json at the beginning, with the self-check, which runs now. now: the run's identity.

        Raises SelfCheckError.
        """
        config, check = self.run.config, self.run.self_check(self.setting.examples.stream)
        seed = config.analyze.seed if self.sample else None
        about = describe_run("analyze", self.run, check, measure_specs(config))
        return replace(about, identity=now, run=digest(now), limit=self.limit, sampled_by=seed)

    def measure(
        self, folder: RunFolder, progress: Say, processes: Processes
    ) -> tuple[Measured | None, Reference | None]:
        """(what was measured, the trusted samples with their scores); None for a process that does not lead,
        and of a part of a run.
        """
        about, content = about_rows(self.run), content_of_made(self.run.samples)
        begun_as = str(folder.manifest().get("run"))
        passes = Passes(
            self.setting, self.every, about, folder, progress, processes, begun_as, content=content
        )
        measured = passes.run()
        if processes.parts is not None and not processes.leads:
            return None, None
        # The reference of a run in parts is measured where they are merged.
        by = OneProcess() if processes.parts is not None else processes
        return measured, self.judging.reference(folder, progress, by, begun_as)

    def result(self, measured: Measured, judged: Judged, folder: RunFolder) -> AnalyzeResult:
        """The result without its manifest and the verdict of the gate."""
        run, config, frame = self.run, self.run.config, judged.frame
        measures = {
            each.name: result_of(each, measured.gathered[each.name], run.criterion.unit)
            for each in self.every
            if each.name
        }
        shows = config.report.include_inputs
        count = max(_PICTURES, config.analyze.top)
        words = vocabulary_of(run.samples, measures.values()) if shows else {}
        return AnalyzeResult(
            frame,
            parameter_table(self.norms, run.objective.params),
            {},
            folder.path,
            top_inputs(run.samples, frame, count, measures) if shows else [],
            config.data.class_names,
            measures,
            vocabulary=words,
            special_tokens=run.samples.special_tokens() if words else frozenset[int](),
        )

    def facts(
        self, measured: Measured, judged: Judged, engine: EngineFacts, processes: Processes
    ) -> dict[str, Any]:
        """What the manifest says of the finished passes, by the names of its parts. engine: what it said of
        the engine before them.
        """
        run, frame = self.run, judged.frame
        stream, size = self.setting.examples.stream, processes.parts or processes.size
        return {
            "outliers": judged.facts,
            "labels": label_facts_of(run.criterion, frame, run.config.data.class_names),
            "engine": engine_facts(engine, stream, self.norms, size),
            "counts": Counts(len(frame), int((frame["status"] == "nonfinite").sum()), self.in_dataset),
            "ranks": measured.ranks,
        }

    def say_what_to_know(self, progress: Say) -> None:
        """Name rows that could not be read, and parameters whose gradients take more time and memory."""
        for row, reason in sorted(self.run.reader.unreadable.items())[:_UNREADABLE_SHOWN]:
            progress(Progress(0, 0, "samples", f"row {row} is not finite: {reason}"))
        if self.norms.unfactored:
            message = (
                "materialised sample by sample, which takes more time and memory: the gradients of"
                f" {listed_names(self.norms.unfactored)}"
            )
            progress(Progress(0, 0, "samples", message))


def load_analysis(
    config: Config, limit: int | float | None, sample: bool, progress: Say, processes: Processes
) -> Analysis:
    """Load what a config names. Raises PsgradError for everything that can be wrong with it.

    The process that leads, or is alone, reads all rows that code makes now, and keeps them.
    """
    config = completed_for_analyze(config if sample else _streamed_to(config, limit))
    measures = measures_of(config)
    run = set_up(config, config.output / SHARDS, processes)
    in_dataset, count = len(run.samples), limited(len(run.samples), limit)
    if sample:
        if limit is None:
            raise ConfigError(
                "--sample was given without --limit",
                expected="both: how many rows are drawn, such as --limit 0.1 --sample",
            )
        read_ahead(run.samples, 0, progress)  # ids, where rows hold them
        run = run.with_drawn_rows(count, config.analyze.seed)
    if processes.leads:
        read_ahead(run.samples, count, progress)
    run = run.with_rows_described()
    setting, every = prepare(
        run, measures, count, lambda message: progress(Progress(0, 0, "samples", message))
    )
    judging = Judging(run, measures)
    if processes.leads:
        judging.read_ahead(progress)
    analysis = Analysis(run, setting, every, judging, in_dataset, limit, sample)
    if processes.size > 1:
        require_mergeable(every)
        analysis.require_same_on(processes)
    return analysis


def new_folder(output: Path, run: Setup, overwrite: bool) -> RunFolder:
    """The folder of a run that begins."""
    folder = RunFolder.create(output, overwrite)
    folder.write_json(NAMES, run.identity.names)
    return folder


def _follow(analysis: Analysis, progress: Say, processes: Processes) -> None:
    """The part of a process that does not lead: its share of the passes, in the folder that the first process
    has made. Raises DistributedError where it does not see that folder.
    """
    begun_as = processes.texts(_BEGUN, "")[0]
    if not begun_as:  # the run in the folder is finished
        return
    folder = RunFolder(analysis.run.config.output)
    if folder.manifest().get("run") != begun_as:
        raise DistributedError(
            f"rank {processes.rank} does not see the run folder {folder.path} that rank 0 has made",
            expected="an output folder on storage that all machines share",
            next_step="choose such an --output; or run --part K/N on each machine, and collect the parts",
        )
    analysis.measure(folder, progress, processes)


def _judged_before(config: Config, folder: RunFolder, gate: GateFiles) -> AnalyzeResult:
    """The run that is finished in a folder, with the verdict of the gate as it is now. Raises ConfigError
    where samples were judged otherwise than this config says.
    """
    folder.drop_shards()  # if the run was killed just before
    found = load_run(folder.path)
    require_judged_alike(folder.path, found.manifest, config)
    asked = config.model_dump(mode="json")["gate"]
    if found.manifest.setting("gate") != asked:  # psgrad check reads it there
        manifest = replace(found.manifest, config={**found.manifest.config, "gate": asked})
        found = replace(found, manifest=manifest)
        folder.write_manifest(manifest.content())
    return replace(found, check=check_samples(found.samples, found.manifest, folder, gate))


def limited(count: int, limit: int | float | None) -> int:
    """How many rows are analysed. Raises ConfigError for a limit that is neither a number of rows nor a
    fraction of them.
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
