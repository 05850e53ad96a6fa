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
from psgrad.commands.residence import Ranks
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
from psgrad.commands.run_progress import LOADING, Clock, read_ahead
from psgrad.commands.setup import Setup, set_up
from psgrad.config import Config
from psgrad.data.previews import vocabulary_of
from psgrad.engine.execution.ranks import OneProcess, Processes, spread_rows
from psgrad.engine.execution.streaming import Stream
from psgrad.engine.measures.builtin.norms import GradientNorms
from psgrad.engine.measures.measure import Measure, Setting
from psgrad.errors import ConfigError, DistributedError
from psgrad.quality.gates import share_of
from psgrad.run import RunFolder
from psgrad.run.finished import load_run
from psgrad.run.folders import SHARDS
from psgrad.run.identity import digest
from psgrad.run.input_files import require_unchanged
from psgrad.run.results import (
    AnalyzeResult,
    Progress,
    Say,
)
from psgrad.run.results.manifest import Counts, RunManifest
from psgrad.user_code import with_code_beside
from psgrad.wording import listed_names

_PICTURES = 40
_COMPARED_ROWS = 16  # rows that code makes, before the first is computed
_UNREADABLE_SHOWN = 10  # rows that can not be read
_RUN = "run"  # what processes agree on: the hash by which the run's shards are known


@dataclass(frozen=True)
class Prepared:
    """A run whose model, data and measures are loaded.

    setting, every: of the measures. in_dataset: rows of the whole dataset.
    """

    run: Setup
    setting: Setting
    every: list[Measure]
    judging: Judging
    in_dataset: int
    limit: int | float | None
    sample: bool

    @property
    def stream(self) -> Stream:
        return self.setting.examples.stream

    def identity(self, parts: int | None = None, *, all_rows: bool = True) -> dict[str, Any]:
        """All that the numbers of the run depend on. parts: of how many the run is made. all_rows: see
        psgrad.commands.run_identity.
        """
        drawn = {"rows are drawn at random": True} if self.sample else {}
        in_parts = {NUMBER_OF_PARTS: parts} if parts is not None else {}
        rows = identity(self.run, len(self.setting), all_rows=all_rows)
        return rows | self.judging.identity(all_rows) | drawn | in_parts

    def sample_of_rows(self) -> dict[str, Any]:
        """A hash of some rows as a line of an identity, where code makes them."""
        content = content_of_made(self.run.samples)
        rows = spread_rows(len(self.setting), _COMPARED_ROWS)
        return {} if content is None else {f"data (a sample of {len(rows)} rows)": content(rows)}

    def manifest(self, now: dict[str, Any]) -> RunManifest:
        """manifest.json at the beginning, with the self-check, which runs now. now: the run's identity.

        Raises SelfCheckError.
        """
        config, check = self.run.config, self.run.self_check(self.stream)
        seed = config.analyze.seed if self.sample else None
        about = describe_run("analyze", self.run, check, measure_specs(config))
        return replace(about, identity=now, run=digest(now), limit=self.limit, sampled_by=seed)

    def measure(self, folder: RunFolder, progress: Say, processes: Processes, run: str) -> Measured | None:
        """What was measured; None for a process that does not lead. run: the hash of the run's identity."""
        about, content = about_rows(self.run), content_of_made(self.run.samples)
        return Passes(
            self.setting, self.stream, self.every, about, folder, progress, processes, run, content=content
        ).run()


def prepared(
    config: Config,
    limit: int | float | None,
    sample: bool,
    progress: Say,
    processes: Processes | None = None,
) -> Prepared:
    """Load what a config names. Raises PsgradError for everything that can be wrong with it.

    The process that leads, or is alone, reads all rows that code makes now, and keeps them.
    """
    processes = OneProcess() if processes is None else processes
    config = completed_for_analyze(config if sample else _streamed_to(config, limit))
    measures = measures_of(config)
    run = set_up(config, config.output / SHARDS, Ranks.of(processes))
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
    return Prepared(run, setting, every, judging, in_dataset, limit, sample)


def new_folder(output: Path, run: Setup, overwrite: bool) -> RunFolder:
    """The folder of a run that begins."""
    folder = RunFolder.create(output, overwrite)
    folder.write_json(NAMES, run.identity.names)
    return folder


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
        start = prepared(config, limit, sample, progress, processes)
    run, every, stream = start.run, start.every, start.stream
    if processes.size > 1:
        require_mergeable(every)
        require_same_on_ranks(_RUN, start.identity(all_rows=False) | start.sample_of_rows(), processes)
    if not processes.leads:
        begun_as = bytes(processes.agreed(_RUN, list)).hex()  # the first rank has made the folder by then
        if not begun_as:  # the run in the folder is finished
            return None
        folder = RunFolder(config.output)
        if not folder.manifest():
            raise DistributedError(
                f"rank {processes.rank} does not see the run folder {config.output} that rank 0 has made",
                expected="an output folder on storage that all machines share",
                next_step="choose such an --output; or run --part K/N on each machine, and collect the parts",
            )
        start.measure(folder, progress, processes, begun_as)
        start.judging.reference(folder, progress, processes, begun_as)
        return None
    now = start.identity(processes.parts)
    reopened = reopen(config.output, now, run) if resume else None
    if reopened is not None and reopened.finished:
        reopened.drop_shards()  # if it was killed just before
        processes.agreed(_RUN, list)
        return judged_before(config, reopened, gate)
    with clock("self-check"):
        manifest = start.manifest(now)
    folder = reopened or new_folder(config.output, run, overwrite or resume)
    with running_manifest(folder, manifest, clock) as running:
        with clock("gradients"):
            begun_as = str(running.manifest.run)
            processes.agreed(_RUN, lambda: list(bytes.fromhex(begun_as)))
            measured = start.measure(folder, progress, processes, begun_as)
            assert measured is not None, "the process that leads has what all have measured"
            trusted_by = OneProcess() if processes.parts is not None else processes
            reference = start.judging.reference(folder, progress, trusted_by, begun_as)
            require_unchanged(run.samples.stamps)
        with clock("tables"):
            judged = start.judging.judge(measured, reference)
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
        for row, reason in sorted(run.reader.unreadable.items())[:_UNREADABLE_SHOWN]:
            progress(Progress(0, 0, "samples", f"row {row} is not finite: {reason}"))
        if norms.unfactored:
            message = (
                "materialised sample by sample, which takes more time and memory: the gradients of"
                f" {listed_names(norms.unfactored)}"
            )
            progress(Progress(0, 0, "samples", message))
        shows = config.report.include_inputs
        inputs = top_inputs(run.samples, frame, max(_PICTURES, config.analyze.top), results) if shows else []
        words = vocabulary_of(run.samples, results.values()) if shows else {}
        special = run.samples.special_tokens() if words else frozenset[int]()
        facts = running.add(
            outliers=judged.facts,
            labels=label_facts_of(run.criterion, frame, run.config.data.class_names),
            engine=engine_facts(running.manifest.engine, stream, norms, processes.parts or processes.size),
            counts=Counts(len(frame), int((frame["status"] == "nonfinite").sum()), start.in_dataset),
            ranks=measured.ranks,
            timings=clock.seconds,
        )
        verdict = check_samples(frame, facts, folder, gate)
        names = run.config.data.class_names
        result = AnalyzeResult(
            frame, parameters, facts, folder.path, inputs, names, results, verdict, words, special
        )
        with clock("report"):
            folder.write_inputs(inputs, words, special)
            if report:
                from psgrad.reports.analyze_page import write_report  # which is all that needs matplotlib

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
