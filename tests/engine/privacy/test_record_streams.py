"""Records in streams by their number of rows: the same clipped sum as in one stream, without filling short
ones up to the longest.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from psgrad.engine.execution.loading import ChangedRows, Rows
from psgrad.engine.execution.objective import Objective
from psgrad.engine.execution.streaming import Stream
from psgrad.engine.privacy.batches import RecordStreams
from psgrad.engine.privacy.clipping import MARGIN, Clipping
from psgrad.engine.privacy.records import Records
from psgrad.ragged import Block
from tests.engine.privacy.test_records import whole
from tests.oracles import one_sample_gradients

SIZES = [1, 30, 2, 1, 3, 9, 1, 17, 2, 5]
USERS = np.random.default_rng(0).permutation(np.repeat(np.arange(len(SIZES)), SIZES))


class Data:
    """Users of 1 to 30 rows, and a network for them."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(len(USERS), 5, dtype=torch.float64, generator=generator)
        self.y = torch.randint(3, (len(USERS),), generator=generator)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)).double()
        self.objective = Objective(self.model, nn.functional.cross_entropy)
        self.records = Records.of_units(USERS)
        self.rows = one_sample_gradients(self.model, nn.functional.cross_entropy, (self.x,), self.y)
        self.read: list[tuple[int, ...]] = []

    def streams(self, **options: Any) -> RecordStreams:
        """Streams that note the shape of what they read."""

        def noted(batch: Block, _: Tensor) -> Block:
            self.read.append(tuple(batch.inputs[0].shape))
            return batch

        def make(loss: Callable[..., Any], rows: Rows) -> Stream:
            return Stream(loss, self.objective.params, ChangedRows(rows, noted), chunk_size=4)

        return RecordStreams(
            self.records,
            Block((self.x,), self.y),
            self.objective.loss,
            self.objective.params,
            make,
            **options,
        )

    def clipped(self, drawn: list[int], bound: float) -> tuple[Tensor, Tensor]:
        """(the clipped sum, the norms) of users in this order, one row after another."""
        users = torch.stack([whole(self.rows)[self.records.rows_of(record)].mean(0) for record in drawn])
        return ((bound * (1 - MARGIN) / users.norm(dim=1)).clamp(max=1)[:, None] * users).sum(0), users.norm(
            dim=1
        )


@pytest.fixture(scope="module")
def data() -> Data:
    return Data()


def test_record_streams_sum_equals_the_loop(data: Data) -> None:
    streams = data.streams()
    clipping = Clipping.flat(data.rows, 0.2)
    for drawn in (range(10), [3], [], [9, 1, 4], [0, 2, 3]):
        result = streams.source(list(drawn))(clipping)
        assert sorted(streams.drawn.tolist()) == sorted(drawn)
        assert result.sums.keys() == data.rows.keys()
        if not len(drawn):
            assert not any(value.any() for value in result.sums.values())
            continue
        expected, norms = data.clipped(streams.drawn.tolist(), 0.2)
        assert (
            torch.cat([result.sums[name].flatten() for name in data.rows]) - expected
        ).norm() <= 1e-9 * expected.norm()
        torch.testing.assert_close(result.records.norms, norms, rtol=1e-9, atol=0)


def test_record_streams_short_records_in_narrow_batches(data: Data) -> None:
    """Rows alone have no axis of rows."""
    data.read.clear()
    data.streams().source(range(10))(Clipping.flat(data.rows, 0.2))
    assert {shape[1:-1] for shape in data.read} == {(), (2,), (4,), (8,), (16,), (32,)}


@given(sizes=st.lists(st.integers(1, 300), min_size=1, max_size=30))
def test_record_streams_width_follows_from_the_record_alone(sizes: list[int]) -> None:
    records = Records(np.arange(sum(sizes)), np.cumsum(sizes) - np.array(sizes), np.array(sizes))
    streams = RecordStreams(records, None, None, {}, None)  # type: ignore[arg-type]
    streams.source(range(len(sizes)))
    parts = streams._parts(streams.drawn)
    assert np.concatenate([part for _, part in parts]).tolist() == streams.drawn.tolist()
    assert sorted(streams.drawn.tolist()) == list(range(len(sizes)))
    for width, part in parts:
        for record in part:
            assert streams._parts(np.array([record])) == [(width, [record])]
            assert records.sizes[record] <= width < 2 * records.sizes[record]
            assert width.bit_count() == 1
