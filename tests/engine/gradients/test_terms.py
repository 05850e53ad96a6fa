"""Terms of deferred gradients: every query beside the written-out value, at the limits of floating point, and
in bounded memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from psgrad.engine.execution.chunk_replay import ChunkReplay as ChunkReplay  # which makes terms pytrees
from psgrad.engine.gradients import per_sample_gradients, per_sample_square_norms
from psgrad.engine.gradients.costs import cheapest, norm_order_costs
from psgrad.engine.gradients.deferral import DeferredGradient, Placed
from psgrad.engine.gradients.layout import AxisLayout
from psgrad.engine.gradients.machine import machine
from psgrad.engine.gradients.queries import PerSampleGradients
from psgrad.engine.gradients.square_norms import reliable_square_norms
from psgrad.engine.gradients.terms import (
    BLOCK_BYTES,
    Convolution,
    Dense,
    GroupedProduct,
    Image,
    Lookup,
    Product,
    Term,
    blocks,
    sum_of_products,
)
from psgrad.engine.transforms.recorder import record
from psgrad.engine.transforms.rules.convolution_weights import Geometry
from tests.engine.gradients.agreement import LargestTensor

samples = st.integers(0, 4)
few = st.integers(1, 4)


# -- The terms, and their values by definition ---------------------------------------------------------------


@st.composite
def dense(draw: st.DrawFn) -> tuple[Term, Tensor]:
    value = torch.randn(draw(samples), *draw(st.lists(few, max_size=3)), dtype=torch.float64)
    return Dense(value), value


@st.composite
def product(draw: st.DrawFn) -> tuple[Term, Tensor]:
    n, g, t, a, b = draw(samples), draw(few), draw(st.integers(1, 9)), draw(few), draw(few)
    left, right = torch.randn(n, g, t, a, dtype=torch.float64), torch.randn(n, g, t, b, dtype=torch.float64)
    return Product(left, right), torch.einsum("ngta,ngtb->ngab", left, right)


@st.composite
def rows(draw: st.DrawFn) -> tuple[Term, Tensor]:
    n, t, count, b = draw(samples), draw(st.integers(1, 7)), draw(few), draw(few)
    index, value = torch.randint(count, (n, t)), torch.randn(n, t, b, dtype=torch.float64)
    return Lookup(index, value, count), torch.einsum("ntc,ntb->ncb", F.one_hot(index, count).double(), value)


@st.composite
def grouped(draw: st.DrawFn) -> tuple[Term, Tensor]:
    n, t, count, a, b = draw(samples), draw(st.integers(1, 9)), draw(few), draw(few), draw(few)
    index = torch.randint(count, (n, t))
    left, right = torch.randn(n, t, a, dtype=torch.float64), torch.randn(n, t, b, dtype=torch.float64)
    value = torch.einsum("ntg,nta,ntb->ngab", F.one_hot(index, count).double(), left, right)
    return GroupedProduct(index, left, right, count), value


@st.composite
def convolution(draw: st.DrawFn) -> tuple[Term, Tensor]:
    n = draw(samples)
    inner = draw(st.integers(1, 2))
    groups = draw(st.integers(1, 2))
    axes = draw(st.integers(1, 2))
    transposed, stride, padding = draw(st.booleans()), draw(st.integers(1, 2)), draw(st.integers(0, 1))
    narrow, wide, kernel, size = 2 * groups, draw(few), draw(st.integers(1, 3)), draw(st.integers(3, 5))
    geometry = Geometry((stride,) * axes, (padding,) * axes, (1,) * axes, transposed, (0,) * axes, groups)
    weight_shape = torch.Size([narrow, wide, *[kernel] * axes])
    inputs = torch.randn(
        n, inner, narrow if transposed else wide * groups, *[size] * axes, dtype=torch.float64
    )
    forward = lambda x, weight: torch.ops.aten.convolution(x, weight, None, *geometry)
    out = forward(
        torch.zeros(inner, *inputs.shape[2:], dtype=torch.float64),
        torch.zeros(weight_shape, dtype=torch.float64),
    ).shape
    cotangents = torch.randn(n, *out, dtype=torch.float64)
    values = torch.zeros(n, *weight_shape, dtype=torch.float64)
    for sample in range(n):
        weight = torch.zeros(weight_shape, dtype=torch.float64, requires_grad=True)
        (values[sample],) = torch.autograd.grad(forward(inputs[sample], weight), weight, cotangents[sample])
    return Convolution(cotangents, inputs, weight_shape, geometry), values


def masked(term: Term, shared: Tensor) -> Image:
    return Image((Placed.plain(term),), (shared,), torch.mul, tuple(shared.shape))


def multiples(coefficients: Tensor, shared: Tensor) -> Image:
    """Coefficients [n, *shape], with ones where a sample has one, times a tensor of all samples."""
    return masked(Dense(coefficients), shared)


@st.composite
def image_of_coefficients(draw: st.DrawFn) -> tuple[Term, Tensor]:
    n, shape = draw(samples), draw(st.lists(few, max_size=3))
    kept = [size if draw(st.booleans()) else 1 for size in shape]
    coefficients, shared = torch.randn(n, *kept, dtype=torch.float64), torch.randn(shape, dtype=torch.float64)
    return multiples(coefficients, shared), coefficients * shared


@st.composite
def image(draw: st.DrawFn) -> tuple[Term, Tensor]:
    term, value = draw(st.one_of(product(), convolution(), grouped()))
    if isinstance(term, Product) and draw(st.booleans()):
        term = Product(term.left[:, :, :1], term.right[:, :, :1])
        value = term.materialise()
    if draw(st.booleans()):
        mean = lambda each: each.mean(-1)
        return Image((Placed.plain(term),), (), mean, term.shape[:-1]), value.mean(-1)
    shared = torch.randn(term.shape, dtype=torch.float64)
    return masked(term, shared), value * shared


def assert_close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


EVERY_KIND = st.one_of(dense(), product(), rows(), grouped(), convolution(), image_of_coefficients(), image())


@given(pair=EVERY_KIND)
def test_term_twice_and_as_a_pytree(pair: tuple[Term, Tensor]) -> None:
    term, value = pair
    assert_close(term.plus([term]).materialise(), 2 * value)
    leaves, structure = tree_flatten(Placed.plain(term))  # as a recorded program's results are
    assert all(isinstance(leaf, Tensor) for leaf in leaves)
    assert_close(tree_unflatten(leaves, structure).term.materialise(), value)


@given(pair=EVERY_KIND, data=st.data())
def test_term_queries_equal_those_of_materialised_value(
    pair: tuple[Term, Tensor], data: st.DataObject
) -> None:
    term, value = pair
    n, flat = len(value), value.reshape(len(value), math.prod(value.shape[1:]))
    assert term.shape == tuple(value.shape[1:])
    assert term.samples == n
    assert_close(term.materialise(), value)
    assert_close(term.square_norms(), flat.square().sum(1))
    assert_close(term.materialised_square_norms(), flat.square().sum(1))
    weights, vector = torch.randn(n, dtype=torch.float64), torch.randn(value.shape[1:], dtype=torch.float64)
    assert_close(term.weighted_sum(weights), torch.einsum("n,n...->...", weights, value))
    assert_close(term.dot(vector), flat @ vector.reshape(-1))
    assert_close(term.scaled(-0.5).materialise(), -0.5 * value)
    some = data.draw(st.lists(st.integers(0, n - 1), max_size=3)) if n else []
    assert_close(term.at(torch.tensor(some, dtype=torch.int64)).materialise(), value[some])
    assert_close(term.at(slice(1, 3)).materialise(), value[1:3])
    assert term.at(slice(0, 1), torch.float32).dtype == torch.float32
    assert term.order()


@pytest.mark.parametrize(
    ("positions", "way"),
    [(1, "outer product"), (2, "gram"), (2, "materialise"), (40, "gram"), (40, "materialise")],
)
def test_term_norms_in_both_orders(positions: int, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Product, "order", lambda term: way)
    term = Product(
        torch.randn(3, 2, positions, 6, dtype=torch.float64),
        torch.randn(3, 2, positions, 7, dtype=torch.float64),
    )
    assert_close(term.square_norms(), term.materialise().square().flatten(1).sum(1))


@pytest.mark.parametrize("way", ["gram", "materialise", "outer product"])
@pytest.mark.parametrize("positions", [1, 5, 40])
def test_orders_of_contraction_of_groups(positions: int, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GroupedProduct, "order", lambda term: way)
    index = torch.randint(3, (4, positions)) * torch.tensor([[0], [1], [1], [1]])  # all in one group, too
    left, right = (torch.randn(4, positions, size, dtype=torch.float64) for size in (90, 70))
    term = GroupedProduct(index, left, right, 3)
    assert_close(term.square_norms(), term.materialise().square().flatten(1).sum(1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_norm_order_by_number_of_positions(dtype: torch.dtype) -> None:
    on = machine(torch.device("cpu"))

    def order(positions: int) -> str:
        return cheapest(
            norm_order_costs(on, 1, positions, 1024, 1024, dtype, BLOCK_BYTES["cpu"]), BLOCK_BYTES["cpu"]
        )

    assert (order(1), order(2), order(8), order(64), order(2048), order(8192)) == (
        "outer product",
        "gram",
        "gram",
        "gram",
        "materialise",
        "materialise",
    )


# -- The limits of floating point ----------------------------------------------------------------------------


def gradients_of(
    *terms: Term, shape: tuple[int, ...] | None = None, order: Sequence[int] = ()
) -> PerSampleGradients:
    """The gradients of one parameter, the sum of these terms, each with the parameter's elements in its own
    shape; with `order` all of them with its axes permuted.
    """
    wanted = shape or terms[0].shape
    placed = []
    for term in terms:
        layout = AxisLayout.identity(term.shape).reshape(wanted)
        assert layout is not None
        turned = layout.permute(order) if order else layout
        assert turned is not None
        placed.append(Placed(term, turned))
    first, sizes = terms[0], torch.Size([wanted[i] for i in order] if order else wanted)
    gradient = DeferredGradient(tuple(placed), sizes, first.dtype, first.device)
    return PerSampleGradients.of({"p": gradient}, torch.zeros(first.samples))


def exact(terms: Sequence[Term]) -> Tensor:
    """[n, elements] float64, from values that are materialised."""
    total = sum(term.at(slice(None), torch.float64).materialise().flatten(1) for term in terms)
    assert isinstance(total, Tensor)
    return total


def assert_norms(*terms: Term, shape: tuple[int, ...] | None = None, error: float = 1e-5) -> None:
    result = gradients_of(*terms, shape=shape).square_norms().sqrt()
    expected = exact(terms).norm(dim=1)
    assert torch.isfinite(result).all()
    assert ((result - expected).abs() / expected).max().item() <= error


# What is left of numbers that cancel to a ten-thousandth has the rounding of the numbers in it, in any order
# of contraction.
RESTS = [(0.3, 1e-5), (1e-2, 1e-5), (1e-4, 1e-3)]


@pytest.mark.parametrize(("rest", "error"), RESTS)
def test_term_norms_cancelling_positions_of_convolution(rest: float, error: float) -> None:
    x = torch.randn(4, 1, 3, 2, 2)
    g = torch.randn(4, 1, 64, 2, 2)
    term = Convolution(
        torch.cat([g, -g], 1),
        torch.cat([x, x + rest * torch.randn_like(x)], 1),
        torch.Size([64, 3, 3, 3]),
        Geometry((1, 1), (1, 1), (1, 1), False, (0, 0), 1),
    )
    assert_norms(term, error=error)


@pytest.mark.parametrize("rest", [0.3, 1e-2, 1e-3])
def test_term_norms_cancelling_uses_of_a_tied_table(rest: float) -> None:
    index, result = torch.tensor([[0, 2], [1, 1], [3, 0]]), torch.randn(3, 2, 6)
    # The output head's product that takes back what was looked up, but for a share.
    left = -F.one_hot(index, 4).float().unsqueeze(1)
    right = result.unsqueeze(1) * (1 + rest * torch.rand(3, 1, 2, 1))
    assert_norms(Lookup(index, result, 4), Product(left, right), shape=(4, 6))
    assert_norms(Dense(result.flatten(1)), Dense(-result.flatten(1) * (1 + rest)))


def kinds(scale: float, n: int = 3) -> dict[str, tuple[Term, ...]]:
    """Terms of every kind of n samples, their values around `scale`."""
    g, x = scale * torch.randn(n, 2, 5, 4), torch.randn(n, 2, 5, 6)
    geometry = Geometry((1,), (1,), (1,), False, (0,), 1)
    index = torch.randint(4, (n, 5))
    return {
        "dense": (Dense(g),),
        "outer product": (Product(g[:, :1, :1], x[:, :1, :1]),),
        "outer products": (Product(g[:, :, :1], x[:, :, :1]),),
        "gram": (Product(g[:, :, :2], x[:, :, :2]),),
        "materialise": (Product(g, x),),
        "grouped": (GroupedProduct(index, g[:, 0], x[:, 0], 4),),
        "rows": (Lookup(index, g[:, 0], 4),),
        "row": (Lookup(index[:, :1], g[:, 0, :1], 4),),
        "convolution": (
            Convolution(
                g[:, :1].transpose(2, 3), x[:, :1, :, :5].transpose(2, 3), torch.Size([4, 5, 3]), geometry
            ),
        ),
        "multiples": (multiples(g[:, :1, :1], torch.randn(2, 5, 4)),),
        "behind a mask": (masked(Product(g[:, :, :1], x[:, :, :1]), torch.randn(2, 4, 6)),),
        "behind a mask, positions": (masked(Product(g, x), torch.randn(2, 4, 6)),),
        "weight norm": (multiples(g[:, 0, 0].unsqueeze(2), torch.randn(4, 6)), Product(g[:, :1], x[:, :1])),
        "tied": (Lookup(index, g[:, 0], 6), Product(x[:, :1], g[:, :1])),
        "unlike": (Dense(scale * torch.randn(n, 4, 6)), Product(g[:, :1], x[:, :1])),
    }


SHAPES = {"tied": (6, 4), "unlike": (4, 6), "weight norm": (4, 6)}


@pytest.mark.every(2)
@pytest.mark.parametrize("kind", kinds(1.0))
@pytest.mark.parametrize("scale", [1e-38, 1e-25, 1e-21, 1e-16, 1.0, 1e16, 1e25, 1e35])
def test_term_norms_squares_beyond_float32_range(kind: str, scale: float) -> None:
    assert_norms(*kinds(scale)[kind], shape=SHAPES.get(kind))


def test_term_norms_zero_and_nonfinite() -> None:
    left, right = torch.randn(4, 1, 2, 3), torch.randn(4, 1, 2, 5)
    left[0], right[1, 0, 0, 0], left[2, 0, 1, 1] = 0, math.nan, math.inf
    norms = gradients_of(Product(left, right)).square_norms()
    assert norms[0] == 0
    assert not torch.isfinite(norms[1:3]).any()
    assert norms[3] > 0


@pytest.mark.parametrize("positions", [1, 3])
@pytest.mark.parametrize(
    ("dtype", "large"), [(torch.float32, 1e30), (torch.bfloat16, 1e30), (torch.float64, 1e200)], ids=str
)
def test_term_norms_zero_beside_numbers_whose_squares_are_too_large(
    dtype: torch.dtype, large: float, positions: int
) -> None:
    """Zero times a number whose square leaves the range of the type is zero; times infinity it is NaN."""
    left, right = torch.ones(3, 1, positions, 2, dtype=dtype), torch.ones(3, 1, positions, 4, dtype=dtype)
    left[:2], right[0], right[1] = 0, large, math.inf
    exact = torch.tensor([0, math.nan, 8 * positions**2], dtype=torch.float64)
    torch.testing.assert_close(gradients_of(Product(left, right)).square_norms(), exact, equal_nan=True)
    norms, _, flag = record(lambda: gradients_of(Product(left, right)).square_norms(), [])
    assert flag or norms[0] == 0


@pytest.mark.parametrize(
    ("left", "right", "flagged"),
    [
        (1e-20, 1e-20, True),  # the square is zero in float32
        (1e20, 1e20, True),  # it is infinite
        (0.0, 1e30, True),  # it is zero times infinity
        (0.0, 1.0, False),
        (math.inf, 1.0, False),
        (math.nan, 1.0, False),
        (1e-3, 1e3, False),
    ],
)
def test_flags_where_the_range_of_products_is_left(left: float, right: float, flagged: bool) -> None:
    """Not where a factor is zero or not finite itself. One such sample in one of three terms is enough."""
    terms = [Product(torch.ones(3, 1, 2, 512), torch.ones(3, 1, 2, 512)) for _ in range(3)]
    terms[1].left[2], terms[1].right[2] = left, right
    *_, flag = record(lambda: [gradients_of(term).square_norms() for term in terms], [])
    assert flag is flagged


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("length", [4, 3000])
@pytest.mark.parametrize(("left", "right"), [(1e-30, 1e-35), (1e30, 1e35), (0.0, 1e38), (1e-40, 1.0)])
def test_norms_of_outer_products_without_flag(left: float, right: float, length: int, groups: int) -> None:
    term = Product(torch.full((2, groups, 1, 3), left), torch.full((2, groups, 1, length), right))
    norms, recording, _ = record(lambda: gradients_of(term).square_norms(), [])
    exact = term.at(slice(None), torch.float64).materialise().square().sum((1, 2, 3))
    torch.testing.assert_close(norms, exact, rtol=1e-12, atol=0)
    assert recording.flag is None


@pytest.mark.parametrize("kind", kinds(1.0))
def test_term_norms_half_precision(kind: str) -> None:
    terms = tuple(term.at(slice(None), torch.bfloat16) for term in kinds(1.0)[kind])
    assert_norms(*terms, shape=SHAPES.get(kind), error=1e-5)


def test_term_norms_long_half_precision_sums() -> None:
    # In bfloat16 a sum of ones ends at 256.
    ones = torch.ones(2, 1, 5000, 1, dtype=torch.bfloat16)
    for term in (
        Dense(ones),
        Product(ones, ones),
        Lookup(torch.zeros(2, 5000, dtype=torch.int64), ones[:, 0], 3),
    ):
        expected = exact([term]).norm(dim=1)
        torch.testing.assert_close(gradients_of(term).square_norms().sqrt(), expected, rtol=1e-5, atol=0)
        weights = torch.ones(2)
        assert term.dot(torch.ones(term.shape)).tolist() == [5000.0, 5000.0]
        assert term.weighted_sum(weights).sum().item() == 10_000


def test_term_norms_million_products_precision() -> None:
    value = torch.rand(1, 3_000_000)
    exact = value.double().square().sum()
    assert abs(sum_of_products(value, value).item() - exact.item()) / exact.item() < 1e-6


# -- Bounded memory ------------------------------------------------------------------------------------------


def largest_of(query: Callable[[], object]) -> int:
    with LargestTensor() as seen:
        query()
    return seen.elements


N = 2000


@pytest.mark.parametrize(
    "term",
    [
        lambda: Product(torch.randn(N, 1, 1, 200), torch.randn(N, 1, 1, 100)),
        lambda: Product(torch.randn(N, 1, 3, 200), torch.randn(N, 1, 3, 100)),
        lambda: Product(torch.randn(150, 1, 200, 300), torch.randn(150, 1, 200, 300)),
        lambda: Lookup(torch.randint(5000, (N, 4)), torch.randn(N, 4, 20), 5000),
        lambda: Convolution(
            torch.randn(N, 1, 64, 2, 2),
            torch.randn(N, 1, 32, 2, 2),
            torch.Size([64, 32, 3, 3]),
            Geometry((1, 1), (1, 1), (1, 1), False, (0, 0), 1),
        ),
        lambda: Convolution(
            torch.randn(N, 1, 16, 7, 7),
            torch.randn(N, 1, 32, 7, 7),
            torch.Size([16, 32, 3, 3]),
            Geometry((1, 1), (1, 1), (1, 1), False, (0, 0), 1),
        ),
    ],
    ids=[
        "vectors",
        "few positions",
        "many positions",
        "table",
        "convolution of few positions",
        "convolution of many positions",
    ],
)
def test_term_norms_never_materialise_all_values(term: Callable[[], Term]) -> None:
    made = term()
    kept = max(factor.numel() for factor in made.factors)
    allowed = max(kept, 2 * (4 << 20) // 4)  # blocks of 4 MiB, and no more than a copy of the larger factor
    assert allowed < 0.7 * made.samples * math.prod(made.shape)
    assert largest_of(made.square_norms) <= allowed


def test_norms_in_one_pass_do_not_join_large_factors_of_equal_layers() -> None:
    params = {str(layer): torch.randn(32, 32) / 6 for layer in range(4)}

    def loss(params: dict[str, Tensor], x: Tensor) -> Tensor:
        for weight in params.values():
            x = torch.tanh(weight @ x)
        return x.sum()

    batch = torch.randn(N, 32)
    assert largest_of(lambda: per_sample_square_norms(loss, params, batch)) <= batch.numel()


def test_term_blocks_cover_every_sample_once() -> None:
    for n, each in ((0, 10), (1, 1 << 40), (1000, 1 << 16), (7, 0)):
        covered = [sample for block in blocks(n, each, torch.device("cpu")) for sample in range(n)[block]]
        assert covered == list(range(n))


# -- Deferral is invisible to semantics ----------------------------------------------------------------------


@pytest.mark.parametrize("n", [0, 1])
def test_per_sample_gradients_no_sample_and_one_sample(n: int, device: torch.device) -> None:
    model = nn.Sequential(nn.Embedding(5, 4), nn.Conv1d(3, 2, 2), nn.Flatten(), nn.Linear(6, 2)).to(device)
    params = {name: p.detach() for name, p in model.named_parameters()}

    def loss(params: dict[str, Tensor], tokens: Tensor) -> Tensor:
        table, kernel, bias, weight, shift = params.values()
        hidden = F.conv1d(F.embedding(tokens, table).unsqueeze(0), kernel, bias)
        return F.linear(hidden.flatten(1), weight, shift).square().sum()

    grads = per_sample_gradients(loss, params, torch.randint(5, (n, 3), device=device))
    assert grads.square_norms().shape == grads.losses.shape == (n,)
    assert grads.dot(params).shape == (n,)
    for name, value in grads.materialise().items():
        assert value.shape == (n, *params[name].shape)
    for name, value in grads.weighted_sum(torch.ones(n, device=device)).items():
        assert value.shape == params[name].shape
        assert n or not value.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_dot_of_a_sample_whose_gradient_is_nan_where_padding_leaves_its_input_out(dtype: torch.dtype) -> None:
    """As the gradient multiplies that input with zeros."""
    inputs, weight = torch.randn(3, 2, 2, 3, dtype=dtype), torch.randn(2, 2, 1, 2, dtype=dtype)
    inputs[1, 1, 0, 2] = torch.nan

    def loss(params: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return F.conv_transpose2d(x[None], params["w"], stride=2, padding=1).sin().sum()

    gradients = per_sample_gradients(loss, {"w": weight}, inputs)
    of_nan = gradients.materialise()["w"].isnan().flatten(1).any(1)
    assert of_nan.tolist() == [False, True, False]
    assert torch.equal(gradients.dot({"w": torch.ones_like(weight)}).isnan(), of_nan)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [1e-30, 1e-15, 1.0, 1e15])
def test_image_closed_forms_of_norms(dtype: torch.dtype, scale: float) -> None:
    """Of an outer product behind a mask, behind two, and of coefficients that are constant along an axis."""
    mask = torch.randn(5, 6, dtype=dtype)
    product = Product(
        scale * torch.randn(3, 1, 1, 5, dtype=dtype), torch.randn(3, 1, 1, 6, dtype=dtype) / scale**0.5
    )
    layout = AxisLayout.identity((1, 5, 6)).reshape((5, 6))
    assert layout is not None
    plain = Placed(product, layout)
    masked = Image((plain,), (mask,), torch.mul, (5, 6), is_elementwise=True)
    twice = Image((Placed.plain(masked),), (mask,), torch.div, (5, 6), is_elementwise=True)
    rows = Placed.plain(Dense(scale * torch.randn(3, 5, 1, dtype=dtype)))
    columns = Placed.plain(Dense(scale * torch.randn(3, 1, 6, dtype=dtype)))
    multiples = [Image((each,), (mask,), torch.mul, (5, 6), is_elementwise=True) for each in (rows, columns)]
    for term in (masked, twice, *multiples):
        assert term.order() == "closed form"
        exact = term.at(slice(None), torch.float64).materialise().flatten(1).norm(dim=1)
        (found,) = reliable_square_norms([term])
        torch.testing.assert_close(
            found.sqrt(), exact, rtol=1e-6 if dtype == torch.float32 else 1e-12, atol=0
        )
    exact_product = product.at(slice(None), torch.float64).materialise()[:, 0]
    for term in multiples:
        expected = (term.at(slice(None), torch.float64).materialise() * exact_product).sum((1, 2))
        wide = term.at(slice(None), torch.float64)
        products = wide.cross_products(product.at(slice(None), torch.float64))
        assert products is not None
        torch.testing.assert_close(products, expected, rtol=1e-9, atol=0)
