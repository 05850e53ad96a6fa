"""The changed rows of a review: which they are, how wrong the added ones look by themselves, and their
inputs.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from psgrad.commands.analyze_issues import leaks_in, searched_features
from psgrad.commands.influence_inputs import with_rows
from psgrad.commands.influence_setup import InfluenceSetup
from psgrad.data.previews import input_of
from psgrad.data.reader import CheckedReader, digests
from psgrad.engine.execution.examples import Examples
from psgrad.engine.influence.method import row_norms
from psgrad.quality.changed_rows import NO_ROW, Measured, RowContents, Suspicion, changed_rows, suspicion
from psgrad.ragged import Block
from psgrad.run.results import TopSample

Array = npt.NDArray[Any]

_BLOCK = 1024  # rows that are read at once
_CARDS = 40  # changed rows whose inputs are shown


def changed_in(before: CheckedReader, after: CheckedReader, with_ids: bool) -> pd.DataFrame:
    """What changed; see `changed_rows`. Reads all rows of both versions."""
    return changed_rows(_contents(before, with_ids), _contents(after, with_ids))


def _contents(reader: CheckedReader, with_ids: bool) -> RowContents:
    whole: list[str] = []
    parts: dict[str, list[str]] = {"input": [], "label": [], "weight": []}
    weighted = reader.samples.weighted
    for start in range(0, len(reader.samples), _BLOCK):
        block = reader.take(range(start, min(start + _BLOCK, len(reader.samples))))
        whole += digests(block)
        parts["input"] += digests(block.inputs_alone(weighted))
        if block.target is not None and block.target.dim() == 1:
            parts["label"] += digests(Block((block.target,), None))
        if weighted:
            parts["weight"] += digests(Block(block.inputs[-1:], None))
    ids = reader.samples.ids if with_ids else None
    return RowContents(ids, np.array(whole), {name: np.array(own) for name, own in parts.items() if own})


def suspicion_of(setup: InfluenceSetup, before: CheckedReader, added: Array, removed: Array) -> Suspicion:
    """How wrong the added rows look by themselves, to the model of the last checkpoint."""
    training, asked = setup.views[-1].training, setup.views[-1].queries
    queries = replace(training, objective=training.objective.unweighted(), rows=asked.rows)
    rows = with_rows(training, setup.common.reader, added)
    stay = np.setdiff1d(np.arange(len(before.samples)), removed)
    known = _features(with_rows(training, before, stay)) if len(stay) else None
    seen = np.zeros(len(stay))  # losses of rows that the model was trained on are no reference
    found = _measured(rows, setup.common.samples.ids[added], setup.common.reader.targets_at(added))
    ids, weighted = setup.query_reader.samples.ids[setup.query_rows], rows.objective.forward.weighted
    return suspicion(
        found,
        _measured(queries, ids, None),
        Measured(before.samples.ids[stay], seen, seen, before.targets_at(stay), None, known),
        leaks_in(rows.rows, weighted, found.features, queries.rows, ids),
    )


def _measured(examples: Examples, ids: Array, targets: Array | None) -> Measured:
    norms = row_norms(examples)
    predictions = norms.columns.get("prediction")
    return Measured(ids, norms.losses, norms.norms, targets, predictions, _features(examples))


def _features(examples: Examples) -> Array | None:
    """[n, k]: numbers of inputs that can be compared; None for too many rows."""
    return searched_features(examples.rows, examples.objective.forward.weighted)


def input_cards(
    setup: InfluenceSetup, before: CheckedReader, changes: pd.DataFrame
) -> dict[int, tuple[TopSample | None, TopSample | None]]:
    """The first rows of the table of changes -> the input before and after."""

    def shown(reader: CheckedReader, row: int) -> TopSample | None:
        return None if row == NO_ROW else input_of(reader.samples, row)

    rows = changes.head(_CARDS)[["before", "after"]].itertuples(index=True)
    return {place: (shown(before, old), shown(setup.common.reader, new)) for place, old, new in rows}
