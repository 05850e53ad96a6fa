"""Records whose positions cancel, for an audit: each is compared with no record at all."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from psgrad.engine.execution.loading import to_device
from psgrad.engine.privacy.audit import Replayed, compare_neighbours
from psgrad.engine.privacy.batches import ClippedSum, GradientSource, batch_source
from psgrad.engine.privacy.clipping import Clipping
from psgrad.engine.privacy.generators import make_generator
from psgrad.engine.privacy.record_draws import RecordDraws, by_record, drawing_by_record, labels_of
from psgrad.engine.privacy.records import record_loss
from psgrad.workflows.private_setup import PrivateSetup

# Records of a batch from whose rows such records are made.
_RECORDS = 2
# The weights of the three rows of a record that cancels, of which the first and the one named by `same` are
# one row of the dataset. The larger the weights, the more digits are lost.
_TAKEN_BACK = [
    (same, weights)
    for large in (2.0**16, 2.0**20, 2.0**24, 2.0**32)
    for same, weights in (
        (1, (large, -large, 1.0)),
        (2, (large, 1.0, -large)),
        (1, (large, -large * (1 + 2.0**-22), 0.0)),
    )
]


@dataclass(frozen=True)
class CancellingRecord:
    """Three rows [3] of the dataset, and the weight of each.

    The record's loss is that of the rows, added up with weights that take one row's gradient back, but for a
    small share, and leave a little of another. Whatever operators the model has, the rows meet as positions
    in its gradients.
    """

    rows: np.ndarray
    weights: tuple[float, float, float]


def cancelling_records(setup: PrivateSetup, batch: np.ndarray) -> Iterator[CancellingRecord]:
    """Such records, made of rows of the first records of a batch; of the first row where it is empty."""
    starts = [int(setup.records.rows_of(int(record))[0]) for record in batch[:_RECORDS]] or [0]
    for start, (same, weights) in itertools.product(starts, _TAKEN_BACK):
        rows = np.full(3, start)
        rows[3 - same] = (start + 1) % len(setup.run.samples)
        yield CancellingRecord(rows, weights)


def compared_with_none(setup: PrivateSetup, base: float, record: CancellingRecord) -> Replayed:
    """What a step on this record alone gives, beside one on no record."""
    return compare_neighbours(
        _source(setup, record, 1),
        _source(setup, record, 0),
        setup.clipping,
        setup.noise(base)(0),
        setup.privacy.relation,
        make_generator(setup.privacy.noise.generator),
        adaptive=setup.adaptive,
        expected_batch_size=setup.privacy.expected_batch_size,
    )


def _source(setup: PrivateSetup, record: CancellingRecord, count: int) -> GradientSource:
    """The clipped sum of one record, or of none. A row that comes twice draws the same both times."""
    objective, block = setup.run.objective, setup.run.reader.take(record.rows)
    device = next(iter(objective.params.values())).device
    rows, target = to_device(block.inputs, block.target, device, setup.run.dtype)
    labels = torch.from_numpy(labels_of(record.rows, 1)[:, 0])
    weights = torch.tensor(record.weights, dtype=torch.float64)
    inputs = tuple(x.to(device)[None][:count] for x in (*rows, labels, weights))
    target = None if target is None else target[None][:count]
    draws: RecordDraws = setup.streams.options["draws"]
    loss = record_loss(by_record(setup.loss, lambda: draws.at(0)), randomness=setup.run.randomness)
    dims = (0, None if target is None else 0)
    summed = batch_source(
        loss,
        objective.params,
        inputs,
        target,
        in_dims=dims,
        has_aux=True,
        randomness=setup.run.randomness,
        samples=2,  # as beside another record: what is computed with others, and what alone, is looked at
    )

    def source(clipping: Clipping) -> ClippedSum:
        with drawing_by_record(draws):
            return summed(clipping)

    return source
