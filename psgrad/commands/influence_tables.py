"""The tables of an influence run: queries, training examples, ranked pairs, and their files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pandas as pd

from psgrad.commands.influence_scores import Scores, of_all
from psgrad.commands.influence_setup import InfluenceSetup, ScreenedRows
from psgrad.run import RunFolder
from psgrad.run.results.influence import (
    QUERY_COLUMNS,
    SIGN,
    TRAINING_COLUMNS,
    InfluenceResult,
    harmful_rows,
)
from psgrad.wording import first_of

_NAMED = 5  # rows in a warning


def query_table(
    setup: InfluenceSetup,
    screening: ScreenedRows,
    scores: Scores | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> pd.DataFrame:
    """One row for each query, excluded ones too; see QUERY_COLUMNS. scores: once there are some; queries that
    have no proponent and no opponent are then named.
    """
    reader, rows = setup.query_reader, setup.asked_rows
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
    return _in_order(columns, QUERY_COLUMNS)


def training_table(
    setup: InfluenceSetup, screening: ScreenedRows, overall: np.ndarray, own: np.ndarray | None
) -> pd.DataFrame:
    """One row for each training example, excluded ones too; see TRAINING_COLUMNS. overall: [n], the mean of
    its scores over the queries. own: [n], its self-influence.
    """
    reader, everything = setup.run.reader, np.arange(len(setup.run.samples))
    targets = reader.targets_at(everything)
    columns = {
        "id": setup.run.samples.ids,
        "index": everything,
        **({} if targets is None else {"target": targets}),
        **screening.training.columns,
        "loss": screening.training.losses,
        "grad_norm": screening.training.norms,
        **({} if own is None else {"self_influence": of_all(setup, own)}),
        "overall": of_all(setup, overall),
        "status": np.where(screening.kept, "ok", "nonfinite"),
    }
    return _in_order(columns, TRAINING_COLUMNS)


def _in_order(columns: Mapping[str, Any], names: tuple[str, ...]) -> pd.DataFrame:
    return pd.DataFrame({name: columns[name] for name in names if name in columns})


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
