"""The rows of an influence run that have scores, those whose loss and gradient are finite at every
checkpoint, with warnings about the others; and the tables: queries, training examples, ranked pairs, and
their files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import torch

from psgrad.commands.influence_index import stored_row_norms
from psgrad.commands.influence_queries import chosen_rows, errors_about_queries
from psgrad.commands.influence_ranking import QueryRankings, of_all
from psgrad.commands.influence_setup import InfluenceSetup
from psgrad.engine.influence.method import RowNorms, row_norms
from psgrad.errors import InfluenceError
from psgrad.run import RunFolder
from psgrad.run.gradient_index import GradientIndex
from psgrad.run.results import Progress, Say
from psgrad.run.results.influence import (
    QUERY_COLUMNS,
    SIGN,
    TRAINING_COLUMNS,
    InfluenceResult,
    harmful_rows,
)
from psgrad.wording import first_of

_NAMED = 5  # rows in a warning


class Warnings:
    """What the run says to people: printed at once, and kept for the report."""

    def __init__(self, progress: Say, phase: str = "influence") -> None:
        self.messages: list[str] = []
        self._progress, self._phase = progress, phase

    def __call__(self, message: str) -> None:
        if message not in self.messages:
            self.messages.append(message)
            self._progress(Progress(0, 0, self._phase, message))


class ScreenedRows:
    """The result of one pass over training examples and queries: whose numbers are finite at every
    checkpoint, and the last one's columns.
    """

    def __init__(self, training: list[RowNorms], queries: list[RowNorms]) -> None:
        self.training, self.queries = training[-1], queries[-1]
        self.kept = torch.stack([each.finite for each in training]).all(0).numpy()
        self.asked = torch.stack([each.finite for each in queries]).all(0).numpy()


def without_nonfinite(
    setup: InfluenceSetup, store: GradientIndex | None, say: Callable[[str], None]
) -> tuple[InfluenceSetup, ScreenedRows]:
    """The setup without the rows whose loss or gradient is not finite at some checkpoint, which are named.

    store: the index that answers. It has no score for such training examples, and they are not read again.
    Raises InfluenceError where nothing is left.
    """
    training = (
        [row_norms(view.training) for view in setup.views] if store is None else stored_row_norms(store)
    )
    with errors_about_queries():
        queries = [row_norms(view.queries) for view in setup.views]
    screening = ScreenedRows(training, queries)
    samples = setup.run.samples
    for what, kept, ids in (
        ("training examples", screening.kept, samples.ids),
        ("queries", screening.asked, setup.query_reader.samples.ids[setup.query_rows]),
    ):
        out = np.flatnonzero(~kept)
        if len(out) == len(kept):
            raise InfluenceError(
                f"the loss or the gradient of every one of the {len(kept):,} {what} is not finite",
                hint="psgrad analyze shows which rows and parameters",
            )
        if len(out):
            say(
                f"excluded {len(out):,} of {len(kept):,} {what}, whose loss or gradient is not finite:"
                f" {first_of(list(map(str, ids[out])), _NAMED)}"
            )
    if screening.kept.all() and screening.asked.all():
        return setup, screening
    setup = setup.with_queries(setup.query_rows[screening.asked])
    rows = np.flatnonzero(screening.kept) if store is None else setup.training_rows
    read, numbers = chosen_rows(setup.run.reader, rows), torch.from_numpy(rows)
    views = [
        replace(view, training=replace(view.training, read=read, count=len(rows), numbers=numbers))
        for view in setup.views
    ]
    return replace(setup, views=views, training_rows=rows), screening


def warn_of_unranked(setup: InfluenceSetup, rankings: QueryRankings, say: Callable[[str], None]) -> None:
    """Say which queries have no proponent and no opponent."""
    ids, rows = setup.query_reader.samples.ids, np.setdiff1d(setup.query_rows, rankings.scores["query_index"])
    if len(rows):
        say(
            f"{len(rows):,} of {len(setup.query_rows):,} queries have no score but zeros and NaN, and no"
            f" ranking: {first_of(list(map(str, ids[rows])), _NAMED)}"
        )


def query_table(setup: InfluenceSetup, screening: ScreenedRows) -> pd.DataFrame:
    """One row for each query, excluded ones too; see QUERY_COLUMNS."""
    reader, rows = setup.query_reader, setup.asked_rows
    targets = reader.targets_at(rows)
    columns = {
        "id": reader.samples.ids[rows],
        "index": rows,
        **({} if targets is None else {"target": targets}),
        **screening.queries.columns,
        "measurement": setup.measurement.sign * screening.queries.losses,
        "status": np.where(screening.asked, "ok", "nonfinite"),
    }
    return pd.DataFrame({name: columns[name] for name in QUERY_COLUMNS if name in columns})


def training_table(setup: InfluenceSetup, screening: ScreenedRows, own: np.ndarray | None) -> pd.DataFrame:
    """One row for each training example, excluded ones too; see TRAINING_COLUMNS. `overall` comes later."""
    samples, reader, kept = setup.run.samples, setup.run.reader, screening.kept
    everything = np.arange(len(samples))
    targets = reader.targets_at(everything)
    columns = {
        "id": samples.ids,
        "index": everything,
        **({} if targets is None else {"target": targets}),
        **screening.training.columns,
        "loss": screening.training.losses,
        "grad_norm": screening.training.norms,
        **({} if own is None else {"self_influence": of_all(own, setup.training_rows, len(kept))}),
        "status": np.where(kept, "ok", "nonfinite"),
    }
    return _in_order(columns)


def with_overall(training: pd.DataFrame, rows: np.ndarray, overall: np.ndarray) -> pd.DataFrame:
    """The table of training examples with the mean of their scores over the queries: `overall` [n], of these
    rows [n].
    """
    return _in_order({**training, "overall": of_all(overall, rows, len(training))})


def _in_order(columns: Mapping[str, Any]) -> pd.DataFrame:
    return pd.DataFrame({name: columns[name] for name in TRAINING_COLUMNS if name in columns})


def with_agreement(queries: pd.DataFrame, rows: np.ndarray, agreement: np.ndarray) -> pd.DataFrame:
    """The table of queries with the agreement of the checkpoints on these rows; as it is without any."""
    if not len(agreement):
        return queries
    known = pd.Series(agreement, index=rows)
    found = queries.assign(agreement=known.reindex(queries["index"]).to_numpy())
    return found[[name for name in QUERY_COLUMNS if name in found]]


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
        from safetensors.numpy import save

        folder.write_bytes("matrix.safetensors", save(dict(matrix)))
