"""Layouts: bookkeeping of transposes and reshapes, beside torch doing them."""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from psgrad.engine.gradients.layout import AxisLayout

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
def test_layout_reshape_refused_where_axes_overlap(shape: list[int], data: st.DataObject) -> None:
    value = numbered(shape)
    wanted = data.draw(other_shapes(value.numel()))
    result = AxisLayout.identity(shape).reshape(wanted)
    # Both shapes cut the elements into runs; a common refinement exists where each run is a multiple of the
    # next.
    cuts = sorted({math.prod(s[k:]) for s in (shape, wanted) for k in range(len(s) + 1)}, reverse=True)
    assert (result is not None) == all(a % b == 0 for a, b in pairwise(cuts))
    if result is not None:
        assert torch.equal(result.apply(value), value.reshape(wanted))


@given(
    shape=st.lists(st.integers(1, 3), min_size=2, max_size=3),
    lead=st.lists(st.integers(0, 3), max_size=2),
    data=st.data(),
)
def test_layout_leading_axes(shape: list[int], lead: list[int], data: st.DataObject) -> None:
    dims = data.draw(st.permutations(range(len(shape))))
    layout = AxisLayout.identity(shape).permute(dims)
    assert layout is not None
    value = numbered(shape, tuple(lead))
    expected = value.permute(*range(len(lead)), *(len(lead) + d for d in dims))
    assert torch.equal(layout.apply(value, lead=len(lead)), expected)
    assert torch.equal(layout.invert(expected, shape, lead=len(lead)), value)


def test_layout_reshape_wrong_number_of_elements() -> None:
    assert AxisLayout.identity((2, 3)).reshape((2, 2)) is None
    assert AxisLayout.identity((4, 3)).reshape((3, 4)) is None
    assert AxisLayout.identity((4, 3)).reshape((2, 6)) is not None
    assert AxisLayout.identity((0, 3)).reshape((3, 0)) is None


def test_layout_is_identity() -> None:
    swapped = AxisLayout.identity((2, 3)).permute((1, 0))
    assert swapped is not None
    assert not swapped.is_identity
    back = swapped.permute((1, 0))
    assert back is not None
    assert back.is_identity


def test_layout_window_is_not_identity() -> None:
    part = AxisLayout.identity((2, 3)).embed(0, 1, 4)
    assert not part.is_identity
    assert part.bare.is_identity
    assert part.shape == (4, 3)
    assert AxisLayout.identity((2, 3)).embed(1, 0, 3) == AxisLayout.identity((2, 3))


@given(shape=shapes, data=st.data())
def test_layout_reshape_permute_and_windows_as_torch(shape: list[int], data: st.DataObject) -> None:
    layout, value = AxisLayout.identity(shape), numbered(shape) + 1
    plain = value
    for _ in range(data.draw(st.integers(1, 5))):
        kind = data.draw(st.sampled_from(["permute", "reshape", "embed"]))
        if kind == "permute":
            dims = data.draw(st.permutations(range(plain.dim())))
            result, plain = layout.permute(dims), plain.permute(dims)
            assert result is not None  # axes can always be put in another order
        elif kind == "embed" and plain.dim() and plain.numel() < 200:
            dim = data.draw(st.integers(0, plain.dim() - 1))
            start, more = data.draw(st.integers(0, 2)), data.draw(st.integers(0, 2))
            stop = start + plain.shape[dim]
            wider = [stop + more if d == dim else size for d, size in enumerate(plain.shape)]
            result = layout.embed(dim, start, stop + more)
            plain = torch.zeros(wider, dtype=plain.dtype).slice_scatter(plain, dim, start, stop)
        else:
            wanted = data.draw(other_shapes(plain.numel()))
            result = layout.reshape(wanted)
            plain = plain if result is None else plain.reshape(wanted)
        if result is None:
            continue
        layout = result
        assert layout.shape == tuple(plain.shape)
        assert torch.equal(layout.apply(value), plain)
        assert torch.equal(layout.invert(plain, shape), value)
        assert torch.equal(plain[layout.slices], layout.bare.apply(value))
        assert torch.equal(layout.without_ones.apply(value), plain)
