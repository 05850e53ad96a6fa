"""Buckets of few shapes: each row is in one, and programs of them give the numbers of each row alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from psgrad.engine.execution.buckets import ModelSize
from psgrad.engine.execution.ladder import buckets_of_few_shapes
from psgrad.engine.gradients import per_sample_gradients, per_sample_square_norms
from psgrad.ragged import RaggedAxes
from tests.engine.execution.ragged_models import Case, case, flat
from tests.engine.execution.test_buckets import TWO, Watched, assert_close

LIMIT = 40
LINE = RaggedAxes((((0, 0),), ()), (0, 0), masked=True, limit=LIMIT)
# A pass of a model of this size takes as long as any number of positions.
TINY = ModelSize(10**6, 1)


@given(
    lengths=st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), min_size=1, max_size=40),
    columns=st.integers(1, 2),
    once=st.floats(0, 1e4),
    most=st.one_of(st.none(), st.integers(1, 500)),
)
def test_each_row_is_in_one_bucket_that_it_fits_in(
    lengths: Sequence[tuple[int, int]], columns: int, once: float, most: int | None
) -> None:
    rows = torch.tensor(lengths)[:, :columns]
    ragged = replace(LINE if columns == 1 else TWO, limit=LIMIT)
    buckets = buckets_of_few_shapes(rows, ragged, once=once, most=most)
    assert sorted(place for bucket in buckets for place in bucket.places.tolist()) == list(range(len(rows)))
    for bucket in buckets:
        if bucket.rows is None or bucket.lengths is None:
            continue
        own = rows[bucket.places]
        assert bucket.rows in {1 << power for power in range(7)}
        assert len(own) <= bucket.rows < 2 * len(own)
        size = sum(bucket.lengths) * bucket.rows
        assert most is None or size <= max(most, sum(bucket.lengths))
        for column, length in enumerate(bucket.lengths):
            assert int(own[:, column].max()) <= length
            # Beyond the model's limit nothing is padded further than to another row.
            assert length <= max(LIMIT, int(rows[:, column].max()))


def test_rows_that_may_be_padded_have_padding() -> None:
    rows = torch.tensor([[7], [8], [9], [15], [31]])
    for bucket in buckets_of_few_shapes(rows, LINE, once=1e4, most=None):
        assert bucket.lengths is not None
        assert (rows[bucket.places] < bucket.lengths[0]).all()


@pytest.mark.parametrize("ragged", [replace(LINE, masked=False), replace(LINE, limit=None)])
def test_rows_that_may_not_be_padded_are_not_filled(ragged: RaggedAxes) -> None:
    rows = torch.tensor([[7], [8], [9], [9]])
    assert all(bucket.rows is None for bucket in buckets_of_few_shapes(rows, ragged, once=1e4, most=None))


def test_positions_that_cost_more_than_passes_are_not_filled() -> None:
    rows = torch.tensor([[7], [8], [9], [9]])
    assert all(bucket.rows is None for bucket in buckets_of_few_shapes(rows, LINE, once=0.1, most=None))


def with_limit(kind: str) -> Case:
    found = case(kind)
    return replace(found, ragged=replace(found.ragged, limit=LIMIT))


@pytest.mark.parametrize("factors", [False, True], ids=["norms", "factors"])
@pytest.mark.parametrize("kind", ["bert", "gpt2", "llama"])
def test_replayed_buckets_give_each_rows_own_numbers(kind: str, factors: bool) -> None:
    ragged = with_limit(kind)
    lengths = [*np.random.default_rng(0).integers(3, 24, 75).tolist(), 39, 40, 5]
    rows = ragged.rows(lengths)
    stream = ragged.stream(rows, chunk_size=6, model_size=TINY)
    chunks = list(stream.run(len(rows), [Watched(factors)]))
    how = per_sample_gradients if factors else per_sample_square_norms
    assert stream.replays[how].chunks > 2
    expected = flat(ragged.gradients(rows))
    assert_close(torch.cat([chunk.values["norm"] for chunk in chunks]), expected.square().sum(1))
    assert_close(torch.cat([chunk.values["loss"] for chunk in chunks]), ragged.losses(rows))


def test_ragged_chunks_of_a_run_that_goes_on_are_padded_as_in_the_whole_run() -> None:
    ragged = with_limit("bert")
    rows = ragged.rows(np.random.default_rng(0).integers(3, 24, 36).tolist())
    found = []
    for start in (0, 30):
        stream = ragged.stream(rows, chunk_size=6, model_size=TINY)
        (*_, last) = stream.run(len(rows), [Watched(False)], start=start)
        found.append(last.values)
    for name, values in found[0].items():
        assert torch.equal(values, found[1][name]), name


@pytest.mark.long
def test_nine_of_ten_chunks_of_many_ragged_texts_are_replayed() -> None:
    ragged = with_limit("bert")
    lengths = np.random.default_rng(1).integers(3, 39, 5000).tolist()
    rows = ragged.rows(lengths)
    stream = ragged.stream(rows, chunk_size=16, model_size=TINY)
    list(stream.run(len(rows), [Watched(False)]))
    assert stream.counts.replayed >= 0.9 * stream.counts.chunks
