"""Inner products between samples: each order of computing them, at the limits of floating point, in bounded
memory, and what it saves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from psgrad.engine.gradients import PerSampleGradients
from psgrad.engine.gradients import terms as term_kinds
from psgrad.engine.gradients.costs import Machine
from psgrad.engine.gradients.deferral import DeferredGradient, Placed
from psgrad.engine.gradients.inner import inner_products
from psgrad.engine.gradients.inner import inner_products as prices
from psgrad.engine.gradients.inner import regions as tiles
from psgrad.engine.gradients.inner.inner_products import GRAM, VALUES
from psgrad.engine.gradients.inner.materialised import LONGEST_SUM
from psgrad.engine.gradients.inner.regions import regions
from psgrad.engine.gradients.machine import machine as machine_of
from psgrad.engine.gradients.terms import Convolution, Dense, GroupedProduct, Lookup, Product, Term
from psgrad.engine.transforms.rules.convolution_weights import Geometry
from tests.engine.gradients.test_terms import SHAPES, exact, gradients_of, kinds, largest_of

few = st.integers(1, 4)
Gradient = tuple[Term, ...]


def error(found: Tensor, one: Gradient, other: Gradient) -> float:
    """The largest error, by the lengths of the two gradients."""
    x, y = exact(one), exact(other)
    scale = x.norm(dim=1)[:, None] * y.norm(dim=1)
    assert found.shape == scale.shape
    assert torch.isfinite(found).all()
    return (
        float(((found - x @ y.t()).abs() / scale.clamp(min=torch.finfo(torch.float64).tiny)).max())
        if found.numel()
        else 0.0
    )


@contextmanager
def in_way(way: str, block_bytes: int = 4 << 20, side_bytes: int = 64 << 20) -> Iterator[None]:
    """This order is used, whatever it costs; and blocks may be small."""
    with (
        mock.patch.object(inner_products, "cheapest_order", return_value=way),
        mock.patch.dict(term_kinds.BLOCK_BYTES, {"cpu": block_bytes, "cuda": block_bytes}),
        mock.patch.dict(tiles.SIDE_BYTES, {"cpu": side_bytes, "cuda": side_bytes}),
    ):
        yield


# -- Every order gives the same numbers ----------------------------------------------------------------------


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


@st.composite
def product_pairs(draw: st.DrawFn) -> tuple[list[Gradient], tuple[int, ...]]:
    g, a, b = draw(few), draw(few), draw(few)
    sides = []
    for _ in range(2):
        n, t = draw(st.integers(1, 9)), draw(st.integers(0, 5))
        sides.append((Product(randn(n, g, t, a), randn(n, g, t, b)),))
    return sides, (g, a, b)


@st.composite
def table_pairs(draw: st.DrawFn) -> tuple[list[Gradient], tuple[int, ...]]:
    count, b = draw(few), draw(few)
    sides = []
    for _ in range(2):
        n, t = draw(st.integers(1, 9)), draw(st.integers(0, 6))
        values = randn(n, t, b)
        values[:, ::3] = 0  # as padding is
        sides.append((Lookup(torch.randint(count, (n, t)), values, count),))
    return sides, (count, b)


@st.composite
def tied_pairs(draw: st.DrawFn) -> tuple[list[Gradient], tuple[int, ...]]:
    """Tables and products over the same elements: every two kinds meet."""
    count, b = draw(few), draw(few)
    sides: list[Gradient] = []
    for letters in (draw(st.sampled_from(["r", "p", "rp", "pr"])), "rp"):
        n, t = draw(st.integers(1, 9)), draw(st.integers(1, 5))
        table = Lookup(torch.randint(count, (n, t)), randn(n, t, b), count)
        matrix = Product(randn(n, 1, t, count), randn(n, 1, t, b))
        sides.append(tuple({"r": table, "p": matrix}[kind] for kind in letters))
    return sides, (count, b)


@pytest.mark.long
@pytest.mark.every(3)
@pytest.mark.parametrize(
    ("way", "block", "side"),
    [
        (GRAM, 1, 1),
        (GRAM, 2000, 500),
        (VALUES, 1, 1),
        (VALUES, 400, 900),
    ],
)
@given(drawn=st.one_of(product_pairs(), table_pairs(), tied_pairs()), permuted=st.booleans())
def test_inner_products_every_order_equals_materialised(
    way: str, block: int, side: int, drawn: tuple[list[Gradient], tuple[int, ...]], permuted: bool
) -> None:
    (one, other), shape = drawn
    order = tuple(reversed(range(len(shape)))) if permuted else ()
    x, y = (gradients_of(*each, shape=shape, order=order) for each in (one, other))
    with in_way(way, block, side):
        assert error(x.inner(y), one, other) <= 1e-12
        assert error(y.inner(x), other, one) <= 1e-12
        gram = y.gram()
    assert error(gram, other, other) <= 1e-12
    assert torch.equal(gram, gram.t())


@pytest.mark.parametrize("side", [1, 3000, 64 << 20])
def test_inner_products_pieces_of_a_large_parameter(side: int) -> None:
    """Terms that are cut into rows: products, tables, values and convolutions, one group or several."""
    geometry = Geometry((1,), (1,), (1,), False, (0,), 1)
    turned = geometry._replace(transposed=True)
    count, columns = 40, 300  # more elements than one product adds up
    assert count * columns > LONGEST_SUM
    index = torch.randint(count, (5, 4))
    kinds: dict[str, Callable[[int], Term]] = {
        "product": lambda n: Product(randn(n, 1, 3, count), randn(n, 1, 3, columns)),
        "groups": lambda n: Product(randn(n, count, 2, 20), randn(n, count, 2, 15)),
        "table": lambda n: Lookup(index[:n], randn(n, 4, columns), count),
        "experts": lambda n: GroupedProduct(index[:n], randn(n, 4, 20), randn(n, 4, 15), count),
        "dense": lambda n: Dense(randn(n, count, columns)),
        "convolution": lambda n: Convolution(
            randn(n, 1, count, 4), randn(n, 1, 100, 4), torch.Size([count, 100, 3]), geometry
        ),
        "transposed": lambda n: Convolution(
            randn(n, 1, 100, 4), randn(n, 1, count, 4), torch.Size([count, 100, 3]), turned
        ),
    }
    pairs = [(name, name) for name in kinds] + [
        ("product", "table"),
        ("dense", "product"),
        ("groups", "dense"),
        ("experts", "groups"),
        ("convolution", "product"),
    ]
    for left, right in pairs:
        one, other = (kinds[left](5),), (kinds[right](4),)
        x, y = (gradients_of(*each, shape=(count, columns)) for each in (one, other))
        with in_way(VALUES, side_bytes=side):
            assert error(x.inner(y), one, other) <= 1e-12, (left, right)
            assert error(x.gram(), one, one) <= 1e-12, (left, right)


def test_inner_products_disjoint_windows() -> None:
    """Rows 0, 1 of one gradient, and rows 2, 3 of the other; rows 1, 2 of a third have one in common with
    each.
    """

    def rows_of_parameter(start: int) -> DeferredGradient:
        inside = DeferredGradient.of(Product(randn(3, 1, 2, 2), randn(3, 1, 2, 5)), (2, 5))
        layout = inside.terms[0].layout.embed(0, start, 4)
        return inside.with_terms([Placed(inside.terms[0].term, layout)], (4, 5))

    top, bottom, middle = (
        PerSampleGradients.of({"p": rows_of_parameter(start)}, torch.zeros(3)) for start in (0, 2, 1)
    )
    assert regions(*(each.parts[0].gradients["p"].terms for each in (top, bottom))) == []
    assert not top.inner(bottom).any()
    values = [each.materialise()["p"].flatten(1) for each in (top, middle, bottom)]
    torch.testing.assert_close(top.inner(middle), values[0] @ values[1].t(), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(middle.inner(bottom), values[1] @ values[2].t(), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(top.gram(), values[0] @ values[0].t(), rtol=1e-10, atol=1e-10)


# -- The limits of floating point ----------------------------------------------------------------------------


KINDS = (
    *("dense", "outer product", "outer products", "materialise", "rows", "grouped", "convolution"),
    *("tied", "unlike"),
)
WAYS = [GRAM, VALUES]


def ways_of(gradient: Gradient) -> list[str]:
    if not all(isinstance(term, Product | Lookup) for term in gradient):
        return [VALUES]
    return WAYS


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("scale", "other_scale"),
    [(1e-38, 1.0), (1e-38, 1e-38), (1e-25, 1e-21), (1e-16, 1e25), (1e35, 1e35), (1.0, 1.0)],
)
def test_inner_products_beyond_float32_range(kind: str, scale: float, other_scale: float) -> None:
    one, other = kinds(scale, 4)[kind], kinds(other_scale, 5)[kind]
    x, y = (gradients_of(*each, shape=SHAPES.get(kind)) for each in (one, other))
    for way in ways_of(one):
        with in_way(way):
            assert error(x.inner(y), one, other) <= 1e-5, way
            assert error(x.gram(), one, one) <= 1e-5, way


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("rest", [0.3, 1e-2, 1e-3])
def test_inner_products_cancelling_uses_of_a_tied_table(way: str, rest: float) -> None:
    index, result = torch.tensor([[0, 2], [1, 1], [3, 0]]), torch.randn(3, 2, 6)
    one_hot = torch.nn.functional.one_hot(index, 4).float()
    back = Product(-(one_hot + rest * torch.randn(3, 2, 4)).unsqueeze(1), result.unsqueeze(1))
    one, other = (Lookup(index, result, 4), back), (Lookup(index, torch.randn(3, 2, 6), 4),)
    x, y = gradients_of(*one, shape=(4, 6)), gradients_of(*other)
    with in_way(way):
        assert error(x.inner(y), one, other) <= 1e-5
        assert error(y.inner(x), other, one) <= 1e-5
        assert error(x.gram(), one, one) <= 1e-5


@pytest.mark.parametrize("kind", KINDS)
def test_inner_products_nonfinite_samples(kind: str) -> None:
    torch.manual_seed(1)
    gradient = kinds(1.0, 5)[kind]
    torch.manual_seed(1)
    broken = kinds(1.0, 5)[kind]
    for term in broken:
        factor = next(f for f in term.factors if f.is_floating_point())
        ones = factor.dim() - 1
        factor[1, *[0] * ones], factor[3, *[-1] * ones] = math.nan, math.inf
    spoilt, right = (gradients_of(*each, shape=SHAPES.get(kind)) for each in (broken, gradient))
    for way in ways_of(gradient):
        with in_way(way):
            result, sound, gram = spoilt.inner(right), right.gram(), spoilt.gram()
        whole = [0, 2, 4]
        assert not torch.isfinite(result[[1, 3]]).any()
        assert not torch.isfinite(gram[[1, 3]]).any()
        assert not torch.isfinite(gram[:, [1, 3]]).any()
        torch.testing.assert_close(result[whole], sound[whole], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(gram[whole][:, whole], sound[whole][:, whole], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_inner_products_half_precision(kind: str) -> None:
    halves = tuple(term.at(slice(None), torch.bfloat16) for term in kinds(1.0, 6)[kind])
    for way in ways_of(halves):
        with in_way(way):
            assert error(gradients_of(*halves, shape=SHAPES.get(kind)).gram(), halves, halves) <= 1e-5


def test_inner_products_long_sums() -> None:
    """Numbers of one sign, of which a float32 product of matrices loses most: a million elements, and many
    positions.
    """
    value = (Dense(torch.rand(2, 1_000_000)),)
    assert error(gradients_of(*value).gram(), value, value) <= 1e-6
    positions = (Product(torch.rand(2, 1, 3000, 2), torch.rand(2, 1, 3000, 3)),)
    for way in (GRAM, VALUES):
        with in_way(way):
            assert error(gradients_of(*positions).gram(), positions, positions) <= 1e-6


# -- Bounded memory, and less work ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda n: Product(torch.randn(n, 1, 1, 2000), torch.randn(n, 1, 1, 2000)), (2000, 2000)),
        (lambda n: Product(torch.randn(n, 1, 20, 500), torch.randn(n, 1, 20, 2000)), (500, 2000)),
        (lambda n: Product(torch.randn(n, 1, 100, 500), torch.randn(n, 1, 100, 600)), (500, 600)),
        (lambda n: Lookup(torch.randint(50_000, (n, 30)), torch.randn(n, 30, 20), 50_000), (50_000, 20)),
    ],
    ids=["vectors", "some positions", "many positions", "table"],
)
def test_inner_products_never_materialise_all_samples(
    make: Callable[[int], Term], shape: tuple[int, ...]
) -> None:
    n, m = 60, 80
    x, y = gradients_of(make(n), shape=shape), gradients_of(make(m), shape=shape)
    kept = max(
        factor.numel()
        for factor in (
            *x.parts[0].gradients["p"].terms[0].term.factors,
            *y.parts[0].gradients["p"].terms[0].term.factors,
        )
    )
    allowed = max(kept, (4 << 20) // 2, m * (LONGEST_SUM + shape[1]))
    assert allowed < n * math.prod(shape) / 2
    for query in (lambda: x.inner(y), x.gram):
        assert largest_of(query) <= allowed


def operations(query: Callable[[], object]) -> int:
    with FlopCounterMode(display=False) as counter:
        query()
    return int(counter.get_total_flops())


@pytest.mark.parametrize("positions", [1, 30])
def test_inner_products_gram_matrix_is_half_the_work(positions: int) -> None:
    grads = gradients_of(Product(torch.randn(200, 1, positions, 30), torch.randn(200, 1, positions, 40)))
    for way in (GRAM, VALUES):
        with in_way(way):
            # materialised: both sides' gradients once, too, against one side's
            assert operations(grads.gram) <= 0.6 * operations(lambda: grads.inner(grads))


# -- The choice ----------------------------------------------------------------------------------------------


@pytest.fixture
def machine() -> Machine:
    return machine_of(torch.device("cpu"))


def way_of(one: Term, other: Term, machine: Machine) -> str:
    (region,) = regions((Placed.plain(one),), (Placed.plain(other),))
    return prices.cheapest_order(region, torch.float32, machine)


def product(n: int, t: int, a: int, b: int) -> Product:
    """Of sizes alone: no number is looked at."""
    return Product(torch.empty(1).expand(n, 1, t, a), torch.empty(1).expand(n, 1, t, b))


def test_inner_products_cheapest_order(machine: Machine) -> None:
    assert way_of(product(1000, 1, 48, 512), product(1000, 1, 48, 512), machine) == GRAM
    assert way_of(product(1000, 64, 32, 144), product(1000, 64, 32, 144), machine) == VALUES
    assert way_of(product(1000, 4, 1000, 1000), product(1000, 4, 1000, 1000), machine) == GRAM
