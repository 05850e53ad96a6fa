"""Blocks of rows that differ in length."""

from __future__ import annotations

import pytest
import torch

from psgrad.ragged import Block, RaggedAxes, joined

AXES = RaggedAxes((((0, 0),), ((1, 1), (0, 0)), ()), (-7, 0.5, 0), masked=True)


def block(rows: list[tuple[int, int]], tokens: int, width: int) -> Block:
    """Rows of these lengths: ids [n, tokens], numbers [n, tokens, width] and a target [n]; padded."""
    ids = torch.full((len(rows), tokens), -7)
    numbers = torch.full((len(rows), tokens, width), 0.5)
    for row, (t, w) in enumerate(rows):
        ids[row, :t] = torch.arange(t) + 10 * t
        numbers[row, :t, :w] = float(t + w)
    return Block((ids, numbers), torch.tensor([t for t, _ in rows]), torch.tensor(rows), AXES)


def assert_same(one: Block, other: Block) -> None:
    assert one.ragged == other.ragged
    tensors = zip(
        (*one.inputs, one.target, one.lengths), (*other.inputs, other.target, other.lengths), strict=True
    )
    for x, y in tensors:
        assert x is not None
        assert y is not None
        assert torch.equal(x, y)


def test_joined_pads_to_the_longest_row_on_every_axis() -> None:
    parts = [block([(2, 1)], 2, 1), block([(1, 3), (4, 2)], 4, 3)]
    assert_same(joined(parts), block([(2, 1), (1, 3), (4, 2)], 4, 3))


def test_slice_of_a_block_is_cut_to_its_longest_row_without_a_copy() -> None:
    whole = block([(2, 1), (1, 3), (4, 2)], 6, 5)
    assert_same(whole.at(slice(None)), block([(2, 1), (1, 3), (4, 2)], 4, 3))
    assert_same(whole.at(slice(0, 2)), block([(2, 1), (1, 3)], 2, 3))
    assert whole.at(slice(None)).inputs[0].data_ptr() == whole.inputs[0].data_ptr()


def test_at_takes_rows_with_their_lengths_in_the_given_order() -> None:
    whole = block([(2, 1), (1, 3), (4, 2)], 4, 3)
    assert_same(whole.at([1, 0, 1]), block([(1, 3), (2, 1), (1, 3)], 2, 3))


def test_grouped_rows_have_the_longest_length_of_their_group() -> None:
    found = block([(2, 1), (1, 3), (4, 2)], 4, 3).grouped(torch.tensor([[0, 1], [1, 1]]))
    assert found.lengths is not None
    assert found.lengths.tolist() == [[2, 3], [1, 3]]
    assert [tuple(x.shape) for x in found.inputs] == [(2, 2, 2), (2, 2, 2, 3)]


def test_more_inputs_and_another_target_are_not_ragged() -> None:
    whole = block([(2, 1), (1, 3)], 4, 3)
    more = whole.with_inputs(torch.arange(2), torch.ones(2, 9)).with_target(torch.zeros(2, 8))
    shapes = [tuple(x.shape) for x in more.at(slice(None)).inputs]
    assert shapes == [(2, 2), (2, 2, 3), (2,), (2, 9)]
    assert more.target is not None
    assert torch.equal(more.at(slice(None)).target, more.target)


def test_joined_blocks_without_target_and_of_equal_rows() -> None:
    plain = joined([Block((torch.zeros(1, 2),), None), Block((torch.ones(2, 2),), None)])
    assert plain.target is None
    assert plain.lengths is None
    assert plain.inputs[0].tolist() == [[0, 0], [1, 1], [1, 1]]
    ragged = joined([block([(k, 1)], k, 1).with_target(None) for k in (1, 3)])
    assert ragged.target is None
    assert ragged.inputs[0].tolist() == [[10, -7, -7], [30, 31, 32]]


def test_lengths_and_ragged_axes_come_together() -> None:
    with pytest.raises(TypeError, match="both lengths and ragged"):
        Block((torch.zeros(1, 2),), None, torch.tensor([[2]]))
    with pytest.raises(TypeError, match="one entry for each input"):
        Block((torch.zeros(1, 2),), None, torch.tensor([[2]]), RaggedAxes((((0, 0),),), (0,), True))
