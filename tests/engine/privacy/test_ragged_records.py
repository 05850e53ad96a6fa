"""Clipped sums of records that differ in length: the bound holds for each, and no record sees another's
length.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from psgrad.engine.execution.buckets import ModelSize
from psgrad.engine.execution.streaming import Stream
from psgrad.engine.privacy.batches import RecordStreams, stream_source
from psgrad.engine.privacy.clipping import MARGIN, Clipping
from psgrad.engine.privacy.records import RecordReader, Records
from psgrad.engine.privacy.sum_programs import SumPrograms
from psgrad.errors import DataError
from psgrad.ragged import Block
from tests.engine.execution.ragged_models import Case, Row, case, flat

LARGE, SMALL = ModelSize(1, 10**12), ModelSize(10**9, 1)
LENGTHS = [3, 9, 2, 3, 7, 12, 1, 5]
KINDS = ["mean", "gpt2", "lstm"]


def clipped(
    ragged: Case,
    rows: Sequence[Row],
    clipping: Clipping,
    alone: bool = False,
    programs: SumPrograms | None = None,
    **options: Any,
) -> Any:
    stream = ragged.stream(rows, **{"model_size": LARGE, **options})
    return stream_source(stream, len(rows), None, programs, alone)(clipping)


def as_row(sums: dict[str, Tensor]) -> Tensor:
    return torch.cat([value.flatten() for value in sums.values()])


def loop(gradients: Tensor, bound: float) -> tuple[Tensor, Tensor, Tensor]:
    """(the clipped sum, the norms, the factors) of gradients [n, p]."""
    norms = gradients.norm(dim=1)
    factors = ((1 - MARGIN) * bound / norms).clamp(max=1)
    return factors @ gradients, norms, factors


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_clipped_sum_of_ragged_records_is_that_of_a_loop(kind: str) -> None:
    ragged = case(kind)
    rows = ragged.rows(LENGTHS)
    gradients = flat(ragged.gradients(rows))
    bound = float(gradients.norm(dim=1).median())
    expected, norms, factors = loop(gradients, bound)
    clipping = Clipping.flat(ragged.objective.params, bound)
    for options in ({"chunk_size": 8}, {"chunk_size": 3}, {"chunk_size": "auto", "tokens": 12}):
        found = clipped(ragged, rows, clipping, **options)
        torch.testing.assert_close(as_row(found.sums), expected, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(found.records.norms, norms, rtol=1e-9, atol=0)
        torch.testing.assert_close(found.records.factors[:, 0], factors, rtol=1e-9, atol=0)
        torch.testing.assert_close(found.records.losses, ragged.losses(rows), rtol=1e-9, atol=0)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["mean", "lstm"])
@settings(max_examples=8, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    scale=st.sampled_from([1e-12, 1.0, 1e12]),
    poison=st.sampled_from([None, torch.inf, torch.nan]),
)
def test_ragged_record_adds_no_more_than_its_bound(
    kind: str, lengths: list[int], scale: float, poison: float | None
) -> None:
    ragged = case(kind, torch.float32)
    plain = ragged.criterion
    ragged = replace(ragged, criterion=lambda output, target: scale * plain(output, target))
    rows = ragged.rows(lengths)
    if poison is not None and kind == "lstm":
        rows[0][0][0][0, 0] = poison
    clipping = Clipping.flat(ragged.objective.params, 0.5)
    whole = clipped(ragged, rows, clipping, chunk_size=len(rows))
    assert bool(torch.isfinite(as_row(whole.sums)).all())
    assert float(as_row(whole.sums).norm()) <= 0.5 * len(rows)
    for place in range(len(rows)):
        others = [row for other, row in enumerate(rows) if other != place]
        rest = clipped(ragged, others, clipping, chunk_size=len(rows)).sums if others else None
        part = as_row(whole.sums) - (0 if rest is None else as_row(rest))
        assert float(part.norm()) <= 0.5 * (1 + 1e-6)


@pytest.mark.long
def test_ragged_records_alone_are_the_same_in_any_company() -> None:
    ragged = case("gpt2", torch.float32)
    rows = ragged.rows(LENGTHS)
    clipping = Clipping.flat(ragged.objective.params, 0.5)
    whole = clipped(ragged, rows, clipping, alone=True).sums
    each = [clipped(ragged, [row], clipping, alone=True).sums for row in rows]
    for name, value in whole.items():
        assert torch.equal(value, functools.reduce(torch.add, (sums[name] for sums in each)))


@pytest.mark.parametrize("kind", ["gpt2", "bert"])
def test_ragged_records_of_few_shapes_are_replayed(kind: str) -> None:
    """Filled and padded chunks give the sums of a loop, whatever is drawn in a step."""
    plain = case(kind)
    ragged = replace(plain, ragged=replace(plain.ragged, limit=16))
    programs, replayed = SumPrograms(), []
    for step in range(8):
        rows = ragged.rows([1 + (step + 3 * place) % 7 for place in range(5 + step % 3)])
        expected, *_ = loop(flat(ragged.gradients(rows)), 0.5)
        clipping = Clipping.flat(ragged.objective.params, 0.5)
        found = clipped(ragged, rows, clipping, programs=programs, chunk_size=8, model_size=SMALL)
        torch.testing.assert_close(as_row(found.sums), expected, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(found.records.losses, ragged.losses(rows), rtol=1e-9, atol=0)
        replayed.append(programs.chunks)
    assert replayed[-1] >= 4


# -- records of several rows ---------------------------------------------------------------------------------


OWNERS = [0, 1, 0, 2, 1, 0, 3, 2]  # of the rows of LENGTHS


def of_users(ragged: Case, rows: Sequence[Row]) -> Tensor:
    """[4, p]: the mean gradient of each one's rows."""
    each, owners = flat(ragged.gradients(rows)), np.array(OWNERS)
    return torch.stack([each[owners == own].mean(0) for own in range(4)])


