"""`psgrad analyze`: a dataset's samples, each measured by its own gradient, ranked and judged."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy.typing as npt
import pandas as pd

from psgrad.commands.analyze_issues import evaluation_data, input_features, label_probabilities, leaks_in
from psgrad.commands.analyze_passes import Measured, Passes
from psgrad.commands.analyze_tables import (
    content_of_made,
    engine_facts,
    parameter_table,
    result_of,
    top_inputs,
)
from psgrad.commands.analyze_verdict import outlier_rule
from psgrad.commands.check import GateFiles, check_samples, gate_files
from psgrad.commands.class_names import label_facts_of
from psgrad.commands.completion import completed_for_analyze
from psgrad.commands.measure_setup import measures_of, prepare, require_mergeable
from psgrad.commands.run_manifest import (
    describe_run,
    folder_of_parts,
    identity,
    issue_table_settings,
    measure_specs,
    reopen,
    require_judged_alike,
    require_same_on_ranks,
)
from psgrad.commands.setup import Setup, set_up
from psgrad.config import Config
from psgrad.data.previews import vocabulary_of
from psgrad.engine.execution.loading import ChosenRows
from psgrad.engine.execution.ranks import OneProcess, Processes, RowPart, spread_rows
from psgrad.engine.measures.builtin.norms import GradientNorms
from psgrad.engine.measures.builtin.projected_gradients import COLUMN as PROJECTED
from psgrad.errors import ConfigError, DistributedError
from psgrad.quality.findings import LEAK_OF
from psgrad.quality.gates import share_of
from psgrad.quality.issues import MOST, IssueTable, Leaks, issue_table
from psgrad.run import RunFolder
from psgrad.run.finished import ISSUE_SUMMARY, ISSUES, load_run
from psgrad.run.identity import digest
from psgrad.run.input_files import require_unchanged
from psgrad.run.progress import read_ahead
from psgrad.run.results import AnalyzeResult, MeasureResult, ShowProgress, TopSample
from psgrad.run.results.manifest import Counts
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
    part: tuple[int, int] | None = None,
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
        part: which part of how many of the rows is measured, for job arrays; `merge` judges all parts. A part
            that is run again goes on where it ended.
        processes: those that share the rows; None for this one alone.

    Returns None for a part, and on all ranks but the first, which alone judges and writes.

    Raises PsgradError for everything that can be wrong with the config, the model, the data or the disk. What
    is finished by then stays in the run folder.
    """
    processes = OneProcess() if processes is None else processes
    goes_on = resume or part is not None
    run = Run[Processes].open(config.output, processes, progress, overwrite=overwrite, resume=goes_on)
    with run.clock("load"):
        gate = gate_files(config.gate, config.base)
        config = completed_for_analyze(config)
        measures = measures_of(config)
        setup = set_up(config, processes=processes)
        in_dataset, count = len(setup.samples), limited(len(setup.samples), limit)
        if sample:
            setup = _drawn(setup, count, limit, progress)
        if processes.leads:  # reads all rows that code makes now, and keeps them
            read_ahead(setup.samples, count, progress)
        setup = setup.with_rows_described()
        setting, every = prepare(setup, measures, count, run.say)
        rule, probabilities = outlier_rule(setup, measures), label_probabilities(setup)
        if config.analyze.folds is not None:
            from psgrad.commands.analyze_folds import require_folds  # which imports all of influence

            require_folds(setup)
        if part is not None:
            size = config.engine.chunk_size
            mine = RowPart.of(*part, count, size if isinstance(size, int) else 1)
            run.say(f"rows {mine.rows.start:,} to {mine.rows.stop - 1:,} of {count:,}")
            run.processes = processes = mine
        if processes.size > 1 or part is not None:
            require_mergeable(every)
        _require_same_rows(setup, count, processes)
        evaluation = evaluation_data(setup) if part is None and processes.leads else None
    passes = Passes(setup, setting, every, run)
    if part is None and not processes.leads:
        _follow(passes, run)
        return None
    now = identity(setup, count, parts=processes.parts)
    earlier = reopen(run.path, now) if resume else None
    if earlier is not None and earlier.finished:
        processes.texts(_BEGUN, "")
        return _judged_before(config, earlier, gate)
    with run.clock("self-check"):
        manifest = replace(
            describe_run("analyze", setup, setup.stream(setting.say), measure_specs(config)),
            identity=now,
            run=digest(now),
            issue_table=issue_table_settings(config) or None,
            limit=limit,
            sampled_by=config.analyze.seed if sample else None,
        )
    if part is not None:
        run.folder = folder_of_parts(run.path, manifest)
        passes.run()
        return None
    with run.begin(manifest, earlier):
        folder = run.folder
        with run.clock("gradients"):
            processes.texts(_BEGUN, str(run.manifest.run))
            measured = passes.run()
            assert measured is not None, "the process that leads has what all have measured"
            require_unchanged(setup.samples.stamps)
        with run.clock("tables"):
            judged = rule.judge(measured)
            rows, leaks, features = ChosenRows(setup.reader, range(count)), None, None
            weighted = setup.samples.weighted
            if evaluation is not None or (PROJECTED in measured.rows and count <= MOST):
                features = input_features(rows, weighted)  # the inputs are read once more
            if evaluation is not None:
                leaks = leaks_in(rows, weighted, features, evaluation, evaluation.ids)
                judged = replace(judged, frame=judged.frame.assign(**{LEAK_OF: leaks.of}))
            norms = next(each for each in every if isinstance(each, GradientNorms))
            parameters = parameter_table(norms, setup.objective.params)
            results = {
                each.name: result_of(each, measured.gathered[each.name], setup.criterion.unit)
                for each in every
                if each.name and each.is_shown
            }
            if config.analyze.folds is not None:
                from psgrad.commands.analyze_folds import fold_probabilities

                probabilities = fold_probabilities(setup, judged.frame, run)
            issues = _issues(judged.frame, measured, results, features, probabilities, leaks)
            folder.finish_samples(judged.frame)
            folder.write_table("parameters.parquet", parameters)
            folder.write_measures(results)
            folder.write_table(ISSUES, issues.samples)
            folder.write_table(ISSUE_SUMMARY, issues.summary)
        _say_what_to_know(setup, norms, run)
        names, size = setup.config.data.class_names, processes.parts or processes.size
        nonfinite = int((judged.frame["status"] == "nonfinite").sum())
        facts = run.add(
            outliers=judged.facts,
            labels=label_facts_of(setup.criterion, judged.frame, names),
            engine=engine_facts(run.manifest.engine, setting.examples.stream, norms, size),
            counts=Counts(len(judged.frame), nonfinite, in_dataset),
        )
        verdict = check_samples(judged.frame, facts, folder, gate)
        inputs, words, special = _shown(setup, judged.frame, results)
        result = AnalyzeResult(
            judged.frame,
            parameters,
            facts,
            folder.path,
            inputs,
            names,
            results,
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


def _drawn(setup: Setup, count: int, limit: int | float | None, progress: ShowProgress) -> Setup:
    """The run on `count` rows that are drawn at random. Raises ConfigError where no limit says how many."""
    if limit is None:
        raise ConfigError(
            "--sample was given without --limit; expected both: how many rows are drawn, such as"
            " --limit 0.1 --sample",
        )
    read_ahead(setup.samples, 0, progress)  # ids, where rows hold them
    return setup.with_drawn_rows(count, setup.config.analyze.seed)


def _require_same_rows(setup: Setup, count: int, processes: Processes) -> None:
    """Raises DistributedError where a process has loaded something else than the first one, by all that is
    known without reading rows, and some of the rows that code makes.
    """
    if processes.size == 1:
        return
    content, rows = content_of_made(setup.samples), spread_rows(count, _COMPARED_ROWS)
    some = {} if content is None else {f"data (a sample of {len(rows)} rows)": content(rows)}
    require_same_on_ranks("run", identity(setup, count, all_rows=False) | some, processes)


def _issues(
    frame: pd.DataFrame,
    measured: Measured,
    results: dict[str, MeasureResult],
    features: npt.NDArray[Any] | None,
    probabilities: npt.NDArray[Any] | None,
    leaks: Leaks | None,
) -> IssueTable:
    """The issue table of a run. features: of the inputs; None where nothing is searched by them."""
    projected = measured.rows[PROJECTED].double().numpy() if PROJECTED in measured.rows else None
    history = results.get("trajectory")
    losses = None if history is None else history.arrays.get("loss")
    held = None if probabilities is None else probabilities[: len(frame)]
    return issue_table(frame, projected, features, losses, held, leaks)


def _shown(
    setup: Setup, frame: pd.DataFrame, results: dict[str, MeasureResult]
) -> tuple[list[TopSample], dict[int, str], frozenset[int]]:
    """(the inputs of the first ranks, the text of each id in maps of attribution, those ids that are part of
    no text); all empty where the config leaves inputs out.
    """
    samples, config = setup.samples, setup.config
    if not config.report.include_inputs:
        return [], {}, frozenset()
    inputs = top_inputs(samples, frame, max(_PICTURES, config.analyze.top), results)
    words = vocabulary_of(samples, results.values())
    return inputs, words, samples.tokenizer.special_tokens if words and samples.tokenizer else frozenset()


def _say_what_to_know(setup: Setup, norms: GradientNorms, run: Run[Processes]) -> None:
    """Name rows that could not be read, and parameters whose gradients take more time and memory."""
    for row, reason in sorted(setup.reader.unreadable.items())[:_UNREADABLE_SHOWN]:
        run.say(f"row {row} is not finite: {reason}")
    if norms.unfactored:
        names = listed_names(norms.unfactored)
        run.say(f"materialised sample by sample, which takes more time and memory: the gradients of {names}")


def _follow(passes: Passes, run: Run[Processes]) -> None:
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
    passes.run()


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
