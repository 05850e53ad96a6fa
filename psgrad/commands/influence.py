"""`psgrad influence`: which training examples made the model do this."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import pandas as pd
import torch

from psgrad.commands.influence_check import check_removals, with_weight_decay
from psgrad.commands.influence_index import open_index
from psgrad.commands.influence_questions import answered, require_room, require_tokens, token_pairs
from psgrad.commands.influence_ranking import QueryRankings, marked_beyond_loss, rank
from psgrad.commands.influence_search import require_searchable, searched
from psgrad.commands.influence_setup import (
    InfluenceSetup,
    errors_of_own_method,
    is_on_one_scale,
    set_up_influence,
    unit_of,
)
from psgrad.commands.influence_tables import (
    ScreenedRows,
    Warnings,
    coverage,
    earlier_evaluations,
    query_table,
    training_table,
    warn_of_plain_mean,
    warn_of_unranked,
    with_agreement,
    with_overall,
    without_nonfinite,
    write_tables,
)
from psgrad.commands.run_manifest import (
    describe_run,
    rank_facts_of_steps,
)
from psgrad.config import Config
from psgrad.data.previews import input_of
from psgrad.engine.execution.output_rows import LARGEST_OUTPUT, output_size
from psgrad.engine.execution.ranks import OneProcess, Processes
from psgrad.engine.influence.index.build import from_index
from psgrad.engine.influence.method import Fitted
from psgrad.engine.influence.ranking import divisor, joined_self
from psgrad.engine.influence.solvers.choice import solved_products
from psgrad.reports.words import duration
from psgrad.run.gradient_index import GradientIndex
from psgrad.run.input_files import require_unchanged
from psgrad.run.results import InfluenceResult, Say
from psgrad.run.results.influence import (
    SIGN,
    RemovalCheck,
    shown_queries,
    shown_rows,
)
from psgrad.run.results.influence_details import QuestionTables, TokenPair
from psgrad.run.results.manifest import Counts, InfluenceFacts, RunManifest
from psgrad.run.run import Run
from psgrad.user_code import with_code_beside

# Figures of the report: how many queries, and for each how many examples of either sign.
_SHOWN_QUERIES = 6
_SHOWN_EXAMPLES = 8
# Seconds that self-influence, by one solve for each example, may be predicted to take where the config leaves
# it open.
_SELF_SECONDS = 30.0


@with_code_beside
def influence(
    config: Config,
    *,
    overwrite: bool = False,
    matrix: bool = False,
    report: bool = True,
    progress: Say = lambda _: None,
    processes: Processes | None = None,
) -> InfluenceResult | None:
    """Rank the training examples for each query: the whole of `psgrad influence`.

    `matrix` has all scores written, too, as matrix.safetensors; without `report` plots and page are left out.
    processes: those that share the rows of each pass; None for this one alone. Returns None on all ranks but
    the first, which alone writes.

    Raises PsgradError for everything that can be wrong with the config, the model, the data or the disk.
    """
    processes = OneProcess() if processes is None else processes
    run, warnings = Run.open(config.output, processes, progress, overwrite=overwrite), Warnings(progress)
    require_searchable(config, matrix=matrix, processes=processes)
    with run.clock("load"):
        setup, store = loaded(config, run, warnings)
    if not processes.leads:
        scored = scored_by_all(*screened(setup, store, run, warnings), matrix, run, warnings)
        checked(scored, run, warnings)
        return None
    with run.clock("self-check"):
        manifest = manifest_for(setup)
    with run.begin(manifest):
        scored = scored_by_all(*screened(setup, store, run, warnings), matrix, run, warnings)
        require_unchanged(setup.run.samples.stamps)
        result = with_tables_written(scored, run, warnings)
        try:
            removals = checked(scored, run, warnings)
        except KeyboardInterrupt:
            warnings(_CHECK_INTERRUPTED.format(run.path))
            raise
        return finished(replace(result, check=removals), run, report)


AnyRun = Run[Any]


def loaded(config: Config, run: AnyRun, warnings: Warnings) -> tuple[InfluenceSetup, GradientIndex | None]:
    """(what the run is made of, with passes that are shown; the index that answers, None without one)."""
    setup = set_up_influence(config, warnings, run.progress, run.processes).watched(run.passes())
    require_tokens(setup)
    if config.influence.index is None:
        return setup, None
    store = open_index(config, setup.run)
    return replace(setup, method=from_index(setup.method, store)), store


def screened(
    setup: InfluenceSetup, store: GradientIndex | None, run: AnyRun, warnings: Warnings
) -> tuple[InfluenceSetup, ScreenedRows]:
    """See `without_nonfinite`."""
    with run.clock("screening"):
        return without_nonfinite(setup, store, warnings)


def manifest_for(setup: InfluenceSetup) -> RunManifest:
    """manifest.json at the beginning, with the self-check, which runs now. Raises SelfCheckError."""
    run, wanted = setup.run, setup.run.config.influence
    check = run.self_check(setup.views[0].training.stream)
    specs = [wanted.method.name, wanted.measurement.name]
    return replace(describe_run("influence", run, check, specs), influence=described(setup))


_CHECK_INTERRUPTED = (
    "all scores are written to {}; the check of the largest ones was interrupted, and there is no page;"
    " influence.check: never leaves it out"
)


def with_tables_written(scored: Scored, run: AnyRun, warnings: Warnings) -> InfluenceResult:
    """The result of a run, with its tables written: all but what a check of removals adds, and the page."""
    setup, all_scores, questions = scored.setup, scored.rankings.matrix, QuestionTables()
    scores, larger_is_worse = scored.rankings.scores, setup.measurement.sign > 0
    predicts_removal = bool(described(setup).predicts_removal)
    if predicts_removal:
        known = scored.queries[scored.queries["status"] == "ok"].set_index("index")["measurement"]
        scores = marked_beyond_loss(setup, scores, known, warnings)
    if all_scores is not None:
        with run.clock("questions"):
            questions = answered(setup, all_scores["scores"], scored.queries, scored.training, warnings)
    found = facts_of(scored, run.manifest.influence, warnings.messages)
    size = setup.processes.size
    engine = replace(run.manifest.engine, processes=size if size > 1 else None, **setup.run.counts.facts())
    facts = run.add(influence=found, counts=scored.counts(), engine=engine, ranks=scored.ranks)
    first, examples = shown_rows(scores, scored.queries, _SHOWN_QUERIES, _SHOWN_EXAMPLES, larger_is_worse)
    seen = setup.run.config.report.include_inputs
    with run.clock("tables"):
        result = InfluenceResult(
            scores=scores,
            queries=scored.queries,
            training=scored.training,
            manifest=facts,
            folder=run.path,
            method=setup.method.name,
            unit=scored.unit,
            predicts_removal=predicts_removal,
            measurement=setup.measurement.name,
            shown=scored.rankings.shown,
            query_inputs={row: input_of(setup.query_reader.samples, row) for row in first} if seen else {},
            training_inputs={row: input_of(setup.run.samples, row) for row in examples} if seen else {},
            facts=scored.fit,
            warnings=warnings.messages,
            class_names=setup.run.config.data.class_names,
            larger_is_worse=larger_is_worse,
            questions=questions,
            tokens=scored.tokens,
            evaluations=earlier_evaluations(setup.run.config, found),
        )
        write_tables(result, all_scores if scored.matrix else None, run.folder)
        run.write_manifest()
    return result


def facts_of(scored: Scored, before: InfluenceFacts, warnings: list[str]) -> InfluenceFacts:
    """Facts about the scores for manifest.json. before: those of the beginning."""
    setup = scored.setup
    return replace(
        described(setup),
        queries=before.queries,
        unit=scored.unit,
        fit=scored.fit,
        search=scored.search,
        coverage=coverage(setup.run.model, setup.views[0].training.params, scored.fit),
        warnings=warnings,
    )


def checked(scored: Scored, run: AnyRun, warnings: Warnings) -> RemovalCheck | None:
    """The check of the largest scores, by all processes together; None where there is none."""
    setup = scored.setup
    if not described(setup).predicts_removal:
        return None
    with run.clock("check"), errors_of_own_method(setup.run.config.influence.method.name):
        scores, own = scored.rankings.scores, scored.own
        return check_removals(setup, scored.fitted, scores, own, warnings, run.clock.count)


def finished(result: InfluenceResult, run: AnyRun, report: bool) -> InfluenceResult:
    """The result with its whole manifest; plots and page are written where a report is asked for."""
    check = None if result.check is None else {**asdict(result.check), "words": result.check.words}
    influence = replace(run.manifest.influence, check=check, warnings=result.warnings)
    result = replace(result, manifest=run.add(influence=influence))
    if report:
        from psgrad.reports.influence_page import write_influence_report  # which is all that needs matplotlib

        with run.clock("report"):
            write_influence_report(result, run.folder.write_bytes)
    return result


@dataclass(frozen=True)
class Scored:
    """What a run has found.

    setup: without the rows that have no score. queries, training: the tables of the result. fit: the facts of
    the method at each checkpoint. unit: of a score. matrix: whether all scores become a file. tokens: see
    `token_pairs`. search: the facts of an approximate search. fitted: the method at each checkpoint, and own
    [n] the self-influences, for the check of removals.
    """

    setup: InfluenceSetup
    queries: pd.DataFrame
    training: pd.DataFrame
    rankings: QueryRankings
    fit: list[dict[str, Any]]
    unit: str
    ranks: dict[str, Any] | None = None
    matrix: bool = False
    tokens: list[TokenPair] = field(default_factory=list)
    search: dict[str, Any] | None = None
    fitted: Sequence[Fitted] = ()
    own: np.ndarray | None = None

    def counts(self) -> Counts:
        excluded = [int((table["status"] != "ok").sum()) for table in (self.training, self.queries)]
        return Counts(
            training_examples=len(self.training),
            training_nonfinite=excluded[0],
            queries=len(self.queries),
            queries_nonfinite=excluded[1],
        )


def scored_by_all(
    setup: InfluenceSetup, screening: ScreenedRows, matrix: bool, run: AnyRun, warnings: Warnings
) -> Scored:
    """What all processes compute together, of rows that are finite."""
    wanted, clock = setup.run.config.influence, run.clock
    require_room(setup, matrix)
    with errors_of_own_method(wanted.method.name):
        with clock("weight decay"):
            setup = with_weight_decay(setup, screening.training.norms[screening.kept], warnings)
        with clock("fit"):
            fitted = setup.method.fit_run([(view.training, view.checkpoint) for view in setup.views])
        with clock("normalize"):
            divisors = None
            if wanted.normalize != "none":
                divisors = [divisor(each.self_influence(), wanted.normalize) for each in fitted]
        everything, search = setup, None
        if wanted.index_search.approximate:
            search = searched(setup, fitted, run, warnings)
            setup, fitted = search.setup, search.fitted
        with clock("scores"):
            queries = query_table(setup, screening)
            shown = shown_queries(queries, _SHOWN_QUERIES, setup.measurement.sign > 0)
            keep = matrix or setup.keeps_all_scores
            rankings = rank(setup, fitted, divisors, shown, keep, run.progress)
            warn_of_unranked(setup, rankings, warnings)
            warn_of_plain_mean(setup, rankings, warnings)
            queries = with_agreement(queries, setup.query_rows, rankings.agreement)
            tokens = token_pairs(setup, fitted, rankings.pairs, shown)
        spent = setup.agreed_seconds(clock.seconds["scores"])
        with clock("self-influence"):
            own = self_influence(everything, fitted, spent, warnings)
    training = with_overall(training_table(everything, screening, own), setup.training_rows, rankings.overall)
    return Scored(
        setup,
        queries,
        training,
        rankings,
        fit=[each.facts for each in fitted],
        unit=unit_of(setup, fitted),
        ranks=rank_facts_of_steps(setup.processes, "influence."),
        matrix=matrix,
        tokens=tokens,
        search=None if search is None else search.facts,
        fitted=fitted,
        own=own,
    )


def described(setup: InfluenceSetup) -> InfluenceFacts:
    """Facts about the scores for manifest.json, before there are any scores."""
    wanted = setup.run.config.influence
    return InfluenceFacts(
        method=setup.method.name,
        sign=SIGN,
        unit=unit_of(setup),
        predicts_removal=(
            setup.method.predicts_removal and wanted.normalize == "none" and not is_on_one_scale(setup)
        ),
        measurement=setup.measurement.name,
        normalize=wanted.normalize,
        average=wanted.average if len(setup.views) > 1 else None,
        parameters=list(setup.views[0].training.params),
        coverage=coverage(setup.run.model, setup.views[0].training.params),
        checkpoints=[
            {
                "path": view.path,
                "sha256": view.sha256,
                "learning_rate": view.checkpoint.learning_rate,
            }
            for view in setup.views
        ],
        queries={"rows": len(setup.query_rows), "fingerprint": setup.query_reader.samples.fingerprint},
    )


def self_influence(
    setup: InfluenceSetup, fitted: Sequence[Fitted], seconds: float, say: Callable[[str], None]
) -> np.ndarray | None:
    """[n]: each training example's influence on itself, over checkpoints as scores are; None where the config
    leaves it out, or where it is predicted to take long and the config leaves that open. seconds: what the
    scores of the queries took.
    """
    wanted = setup.run.config.influence.self_influence
    if wanted == "never":
        return None
    if not all(each.has_self_influence for each in fitted):
        n, m = len(setup.training_rows), len(setup.query_rows)
        if any(each.solver() is None for each in fitted) and wanted == "auto":  # a method without one
            return None
        predicted = seconds * solved_products(n) / solved_products(m)
        words = (
            f"self-influence takes a solve for each of the {n:,} training examples, predicted to take"
            f" {duration(predicted)}"
        )
        large = output_size(setup.views[0].training) > LARGEST_OUTPUT  # which exact and dual don't take
        cheaper = (
            f"{'curvature: fisher' if large else 'solver: exact or dual'} has it for the price of scores"
        )
        if wanted == "auto" and predicted > _SELF_SECONDS:
            say(f"{words}, and is left out; {cheaper}; self_influence: always computes it")
            return None
        if predicted > _SELF_SECONDS:
            say(f"{words}; {cheaper}; self_influence: never leaves it out")
    found = [torch.cat([block.self_influence for block in each.self_influence()]) for each in fitted]
    return joined_self(setup.method, found, setup.run.config.influence.average).numpy()
