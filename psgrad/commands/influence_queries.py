"""The queries of an influence run: whose rows they are, and which of them a config chooses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import numpy as np
import pandas as pd
import torch

from psgrad.commands.class_names import errors_about
from psgrad.commands.setup import Setup
from psgrad.config import Config, QueriesConfig, nearest
from psgrad.config.values import names_in_condition
from psgrad.data.measurements import Measurement
from psgrad.data.reader import CheckedReader
from psgrad.data.rows import Block, Samples
from psgrad.engine.execution.examples import Examples
from psgrad.engine.execution.loading import Read
from psgrad.engine.execution.ranks import Processes
from psgrad.errors import ConfigError
from psgrad.run.results.analyze import rows_where


def queries_of(
    config: Config,
    run: Setup,
    measurement: Measurement,
    at_last: Callable[[], Setup],
    processes: Processes,
) -> tuple[CheckedReader, np.ndarray]:
    """Who reads the queries, and which rows they are. at_last: the run at its last checkpoint, whose losses
    and predictions queries are chosen by; a pass that the processes share.
    """
    wanted = config.influence.queries
    dataset = None if wanted is None else wanted.own_data
    samples: Samples = run.samples
    if dataset is not None:  # a measurement has no weight, whatever weights the training losses have
        with errors_about_queries():
            samples = run.other_samples(dataset.model_copy(update={"weight": None}), weighted=False)
    with errors_about_queries():
        reader = CheckedReader(samples, measurement.criterion, run.class_count(measurement.criterion))
    rows = np.arange(len(samples)) if wanted is None else _listed(wanted, samples)
    if wanted is None:
        return reader, rows
    if wanted.choice_given - {"rows", "ids"}:
        with errors_about_queries():
            table = _table(wanted, rows, samples, at_last, processes)
        rows = _chosen(wanted, table)
    return reader, rows


def _listed(wanted: QueriesConfig, samples: Samples) -> np.ndarray:
    """The rows that a config lists, in its order; all where it lists none."""
    if wanted.ids is not None:
        return _rows_of_ids("influence.queries.ids", wanted.ids, samples, np.arange(len(samples)))
    if wanted.rows is None:
        return np.arange(len(samples))
    rows = np.array(wanted.rows, dtype=np.int64)
    if rows.max() >= len(samples):
        raise ConfigError(
            f"influence.queries.rows names row {rows.max()}, and the rows go from 0 to {len(samples) - 1}",
        )
    return rows


def _rows_of_ids(key: str, ids: Sequence[str | int], samples: Samples, among: np.ndarray) -> np.ndarray:
    """The rows of these ids, among some rows. Raises ConfigError, with the config's key, for an id that none
    of them has.
    """
    places = dict(zip(map(str, samples.ids[among].tolist()), among.tolist(), strict=True))
    missing = [each for each in ids if str(each) not in places]
    if missing:
        close = nearest(str(missing[0]), list(places))
        more = f" (nor {len(missing) - 1} more of them)" if len(missing) > 1 else ""
        raise ConfigError(
            f"{key} names {missing[0]!r}, which no row has{more}",
            hint=f"did you mean {close}?" if close else f"ids are such as {', '.join(list(places)[:3])}",
        )
    return np.array([places[str(each)] for each in ids], dtype=np.int64)


def contrasted_rows(config: Config, samples: Samples, rows: np.ndarray) -> tuple[tuple[int, int], ...]:
    """The pairs of queries that a config contrasts, as rows; `rows` are those of the queries."""
    pairs = config.influence.contrast or []
    found = _rows_of_ids("influence.contrast", [each for pair in pairs for each in pair], samples, rows)
    return tuple((int(one), int(other)) for one, other in found.reshape(-1, 2))


def _table(
    wanted: QueriesConfig,
    rows: np.ndarray,
    samples: Samples,
    at_last: Callable[[], Setup],
    processes: Processes,
) -> pd.DataFrame:
    """A row a query that may be chosen, with the columns of QUERY_NAMES that there are. A forward pass, where
    what the config asks takes one.
    """
    columns = {"id": samples.ids[rows], "index": rows}
    names = set() if wanted.where is None else set(names_in_condition(wanted.where))
    targets = None if samples.targets is None else samples.targets[rows]
    known = {"id", "index"} | (set() if targets is None else {"target", "label"})
    if wanted.worst is not None or names - known:
        run = at_last()
        reader = CheckedReader(samples, run.criterion, run.class_count(run.criterion))
        options = run.stream_options(lambda _: None)
        read = chosen_rows(reader, rows)
        examples = Examples(run.objective_of(samples), read, len(rows), options, processes=processes)
        chunks = [found for _, found in examples.losses()]
        columns |= {name: torch.cat([chunk[name] for chunk in chunks]).numpy() for name in chunks[0]}
        targets = reader.targets_at(rows)
        if "confidence" in columns and targets is not None:
            columns["correct"] = columns["prediction"] == targets
    if targets is not None:
        columns |= {"target": targets, "label": targets}
    return pd.DataFrame(columns)


def _chosen(wanted: QueriesConfig, table: pd.DataFrame) -> np.ndarray:
    """The rows of a table that a config chooses; the worst first. Raises ConfigError where none is left."""
    of = f"{len(table):,} rows"
    if wanted.where is not None:
        table = table[rows_where(table, wanted.where, "influence.queries.where")]
    if wanted.worst is not None:
        table = table.sort_values("loss", ascending=False, kind="stable", na_position="first").head(
            wanted.worst
        )
    if not len(table):
        said = ", ".join(sorted(wanted.choice_given - {"rows", "ids"}))
        raise ConfigError(f"influence.queries: {said} leave none of {of}", hint="ask for other rows")
    return table["index"].to_numpy(np.int64)


def errors_about_queries() -> AbstractContextManager[None]:
    """Errors about data, losses and models say that they are about the queries, not the training data."""
    return errors_about("the queries", "influence.queries and influence.measurement")


def chosen_rows(reader: CheckedReader, rows: np.ndarray) -> Read:
    """A reader of these rows of a dataset, counted from 0."""
    if len(rows) == rows[-1] - rows[0] + 1 and (np.diff(rows) == 1).all():
        first = int(rows[0])
        return lambda start, stop: reader(first + start, first + stop)

    def read(start: int, stop: int) -> Block:
        return reader.take(rows[start:stop])

    return read
