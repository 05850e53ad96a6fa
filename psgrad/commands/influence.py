"""`psgrad influence`: which training examples made the model do this."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
import torch

from psgrad.commands.influence_check import check_removals, with_weight_decay
from psgrad.commands.influence_index import open_index, stored_row_norms
from psgrad.commands.influence_scores import (
    Scores,
    answered,
    marked_beyond_loss,
    of_all,
    rank,
    require_memory,
)
from psgrad.commands.influence_setup import (
    InfluenceSetup,
    ScreenedRows,
    described,
    errors_of_own_method,
    set_up_influence,
    unit_of,
    without_nonfinite,
)
from psgrad.commands.influence_tokens import require_tokens, token_pairs
from psgrad.commands.run_manifest import describe_run
from psgrad.config import Config
from psgrad.data.previews import input_of
from psgrad.engine.execution.ranks import OneProcess, Processes
from psgrad.engine.influence.index.build import from_index
from psgrad.engine.influence.method import Fitted
from psgrad.engine.influence.ranking import divisor, joined_self
from psgrad.run import RunFolder
from psgrad.run.folders import packed
from psgrad.run.gradient_index import GradientIndex
from psgrad.run.input_files import require_unchanged
from psgrad.run.results import ShowProgress
from psgrad.run.results.influence import (
    QUERY_COLUMNS,
    SIGN,
    TRAINING_COLUMNS,
    InfluenceResult,
    RemovalCheck,
    harmful_rows,
    shown_queries,
    shown_rows,
)
from psgrad.run.results.influence_details import QuestionTables, TokenPair
from psgrad.run.results.manifest import Counts
from psgrad.run.run import Run
from psgrad.user_code import with_code_beside
from psgrad.wording import first_of

# Figures of the report: how many queries, and for each how many examples of either sign.
_SHOWN_QUERIES = 6
_SHOWN_EXAMPLES = 8
_NAMED = 5  # rows in a warning

AnyRun = Run[Any]


@with_code_beside
def influence(
    config: Config,
    *,
    overwrite: bool = False,
    matrix: bool = False,
    report: bool = True,
    progress: ShowProgress = lambda _: None,
    processes: Processes | None = None,
) -> InfluenceResult | None:
    """Rank the training examples for each query: the whole of `psgrad influence`.

    `matrix` has all scores written, too, as matrix.safetensors; without `report` plots and page are left out.
    processes: those that share the rows of each pass; None for this one alone. Returns None on all ranks but
    the first, which alone writes.

    Raises PsgradError for everything that can be wrong with the config, the model, the data or the disk.
    """
    processes = OneProcess() if processes is None else processes
    run = Run.open(config.output, processes, progress, overwrite=overwrite)
    with run.clock("load"):
        setup = set_up_influence(config, run)
        require_tokens(setup)
        index = None if config.influence.index is None else open_index(setup.common)
        if index is not None:
            setup = replace(setup, method=from_index(setup.method, index))
    if not processes.leads:
        checked(scored(setup, index, matrix, run), run)
        return None
    with run.clock("self-check"):
        specs = [setup.config.influence.method.name, setup.config.influence.measurement.name]
        manifest = describe_run("influence", setup.common, setup.views[0].training.stream, specs)
        manifest = replace(manifest, influence=described(setup))
    with run.begin(manifest):
        found = scored(setup, index, matrix, run)
        require_unchanged(setup.common.samples.stamps)
        result = result_of(found, run)
        with run.clock("tables"):
            write_tables(result, found.scores.matrix if matrix else None, run.folder)
            run.write_manifest()
        try:
            removals = checked(found, run)
        except KeyboardInterrupt:
            run.say(
                f"all scores are written to {run.path}; the check of the largest ones was interrupted, and"
                " there is no page; influence.check: never leaves it out"
            )
            raise
        words = None if removals is None else {**asdict(removals), "words": removals.words}
        facts = run.add(influence=replace(run.manifest.influence, check=words, warnings=run.messages))
        result = replace(result, check=removals, manifest=facts)
        if report:
            from psgrad.reports.influence_page import write_influence_report  # all that needs matplotlib

            with run.clock("report"):
                write_influence_report(result, run.folder.write_bytes)
    return result


@dataclass(frozen=True)
class Scored:
    """What a run has found.

    setup: without the rows that have no score. queries, training: the tables of the result. scores: their
    `pairs` marked where they predict too much. fitted: the method at each checkpoint, and own [n] the
    self-influences, for the check of removals. facts: of each fit.
    """

    setup: InfluenceSetup
    queries: pd.DataFrame
    training: pd.DataFrame
    scores: Scores
    questions: QuestionTables
    tokens: list[TokenPair]
    fitted: Sequence[Fitted]
    facts: list[dict[str, Any]]
    own: np.ndarray | None


def scored(setup: InfluenceSetup, index: GradientIndex | None, matrix: bool, run: AnyRun) -> Scored:
    """What all processes compute together, of rows that are finite. index: the one that answers."""
    wanted, clock = setup.config.influence, run.clock
    with clock("screening"):
        stored = None if index is None else stored_row_norms(index)
        setup, screening = without_nonfinite(setup, run.say, stored)
    require_memory(setup, matrix)
    with errors_of_own_method(wanted.method.name):
        with clock("weight decay"):
            setup = with_weight_decay(setup, screening.training.norms[screening.kept], run.say)
        with clock("fit"):
            fitted = setup.fitted(setup.method)
        with clock("normalize"):
            divisors = None
            if wanted.normalize != "none":
                divisors = [divisor(each.self_influence(), wanted.normalize) for each in fitted]
        with clock("scores"):
            queries = query_table(setup, screening)
            shown = shown_queries(queries, _SHOWN_QUERIES, setup.measurement.sign > 0)
            keep = matrix or setup.groups is not None or bool(setup.contrasts)
            scores = rank(setup, fitted, divisors, shown, keep, run.progress)
            tokens = token_pairs(setup, fitted, scores.pairs, shown)
        with clock("self-influence"):
            own = self_influence(setup, fitted, run.say)
        facts = [each.facts.content() for each in fitted]
    if described(setup).predicts_removal:
        known = queries[queries["status"] == "ok"].set_index("index")["measurement"]
        scores = replace(scores, pairs=marked_beyond_loss(setup, scores.pairs, known, run.say))
    questions = QuestionTables()
    if scores.matrix is not None:
        with clock("questions"):
            questions = answered(setup, scores.matrix["scores"], run.say)
    return Scored(
        setup,
        query_table(setup, screening, scores, run.say),
        training_table(setup, screening, scores.overall, own),
        scores,
        questions,
        tokens,
        fitted,
        facts,
        own,
    )


def result_of(found: Scored, run: AnyRun) -> InfluenceResult:
    """The result of a run: all but what a check of removals adds."""
    setup, queries, training, pairs = found.setup, found.queries, found.training, found.scores.pairs
    fit, unit, size = found.facts, unit_of(setup, found.fitted), run.processes.size
    before, larger_is_worse = run.manifest.influence.queries, setup.measurement.sign > 0
    facts = run.add(
        influence=replace(described(setup), queries=before, unit=unit, fit=fit, warnings=run.messages),
        counts=Counts(
            training_examples=len(training),
            training_nonfinite=int((training["status"] != "ok").sum()),
            queries=len(queries),
            queries_nonfinite=int((queries["status"] != "ok").sum()),
        ),
        engine=replace(
            run.manifest.engine, processes=size if size > 1 else None, **setup.common.counts.facts()
        ),
    )
    first, examples = shown_rows(pairs, queries, _SHOWN_QUERIES, _SHOWN_EXAMPLES, larger_is_worse)
    seen, asked = setup.config.report.include_inputs, setup.query_reader.samples
    return InfluenceResult(
        scores=pairs,
        queries=queries,
        training=training,
        manifest=facts,
        folder=run.path,
        method=setup.method.name,
        unit=unit,
        predicts_removal=bool(facts.influence.predicts_removal),
        measurement=setup.measurement.name,
        shown=found.scores.shown,
        query_inputs={row: input_of(asked, row) for row in first} if seen else {},
        training_inputs={row: input_of(setup.common.samples, row) for row in examples} if seen else {},
        facts=fit,
        warnings=run.messages,
        class_names=setup.config.data.class_names,
        larger_is_worse=larger_is_worse,
        questions=found.questions,
        tokens=found.tokens,
    )


def checked(found: Scored, run: AnyRun) -> RemovalCheck | None:
    """The check of the largest scores, by all processes together; None where there is none."""
    setup = found.setup
    if not described(setup).predicts_removal:
        return None
    with run.clock("check"), errors_of_own_method(setup.config.influence.method.name):
        return check_removals(setup, found.fitted, found.scores.pairs, found.own, run.say, run.clock.count)


def self_influence(
    setup: InfluenceSetup, fitted: Sequence[Fitted], say: Callable[[str], None]
) -> np.ndarray | None:
    """[n]: each training example's influence on itself, over checkpoints as scores are; None where the config
    leaves it out, or where it takes a solve an example and the config leaves that open.
    """
    wanted = setup.config.influence.self_influence
    if wanted == "never":
        return None
    if wanted == "auto" and not all(each.has_self_influence for each in fitted):
        if all(each.solver() is not None for each in fitted):
            say(
                f"self-influence is left out, as it takes a solve for each of {len(setup.training_rows):,}"
                " training examples; self_influence: always computes it"
            )
        return None
    found = [torch.cat([block.self_influence for block in each.self_influence()]) for each in fitted]
    return joined_self(setup.method, found).numpy()


# -- tables --------------------------------------------------------------------------------------------------


def query_table(
    setup: InfluenceSetup,
    screening: ScreenedRows,
    scores: Scores | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> pd.DataFrame:
    """One row for each query, excluded ones too; see QUERY_COLUMNS. scores: once there are some; queries that
    have no proponent and no opponent are then named.
    """
    reader, rows = setup.query_reader, setup.requested_rows
    targets = reader.targets_at(rows)
    columns: dict[str, Any] = {
        "id": reader.samples.ids[rows],
        "index": rows,
        **({} if targets is None else {"target": targets}),
        **screening.queries.columns,
        "measurement": setup.measurement.sign * screening.queries.losses,
        "status": np.where(screening.asked, "ok", "nonfinite"),
    }
    if scores is not None:
        out = np.setdiff1d(setup.query_rows, scores.pairs["query_index"])
        if len(out):
            say(
                f"{len(out):,} of {len(setup.query_rows):,} queries have no score but zeros and NaN, and no"
                f" ranking: {first_of(list(map(str, reader.samples.ids[out])), _NAMED)}"
            )
        if len(scores.agreement):
            known = pd.Series(scores.agreement, index=setup.query_rows)
            columns["agreement"] = known.reindex(rows).to_numpy()
    return pd.DataFrame({name: columns[name] for name in QUERY_COLUMNS if name in columns})


def training_table(
    setup: InfluenceSetup, screening: ScreenedRows, overall: np.ndarray, own: np.ndarray | None
) -> pd.DataFrame:
    """One row for each training example, excluded ones too; see TRAINING_COLUMNS. overall: [n], the mean of
    its scores over the queries. own: [n], its self-influence.
    """
    reader, everything = setup.common.reader, np.arange(len(setup.common.samples))
    targets = reader.targets_at(everything)
    columns = {
        "id": setup.common.samples.ids,
        "index": everything,
        **({} if targets is None else {"target": targets}),
        **screening.training.columns,
        "loss": screening.training.losses,
        "grad_norm": screening.training.norms,
        **({} if own is None else {"self_influence": of_all(setup, own)}),
        "overall": of_all(setup, overall),
        "status": np.where(screening.kept, "ok", "nonfinite"),
    }
    return pd.DataFrame({name: columns[name] for name in TRAINING_COLUMNS if name in columns})


def write_tables(result: InfluenceResult, matrix: Mapping[str, np.ndarray] | None, folder: RunFolder) -> None:
    """scores.parquet and scores.csv, self_influence.parquet, queries.parquet, harmful.csv, the answers to the
    config's questions, and the matrix where it is wanted.
    """
    # pandas keeps `attrs` in the file's metadata; a CSV file has none, and says it in a column.
    for name, frame in (("scores.parquet", result.scores), ("self_influence.parquet", result.training)):
        said = frame.copy()
        said.attrs = {"unit": result.unit, "sign": SIGN, "predicts_removal": result.predicts_removal}
        folder.write_table(name, said)
    folder.write_csv("scores.csv", result.scores.assign(unit=result.unit))
    folder.write_table("queries.parquet", result.queries)
    folder.write_csv("harmful.csv", harmful_rows(result.training))
    for name, frame in result.questions.files().items():
        folder.write_table(name, frame)
    if result.tokens:
        tables = [pair.table() for pair in result.tokens]
        folder.write_table("tokens.parquet", pd.concat(tables, ignore_index=True))
    if matrix is not None:
        folder.write_bytes("matrix.safetensors", packed(matrix))