def reader_of(ragged: Case, rows: Sequence[Row], owners: list[int], **options: Any) -> RecordReader:
    return RecordReader(Records.of_units(np.array(owners)), ragged.block(rows), **options)


def test_records_of_ragged_rows_have_the_mean_gradient_of_their_rows() -> None:
    ragged = case("mean")
    rows = ragged.rows(LENGTHS)
    reader = reader_of(ragged, rows, OWNERS)
    reader.draw(np.arange(4))
    objective = ragged.objective
    stream = Stream(reader.loss_of(objective.loss), objective.params, reader, chunk_size=4, model_size=LARGE)
    found = flat(stream.gradients(range(4)).materialise())
    torch.testing.assert_close(found, of_users(ragged, rows), rtol=1e-9, atol=1e-12)


def test_records_of_rows_of_unequal_length_without_a_mask_are_refused() -> None:
    ragged = case("lstm")
    rows = ragged.rows([3, 3, 5, 4])
    reader = reader_of(ragged, rows, [0, 0, 1, 1])
    reader.draw(np.array([0]))
    assert isinstance(reader.take(range(1)), Block)
    reader.draw(np.array([0, 1]))
    with pytest.raises(DataError, match=r"record 1 has rows of 4 to 5 positions") as raised:
        reader.take(range(2))
    assert "takes a mask of the positions" in str(raised.value)


@pytest.mark.long
def test_record_streams_of_ragged_rows_are_clipped_like_a_loop_over_users() -> None:
    ragged = case("bert")
    rows = ragged.rows(LENGTHS)
    whole, objective = ragged.block(rows), ragged.objective
    streams = RecordStreams(
        Records.of_units(np.array(OWNERS)),
        whole,
        objective.loss,
        objective.params,
        lambda loss, read: Stream(loss, objective.params, read, chunk_size=4, model_size=LARGE),
    )
    users = of_users(ragged, rows)
    bound = float(users.norm(dim=1).median())
    expected, *_ = loop(users, bound)
    found = streams.source(np.arange(4))(Clipping.flat(objective.params, bound))
    torch.testing.assert_close(as_row(found.sums), expected, rtol=1e-9, atol=1e-12)
