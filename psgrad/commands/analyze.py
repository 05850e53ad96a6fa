"""`psgrad analyze`: a dataset's samples, each measured by its own gradient, ranked and judged."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy.typing as npt
import pandas as pd

from psgrad.commands.analyze_issues import input_features, label_probabilities
from psgrad.commands.analyze_passes import Measured, Passes
from psgrad.commands.analyze_tables import (
    about_rows,
    content_of_made,
    engine_facts,
    parameter_table,
    result_of,
    top_inputs,
)
from psgrad.commands.analyze_verdict import OutlierRule, outlier_rule
from psgrad.commands.check import GateFiles, check_samples, gate_files
from psgrad.commands.class_names import label_facts_of
from psgrad.commands.completion import completed_for_analyze
from psgrad.commands.measure_setup import measures_of, prepare, require_mergeable
from psgrad.commands.run_manifest import (
    NUMBER_OF_PARTS,
    describe_run,
    identity,
    measure_specs,
    reopen,
    require_judged_alike,
    require_same_on_ranks,
)
from psgrad.commands.setup import Setup, set_up
from psgrad.config import Config
from psgrad.data.previews import vocabulary_of
from psgrad.engine.execution.loading import ChosenRows
from psgrad.engine.execution.ranks import OneProcess, Processes, spread_rows
from psgrad.engine.measures.builtin.norms import GradientNorms
from psgrad.engine.measures.builtin.projected_gradients import COLUMN as PROJECTED
from psgrad.engine.measures.measure import Measure, Setting
from psgrad.errors import ConfigError, DistributedError
from psgrad.quality.gates import share_of
from psgrad.quality.issues import MOST, IssueTable, issue_table
from psgrad.quality.judging import OutlierTable
from psgrad.run import RunFolder
from psgrad.run.finished import ISSUE_SUMMARY, ISSUES, load_run
from psgrad.run.identity import digest
from psgrad.run.input_files import require_unchanged
from psgrad.run.progress import read_ahead
from psgrad.run.results import AnalyzeResult, MeasureResult, ShowProgress, TopSample
from psgrad.run.results.manifest import Counts, RunManifest
from psgrad.run.run import Run
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
    progress: ShowProgress = lambda _: None,
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
    run = Run[Processes].open(config.output, processes, progress, overwrite=overwrite, resume=resume)
    with run.clock("load"):
        gate = gate_files(config.gate, config.base)
        analysis = load_analysis(config, limit, sample, run)
    if not processes.leads:
        _follow(analysis, run)
        return None
    now = analysis.identity(processes.parts)
    earlier = reopen(config.output, now) if resume else None
    if earlier is not None and earlier.finished:
        processes.texts(_BEGUN, "")
        return _judged_before(config, earlier, gate)
    with run.clock("self-check"):
        manifest = analysis.manifest(now)
    with run.begin(manifest, earlier):
        folder = run.folder
        with run.clock("gradients"):
            processes.texts(_BEGUN, str(run.manifest.run))
            measured = analysis.measure(run)
            assert measured is not None, "the process that leads has what all have measured"
            require_unchanged(analysis.setup.samples.stamps)
        with run.clock("tables"):
            judged = analysis.rule.judge(measured)
            parameters, measures = analysis.tables(measured)
            folder.finish_samples(judged.frame)
            folder.write_table("parameters.parquet", parameters)
            folder.write_measures(measures)
            issues = analysis.issues(judged, measured, measures)
            folder.write_table(ISSUES, issues.samples)
            folder.write_table(ISSUE_SUMMARY, issues.summary)
        analysis.say_what_to_know(run)
        facts = run.add(**analysis.facts(measured, judged, run))
        verdict = check_samples(judged.frame, facts, folder, gate)
        inputs, words, special = analysis.shown(judged, measures)
        names = analysis.setup.config.data.class_names
        result = AnalyzeResult(
            judged.frame,
            parameters,
            facts,
            folder.path,
            inputs,
            names,
            measures,
            verdict,
            words,
            special,
            issues.samples,
            issues.summary,
        )
        with run.clock("report"):
            folder.write_inputs(inputs, words, special)
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

    setup: Setup
    setting: Setting
    every: list[Measure]
    rule: OutlierRule
    in_dataset: int
    limit: int | float | None
    sample: bool
    probabilities: npt.NDArray[Any] | None

    @property
    def norms(self) -> GradientNorms:
        return next(each for each in self.every if isinstance(each, GradientNorms))

    def identity(self, parts: int | None = None, *, all_rows: bool = True) -> dict[str, Any]:
        """All that the numbers of the run depend on. parts: of how many the run is made. all_rows: see
        psgrad.commands.run_manifest.
        """
        drawn = {"rows are drawn at random": True} if self.sample else {}
        in_parts = {NUMBER_OF_PARTS: parts} if parts is not None else {}
        return identity(self.setup, len(self.setting), all_rows=all_rows) | drawn | in_parts

    def require_same_on(self, processes: Processes) -> None:
        """Raises DistributedError where a process has loaded something else than the first one, by all that
        is known without reading rows, and some of the rows that code makes.
        """
        content = content_of_made(self.setup.samples)
        rows = spread_rows(len(self.setting), _COMPARED_ROWS)
        some = {} if content is None else {f"data (a sample of {len(rows)} rows)": content(rows)}
        require_same_on_ranks("run", self.identity(all_rows=False) | some, processes)

    def manifest(self, now: dict[str, Any]) -> RunManifest:
        """manifest.json at the beginning, with the self-check, which runs now. now: the run's identity.

        Raises SelfCheckError.
        """
        config, rows = self.setup.config, self.setup.stream(self.setting.say)
        check = self.setup.self_check(rows)
        seed = config.analyze.seed if self.sample else None
        about = describe_run("analyze", self.setup, check, measure_specs(config))
        return replace(about, identity=now, run=digest(now), limit=self.limit, sampled_by=seed)

    def measure(self, run: Run[Processes]) -> Measured | None:
        """What was measured, in a run whose folder is there; None for a process that does not lead."""
        folder = run.folder
        return Passes(
            self.setting,
            self.every,
            about_rows(self.setup),
            folder,
            run.progress,
            run.processes,
            str(folder.manifest().get("run")),
            content_of_made(self.setup.samples),
        ).run()

    def tables(self, measured: Measured) -> tuple[pd.DataFrame, dict[str, MeasureResult]]:
        """(the table of parameters, the results of the measures by name)."""
        measures = {
            each.name: result_of(each, measured.gathered[each.name], self.setup.criterion.unit)
            for each in self.every
            if each.name and each.is_shown
        }
        return parameter_table(self.norms, self.setup.objective.params), measures

    def issues(
        self, judged: OutlierTable, measured: Measured, measures: dict[str, MeasureResult]
    ) -> IssueTable:
        """The issue table; the inputs are read once more where near duplicates are looked for."""
        frame, projected, features = judged.frame, None, None
        if PROJECTED in measured.rows:
            projected = measured.rows[PROJECTED].double().numpy()
            if len(frame) <= MOST:
                features = input_features(ChosenRows(self.setup.reader, range(len(frame))))
        history = measures.get("trajectory")
        losses = None if history is None else history.arrays.get("loss")
        probabilities = None if self.probabilities is None else self.probabilities[: len(frame)]
        return issue_table(frame, projected, features, losses, probabilities)

    def shown(
        self, judged: OutlierTable, measures: dict[str, MeasureResult]
    ) -> tuple[list[TopSample], dict[int, str], frozenset[int]]:
        """(the inputs of the first ranks, the text of each id in maps of attribution, those ids that are part
        of no text); all empty where the config leaves inputs out.
        """
        samples, config = self.setup.samples, self.setup.config
        if not config.report.include_inputs:
            return [], {}, frozenset()
        inputs = top_inputs(samples, judged.frame, max(_PICTURES, config.analyze.top), measures)
        words = vocabulary_of(samples, measures.values())
        return inputs, words, samples.tokenizer.special_tokens if words and samples.tokenizer else frozenset()

    def facts(self, measured: Measured, judged: OutlierTable, run: Run[Processes]) -> dict[str, Any]:
        """What the manifest says of the finished passes, by the names of its parts."""
        setup, frame, size = self.setup, judged.frame, run.processes.parts or run.processes.size
        return {
            "outliers": judged.facts,
            "labels": label_facts_of(setup.criterion, frame, setup.config.data.class_names),
            "engine": engine_facts(run.manifest.engine, self.setting.examples.stream, self.norms, size),
            "counts": Counts(len(frame), int((frame["status"] == "nonfinite").sum()), self.in_dataset),
        }

    def say_what_to_know(self, run: Run[Processes]) -> None:
        """Name rows that could not be read, and parameters whose gradients take more time and memory."""
        for row, reason in sorted(self.setup.reader.unreadable.items())[:_UNREADABLE_SHOWN]:
            run.say(f"row {row} is not finite: {reason}")
        if self.norms.unfactored:
            names = listed_names(self.norms.unfactored)
            run.say(
                f"materialised sample by sample, which takes more time and memory: the gradients of {names}"
            )


def load_analysis(config: Config, limit: int | float | None, sample: bool, run: Run[Processes]) -> Analysis:
    """Load what a config names. Raises PsgradError for everything that can be wrong with it.

    The process that leads, or is alone, reads all rows that code makes now, and keeps them.
    """
    processes, progress = run.processes, run.progress
    config = completed_for_analyze(config)
    measures = measures_of(config)
    setup = set_up(config, processes=processes)
    in_dataset, count = len(setup.samples), limited(len(setup.samples), limit)
    if sample:
        if limit is None:
            raise ConfigError(
                "--sample was given without --limit; expected both: how many rows are drawn, such as"
                " --limit 0.1 --sample",
            )
        read_ahead(setup.samples, 0, progress)  # ids, where rows hold them
        setup = setup.with_drawn_rows(count, config.analyze.seed)
    if processes.leads:
        read_ahead(setup.samples, count, progress)
    setup = setup.with_rows_described()
    setting, every = prepare(setup, measures, count, run.say)
    rule = outlier_rule(setup, measures)
    analysis = Analysis(setup, setting, every, rule, in_dataset, limit, sample, label_probabilities(setup))
    if processes.size > 1:
        require_mergeable(every)
        analysis.require_same_on(processes)
    return analysis


def _follow(analysis: Analysis, run: Run[Processes]) -> None:
    """The part of a process that does not lead: its share of the passes, in the folder that the first process
    has made. Raises DistributedError where it does not see that folder.
    """
    begun_as = run.processes.texts(_BEGUN, "")[0]
    if not begun_as:  # the run in the folder is finished
        return
    if run.folder.manifest().get("run") != begun_as:
        raise DistributedError(
            f"rank {run.processes.rank} does not see the run folder {run.path} that rank 0 has made",
            hint=(
                "choose an --output on storage that all machines share; or run --part K/N on each"
                " machine, and collect the parts"
            ),
        )
    analysis.measure(run)


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
            f"--limit {limit}; expected a number of samples (at least 1), or a fraction of them between 0"
            " and 1",
        )
    return min(count, int(limit) if whole else max(1, math.floor(share_of(limit, count))))
