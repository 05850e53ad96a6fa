"""Layouts: bookkeeping of transposes and reshapes, beside torch doing them."""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from psgrad.engine.gradients.layout import Layout

shapes = st.lists(st.integers(1, 4), min_size=0, max_size=4)


@st.composite
def other_shapes(draw: st.DrawFn, count: int) -> list[int]:
    """A shape with `count` elements."""
    sizes = []
    while count > 1 and draw(st.booleans()):
        size = draw(st.sampled_from([d for d in range(1, count + 1) if count % d == 0]))
        sizes.append(size)
        count //= size
    return [*sizes, count]


def numbered(shape: list[int] | tuple[int, ...], lead: tuple[int, ...] = ()) -> Tensor:
    return torch.arange(math.prod(lead) * math.prod(shape)).reshape([*lead, *shape])


@given(shape=shapes, data=st.data())
def test_a_chain_of_relabellings_does_what_torch_does(shape: list[int], data: st.DataObject) -> None:
    layout, value = Layout.identity(shape), numbered(shape)
    plain = value
    for _ in range(data.draw(st.integers(0, 4))):
        if data.draw(st.booleans()):
            dims = data.draw(st.permutations(range(plain.dim())))
            found, plain = layout.permute(dims), plain.permute(dims)
            assert found is not None  # axes can always be put in another order
        else:
            wanted = data.draw(other_shapes(plain.numel()))
            found = layout.reshape(wanted)
            if found is None:
                continue
            plain = plain.reshape(wanted)
        layout = found
        assert layout.shape == tuple(plain.shape)
        assert torch.equal(layout.apply(value), plain)
        assert torch.equal(layout.invert(plain, shape), value)


@given(shape=shapes, data=st.data())
def test_one_reshape_is_refused_only_where_the_axes_overlap(shape: list[int], data: st.DataObject) -> None:
    value = numbered(shape)
    wanted = data.draw(other_shapes(value.numel()))
    found = Layout.identity(shape).reshape(wanted)
    # Both shapes cut the elements into runs; a common refinement exists where each run is a multiple of the next.
    cuts = sorted({math.prod(s[k:]) for s in (shape, wanted) for k in range(len(s) + 1)}, reverse=True)
    assert (found is not None) == all(a % b == 0 for a, b in pairwise(cuts))
    if found is not None:
        assert torch.equal(found.apply(value), value.reshape(wanted))


@given(shape=st.lists(st.integers(1, 3), min_size=2, max_size=3), lead=st.lists(st.integers(0, 3), max_size=2), data=st.data())
def test_axes_in_front_are_left_alone(shape: list[int], lead: list[int], data: st.DataObject) -> None:
    dims = data.draw(st.permutations(range(len(shape))))
    layout = Layout.identity(shape).permute(dims)
    assert layout is not None
    value = numbered(shape, tuple(lead))
    expected = value.permute(*range(len(lead)), *(len(lead) + d for d in dims))
    assert torch.equal(layout.apply(value, lead=len(lead)), expected)
    assert torch.equal(layout.invert(expected, shape, lead=len(lead)), value)


def test_another_number_of_elements_is_refused() -> None:
    assert Layout.identity((2, 3)).reshape((2, 2)) is None
    assert Layout.identity((4, 3)).reshape((3, 4)) is None
    assert Layout.identity((4, 3)).reshape((2, 6)) is not None
    assert Layout.identity((0, 3)).reshape((3, 0)) is None


def test_the_identity_is_known_as_such() -> None:
    swapped = Layout.identity((2, 3)).permute((1, 0))
    assert swapped is not None
    assert not swapped.is_identity
    back = swapped.permute((1, 0))
    assert back is not None
    assert back.is_identity
