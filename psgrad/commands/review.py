"""`psgrad review`: what a change of the training data will do, before anybody trains on it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from psgrad.commands.class_names import errors_about
from psgrad.commands.influence_setup import InfluenceSetup, set_up_influence
from psgrad.commands.review_check import training_on
from psgrad.commands.review_index import index_before
from psgrad.commands.review_prediction import ChangedRows, predicted
from psgrad.commands.review_rows import changed_in, input_cards, suspicion_of
from psgrad.commands.review_tables import (
    changes_table,
    factor_of,
    queries_table,
    query_sets,
    scalars_of,
    totals_of,
)
from psgrad.commands.review_verdict import review_check
from psgrad.commands.run_manifest import describe_run
from psgrad.config import Config
from psgrad.config.data import SOURCE_KEYS
from psgrad.data.reader import CheckedReader
from psgrad.engine.execution.ranks import OneProcess
from psgrad.errors import ConfigError
from psgrad.quality.changed_rows import FEWEST, NO_ROW
from psgrad.run.results import ShowProgress
from psgrad.run.results.review import ReviewResult, review_content
from psgrad.run.run import Run
from psgrad.user_code import with_code_beside

_FEW = (
    "{} queries are too few to tell that an added row's loss or gradient norm is unusual, which takes {}:"
    " only near duplicates are found"
)


@with_code_beside
def review(
    config: Config,
    base: Path | str,
    head: Path | str | None = None,
    *,
    overwrite: bool = False,
    report: bool = True,
    progress: ShowProgress = lambda _: None,
) -> ReviewResult:
    """Predict what the change from `base` to `head` does to the queries: the whole of `psgrad review`.

    base, head: what data.path, data.dataset or data.images takes, whichever the config names; head is the
    config's own where it is None. Raises PsgradError for everything that can be wrong with the config, the
    model, the data or the disk.
    """
    asked = config.influence.queries
    if asked is None or asked.own_data is None:
        raise ConfigError(
            "influence.queries names no dataset of its own; expected an evaluation set, whose losses are"
            " predicted",
            hint="set influence.queries: {path: test.npz}",
        )
    config = with_source(config, head) if head is not None else config
    run = Run.open(
        config.output.with_name(f"{config.output.name}-review"), OneProcess(), progress, overwrite=overwrite
    )
    with run.clock("load"):
        setup = set_up_influence(config, run)
        before = read_before(setup, with_source(config, base))
        index = index_before(config, setup, before)
    with run.clock("compare"):
        table = changed_in(before, setup.common.reader, with_ids=config.data.id is not None)
    with run.clock("self-check"):
        stream = setup.views[0].training.stream
        manifest = describe_run("review", setup.common, stream, [config.influence.method.name])
    with run.begin(manifest):
        added = table.loc[table["after"] != NO_ROW, "after"].to_numpy(np.int64)
        removed = table.loc[table["before"] != NO_ROW, "before"].to_numpy(np.int64)
        scalars, sets = scalars_of(setup), query_sets(setup)
        if not len(table):
            run.say("no row was added, removed or changed: there is nothing to predict")
        if len(added) and len(setup.query_rows) < FEWEST:
            run.say(_FEW.format(len(setup.query_rows), FEWEST))
        with run.clock("predict"):
            masks, judged = [chosen for _, _, chosen in sets], "margin" if "margin" in scalars else "loss"
            rows = ChangedRows(before, added, removed, index)
            found = predicted(setup, rows, scalars, masks, judged)
        with run.clock("check"):
            measured, trust = training_on(setup, before, found, scalars, len(table) > 0, run)
        with run.clock("suspects"):
            suspects = suspicion_of(setup, before, added, removed) if len(added) else None
        queries = queries_table(setup, found, trust, measured)
        factor = factor_of(trust, found, measured, judged)
        changes = changes_table(setup, before, table, found, factor, suspects)
        totals = totals_of(sets, found, trust, measured)
        verdict = review_check(config, run.path, totals, changes, trust, tuple(run.messages))
        result = ReviewResult(
            queries,
            changes,
            totals,
            trust,
            verdict,
            {kind: int((table["kind"] == kind).sum()) for kind in ("added", "removed", "changed")},
            setup.common.criterion.unit or "units of the loss",
            run.path,
            run.add(),
            input_cards(setup, before, changes) if config.report.include_inputs else {},
            tuple(run.messages),
        )
        run.folder.write_table("review.parquet", queries)
        run.folder.write_table("changes.parquet", changes)
        run.folder.write_json("review.json", review_content(result))
        if report:
            from psgrad.reports.review_page import write_report

            with run.clock("report"):
                write_report(result, run.folder.write_bytes)
    return result


def with_source(config: Config, source: Path | str) -> Config:
    """The config with other training data in place of its own. Raises ConfigError where code makes those."""
    key = next(key for key in SOURCE_KEYS if getattr(config.data, key) is not None)
    if key == "factory":
        raise ConfigError(
            "data.factory makes the training data; expected data that are a file, a folder or a dataset, of"
            " which there are two versions",
            hint="write both versions to files, and name one in data.path",
        )
    value: Any = str(source) if key == "dataset" and not Path(source).exists() else Path(source).absolute()
    return config.changed("data", **{key: value})


def read_before(setup: InfluenceSetup, config: Config) -> CheckedReader:
    """Reads the training data before the change."""
    with errors_about("the data before the change"):
        return setup.common.reader_of(setup.common.other_samples(config.data))
