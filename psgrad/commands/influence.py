"""`psgrad influence`: which training examples made the model do this."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
import torch

from psgrad.commands.influence_check import check_removals, with_weight_decay
from psgrad.commands.influence_index import open_index
from psgrad.commands.influence_questions import answered, require_room, require_tokens, token_pairs
from psgrad.commands.influence_ranking import QueryRankings, marked_beyond_loss, rank
from psgrad.commands.influence_setup import (
    InfluenceSetup,
    described,
    errors_of_own_method,
    set_up_influence,
    unit_of,
)
from psgrad.commands.influence_tables import (
    Warnings,
    query_table,
    training_table,
    warn_of_unranked,
    with_agreement,
    with_overall,
    without_nonfinite,
    write_tables,
)
from psgrad.commands.run_manifest import describe_run, rank_facts_of_steps
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
from psgrad.run.results import Say
from psgrad.run.results.influence import InfluenceResult, RemovalCheck, shown_queries, shown_rows
from psgrad.run.results.influence_details import QuestionTables, TokenPair
from psgrad.run.results.manifest import Counts
from psgrad.run.run import Run
from psgrad.user_code import with_code_beside

# Figures of the report: how many queries, and for each how many examples of either sign.
_SHOWN_QUERIES = 6
_SHOWN_EXAMPLES = 8
# Seconds that self-influence, by one solve for each example, may be predicted to take where the config leaves
# it open.
_SELF_SECONDS = 30.0
_CHECK_INTERRUPTED = (
    "all scores are written to {}; the check of the largest ones was interrupted, and there is no page;"
    " influence.check: never leaves it out"
)

AnyRun = Run[Any]


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
    with run.clock("load"):
        setup, store = loaded(config, run, warnings)
    if not processes.leads:
        checked(scored(setup, store, matrix, run, warnings), run, warnings)
        return None
    with run.clock("self-check"):
        check = setup.run.self_check(setup.views[0].training.stream)
        specs = [setup.run.config.influence.method.name, setup.run.config.influence.measurement.name]
        manifest = replace(describe_run("influence", setup.run, check, specs), influence=described(setup))
    with run.begin(manifest):
        found = scored(setup, store, matrix, run, warnings)
        require_unchanged(setup.run.samples.stamps)
        result = with_tables_written(found, matrix, run, warnings)
        try:
            removals = checked(found, run, warnings)
        except KeyboardInterrupt:
            warnings(_CHECK_INTERRUPTED.format(run.path))
            raise
        words = None if removals is None else {**asdict(removals), "words": removals.words}
        facts = run.add(influence=replace(run.manifest.influence, check=words, warnings=result.warnings))
        result = replace(result, check=removals, manifest=facts)
        if report:
            from psgrad.reports.influence_page import write_influence_report  # all that needs matplotlib

            with run.clock("report"):
                write_influence_report(result, run.folder.write_bytes)
    return result


def loaded(config: Config, run: AnyRun, warnings: Warnings) -> tuple[InfluenceSetup, GradientIndex | None]:
    """(what the run is made of, with passes that are shown; the index that answers, None without one)."""
    setup = set_up_influence(config, warnings, run.progress, run.processes).watched(run.passes())
    require_tokens(setup)
    if config.influence.index is None:
        return setup, None
    store = open_index(config, setup.run)
    return replace(setup, method=from_index(setup.method, store)), store


@dataclass(frozen=True)
class Scored:
    """What a run has found.

    setup: without the rows that have no score. queries, training: the tables of the result. tokens: see
    `token_pairs`. fitted: the method at each checkpoint, and own
    [n] the self-influences, for the check of removals.
    """

    setup: InfluenceSetup
    queries: pd.DataFrame
    training: pd.DataFrame
    rankings: QueryRankings
    tokens: list[TokenPair]
    fitted: Sequence[Fitted]
    own: np.ndarray | None
    ranks: dict[str, Any] | None


def scored(
    setup: InfluenceSetup, store: GradientIndex | None, matrix: bool, run: AnyRun, warnings: Warnings
) -> Scored:
    """What all processes compute together, of rows that are finite. store: the index that answers."""
    wanted, clock = setup.run.config.influence, run.clock
    with clock("screening"):
        setup, screening = without_nonfinite(setup, store, warnings)
    require_room(setup, matrix)
    with errors_of_own_method(wanted.method.name):
        with clock("weight decay"):
            setup = with_weight_decay(setup, screening.training.norms[screening.kept], warnings)
        with clock("fit"):
            fitted = [setup.method.fit(view.training, view.checkpoint) for view in setup.views]
        with clock("normalize"):
            divisors = None
            if wanted.normalize != "none":
                divisors = [divisor(each.self_influence(), wanted.normalize) for each in fitted]
        with clock("scores"):
            queries = query_table(setup, screening)
            shown = shown_queries(queries, _SHOWN_QUERIES, setup.measurement.sign > 0)
            keep = matrix or setup.keeps_all_scores
            rankings = rank(setup, fitted, divisors, shown, keep, run.progress)
            warn_of_unranked(setup, rankings, warnings)
            queries = with_agreement(queries, setup.query_rows, rankings.agreement)
            tokens = token_pairs(setup, fitted, rankings.pairs, shown)
        spent = setup.agreed_seconds(clock.seconds["scores"])
        with clock("self-influence"):
            own = self_influence(setup, fitted, spent, warnings)
    training = with_overall(training_table(setup, screening, own), setup.training_rows, rankings.overall)
    ranks = rank_facts_of_steps(setup.processes, "influence.")
    return Scored(setup, queries, training, rankings, tokens, fitted, own, ranks)


def with_tables_written(found: Scored, matrix: bool, run: AnyRun, warnings: Warnings) -> InfluenceResult:
    """The result of a run, with its tables written: all but what a check of removals adds, and the page."""
    setup, all_scores, questions = found.setup, found.rankings.matrix, QuestionTables()
    scores, larger_is_worse = found.rankings.scores, setup.measurement.sign > 0
    if run.manifest.influence.predicts_removal:
        known = found.queries[found.queries["status"] == "ok"].set_index("index")["measurement"]
        scores = marked_beyond_loss(setup, scores, known, warnings)
    if all_scores is not None:
        with run.clock("questions"):
            questions = answered(setup, all_scores["scores"], warnings)
    fit, unit = [each.facts for each in found.fitted], unit_of(setup, found.fitted)
    size = setup.processes.size
    facts = run.add(
        influence=replace(
            described(setup),
            queries=run.manifest.influence.queries,
            unit=unit,
            fit=fit,
            warnings=warnings.messages,
        ),
        counts=Counts(
            training_examples=len(found.training),
            training_nonfinite=int((found.training["status"] != "ok").sum()),
            queries=len(found.queries),
            queries_nonfinite=int((found.queries["status"] != "ok").sum()),
        ),
        engine=replace(run.manifest.engine, processes=size if size > 1 else None, **setup.run.counts.facts()),
        ranks=found.ranks,
    )
    first, examples = shown_rows(scores, found.queries, _SHOWN_QUERIES, _SHOWN_EXAMPLES, larger_is_worse)
    seen = setup.run.config.report.include_inputs
    with run.clock("tables"):
        result = InfluenceResult(
            scores=scores,
            queries=found.queries,
            training=found.training,
            manifest=facts,
            folder=run.path,
            method=setup.method.name,
            unit=unit,
            predicts_removal=bool(facts.influence.predicts_removal),
            measurement=setup.measurement.name,
            shown=found.rankings.shown,
            query_inputs={row: input_of(setup.query_reader.samples, row) for row in first} if seen else {},
            training_inputs={row: input_of(setup.run.samples, row) for row in examples} if seen else {},
            facts=fit,
            warnings=warnings.messages,
            class_names=setup.run.config.data.class_names,
            larger_is_worse=larger_is_worse,
            questions=questions,
            tokens=found.tokens,
        )
        write_tables(result, all_scores if matrix else None, run.folder)
        run.write_manifest()
    return result


def checked(found: Scored, run: AnyRun, warnings: Warnings) -> RemovalCheck | None:
    """The check of the largest scores, by all processes together; None where there is none."""
    setup = found.setup
    if not described(setup).predicts_removal:
        return None
    with run.clock("check"), errors_of_own_method(setup.run.config.influence.method.name):
        return check_removals(
            setup, found.fitted, found.rankings.scores, found.own, warnings, run.clock.count
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
    return joined_self(setup.method, found).numpy()
