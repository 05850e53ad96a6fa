"""Random projections beside their matrices, materialised; what they estimate, what they don't depend on, and
how little they hold.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from psgrad.engine.gradients import (
    PerSampleGradients,
    Projection,
    Sparse,
    TwoSided,
)
from psgrad.engine.gradients.deferred import DeferredGradient, Placed
from psgrad.engine.gradients.layout import AxisLayout
from psgrad.engine.gradients.projections.projection import MatrixEntries
from psgrad.engine.gradients.projections.sparse import Orders
from psgrad.engine.gradients.terms import (
    BLOCK_BYTES,
    Convolution,
    Dense,
    Image,
    Lookup,
    Product,
    Term,
)
from psgrad.errors import TransformArgumentError
from tests.engine.gradients.agreement import deferred_gradients
from tests.engine.gradients.matrices import matrix, projected
from tests.engine.gradients.test_terms import EVERY_KIND
from tests.oracles import one_sample_gradients

PROJECTIONS = [
    Sparse(12),
    Sparse(10, seed=2, per="parameter"),
    Sparse(256, seed=-1),  # more columns than most parameters here have entries
    Sparse(1),
    TwoSided(3, 4),
    TwoSided(2, 5, per="total"),
]


def names_of(projection: Projection) -> str:
    return f"{projection.kind}-{projection.width}"


def gradients_of(terms: list[Placed], losses: int, name: str = "p") -> PerSampleGradients:
    first = terms[0]
    gradient = DeferredGradient(
        tuple(terms), torch.Size(first.layout.shape), first.term.dtype, first.term.device
    )
    return PerSampleGradients.of({name: gradient}, torch.zeros(losses, device=first.term.device))


def assert_close(actual: Tensor, expected: Tensor, tolerance: float = 1e-10) -> None:
    """The error of each row, relative to the longest."""
    assert actual.shape == expected.shape
    if expected.numel():
        error = (actual.double().cpu() - expected).norm(dim=1).max() / expected.norm(dim=1).max().clamp(
            min=1e-30
        )
        assert error.item() <= tolerance


@pytest.fixture(params=[200, BLOCK_BYTES["cpu"]], ids=["tiny blocks", "usual blocks"])
def _blocks(request: pytest.FixtureRequest) -> Iterator[None]:
    with patch.dict(BLOCK_BYTES, cpu=request.param, cuda=request.param):
        yield


# -- Against the matrices ------------------------------------------------------------------------------------


class Everything(nn.Module):
    """Each use of a weight: tied, looked up, in groups, transposed, in slices, behind a mask, as a
    batch of matrices, and not at all. With so few positions that factors are smaller than weights.
    """

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 8)
        self.inside = nn.Linear(8, 8)
        self.narrow = nn.Conv1d(8, 4, 3, groups=2, dilation=2, padding=2)
        self.wide = nn.ConvTranspose1d(4, 8, 3, stride=2, padding=1, output_padding=1)
        self.twice = nn.Parameter(torch.randn(8, 8))
        self.experts = nn.Parameter(torch.randn(3, 8, 5))
        self.scale = nn.Parameter(torch.randn(()))
        self.mask = torch.linspace(-1, 1, 64).reshape(8, 8).double()
        self.unused = nn.Parameter(torch.randn(2, 3))

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.inside(self.table(tokens)).tanh()  # [1, 3, 8]
        h = h @ self.twice.t() + h @ self.twice + h @ (self.twice * self.mask.to(h))
        h = h + self.wide(self.narrow(h.transpose(1, 2)).tanh()).transpose(1, 2)[:, : h.shape[1]]
        h = h + h @ self.twice[1:6].t() @ self.twice[3:]
        experts = torch.bmm(h[0].unsqueeze(1), self.experts).mean()
        return F.linear(h, self.table.weight).mean(1) * self.scale + experts


@pytest.mark.parametrize("projection", PROJECTIONS, ids=names_of)
@pytest.mark.usefixtures("_blocks")
def test_projection_equals_materialised_matrix(projection: Projection, device: torch.device) -> None:
    model, tokens = Everything().to(device, torch.float64), torch.randint(11, (4, 3), device=device)
    loss = lambda output, target: (target * output).square().sum()
    target = torch.rand(4, dtype=torch.float64, device=device)
    exact = one_sample_gradients(model, loss, (tokens,), target)
    gradients = deferred_gradients(model, loss, (tokens,), target)
    kinds = {
        type(placed.term) for gradient in gradients.parts[0].gradients.values() for placed in gradient.terms
    }
    assert kinds >= {Product, Lookup, Convolution, Dense, Image}
    result = gradients.project(projection)
    expected = projected(projection, exact)
    assert_close(result, expected)
    for name, columns in projection.columns(exact).items():  # each parameter by itself, the small ones too
        alone = result if projection.per == "total" else result[:, columns]
        assert_close(
            alone, expected if projection.per == "total" else projected(projection, {name: exact[name]})
        )


@pytest.mark.usefixtures("_blocks")
@settings(max_examples=100)
@given(pair=EVERY_KIND, projection=st.sampled_from(PROJECTIONS), data=st.data())
def test_projection_every_term_and_layout(
    pair: tuple[Term, Tensor], projection: Projection, data: st.DataObject
) -> None:
    term, value = pair
    order = data.draw(st.permutations(range(len(term.shape))))
    layout = AxisLayout.identity(term.shape).permute(order)
    assert layout is not None
    if data.draw(st.booleans()):  # the last axis is that of a longer parameter
        layout = layout if not layout.inner else window(layout, data.draw(st.integers(0, 2)))
    expected = projected(projection, {"p": layout.apply(value, lead=1)})
    assert_close(gradients_of([Placed(term, layout)], len(value)).project(projection), expected)


def window(layout: AxisLayout, start: int) -> AxisLayout:
    return layout.embed(len(layout.inner) - 1, start, start + layout.inner[-1] + 1)


def test_projection_terms_of_one_parameter_add_up() -> None:
    left, right = torch.randn(3, 1, 2, 5, dtype=torch.float64), torch.randn(3, 1, 2, 7, dtype=torch.float64)
    oriented_if_free = AxisLayout.identity((1, 5, 7)).reshape((5, 7))
    turned = AxisLayout.identity((1, 7, 5)).permute([0, 2, 1])
    assert oriented_if_free is not None
    assert turned is not None
    turned = turned.reshape((5, 7))
    assert turned is not None
    value = torch.einsum("ngta,ngtb->nab", left, right)
    for projection in PROJECTIONS:
        once = gradients_of([Placed(Product(left, right), oriented_if_free)], 3).project(projection)
        twice = gradients_of(
            [Placed(Product(left, right), oriented_if_free), Placed(Product(right, left), turned)], 3
        ).project(projection)
        assert_close(once, projected(projection, {"p": value}))
        assert_close(twice, 2 * once)


def test_projection_empty_inputs() -> None:
    for projection in PROJECTIONS:
        for term in (
            Product(torch.zeros(0, 1, 2, 3), torch.zeros(0, 1, 2, 4)),
            Product(torch.zeros(2, 1, 0, 3), torch.zeros(2, 1, 0, 4)),
        ):
            result = gradients_of([Placed.plain(term)], term.samples).project(projection)
            assert torch.equal(result, torch.zeros(term.samples, projection.width))
        empty = Lookup(torch.zeros(2, 0, dtype=torch.int64), torch.zeros(2, 0, 3), 5)
        assert torch.equal(
            gradients_of([Placed.plain(empty)], 2).project(projection), torch.zeros(2, projection.width)
        )
        none = gradients_of([Placed.plain(Dense(torch.zeros(2, 3, 0)))], 2).project(projection)
        assert torch.equal(none, torch.zeros(2, projection.width))
        assert len(gradients_of([Placed.plain(empty)], 2).select([]).project(projection)) == 2


def test_projection_nonfinite_sample() -> None:
    index, places = torch.tensor([[0, 1], [1, 2], [1, 0]]), torch.randn(3, 2, 4)
    left, right = torch.randn(3, 1, 2, 5), torch.randn(3, 1, 2, 7)
    for term in (Product(left, right), Product(left[:, :, :1], right[:, :, :1]), Lookup(index, places, 3)):
        whole = [factor.clone() for factor in term.factors]
        broken = type(term)(**{field: getattr(term, field) for field in term.__dataclass_fields__})
        next(factor for factor in broken.factors if factor.is_floating_point())[1] = math.inf
        for projection in PROJECTIONS:
            spoilt = gradients_of([Placed.plain(broken)], 3).project(projection)
            assert torch.isfinite(spoilt[[0, 2]]).all()
            assert not torch.isfinite(spoilt[1]).all()
        for factor, value in zip(term.factors, whole, strict=True):
            factor.copy_(value)


# -- What the numbers don't depend on ------------------------------------------------------------------------


@pytest.mark.parametrize("projection", PROJECTIONS, ids=names_of)
def test_projection_independent_of_chunks(projection: Projection, device: torch.device) -> None:
    model, tokens = Everything().to(device), torch.randint(11, (7, 3), device=device)
    model.mask = model.mask.float()
    target = torch.rand(7, device=device)

    def rows_by(chunk: int) -> Tensor:
        parts = zip(tokens.split(chunk), target.split(chunk), strict=True)
        loss = lambda output, target: (target * output).square().sum()
        return torch.cat(
            [deferred_gradients(model, loss, (some,), goal).project(projection) for some, goal in parts]
        )

    whole = rows_by(7)
    assert whole.dtype == torch.float32
    for chunk in (1, 3):
        assert_close(rows_by(chunk), whole.double().cpu(), 1e-5)


def matrix_of(projection: Projection, name: str = "p") -> Tensor:
    """[k, 40]: what it does to the unit vectors."""
    return (
        gradients_of([Placed.plain(Dense(torch.eye(40, dtype=torch.float64)))], 40, name)
        .project(projection)
        .t()
    )


def test_projection_differs_by_seed_name_and_kind() -> None:
    result = [
        matrix_of(projection)
        for projection in (Sparse(40), Sparse(40, seed=1), TwoSided(4, 10), Sparse(40, seed=10**30))
    ]
    result += [matrix_of(Sparse(40), "q")]
    for place, one in enumerate(result):
        for other in result[:place]:
            # 1,600 products of independent entries of mean zero and variance 1/40: a standard deviation of 1
            assert abs((one * other).sum().item()) < 5


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_projection_half_precision(dtype: torch.dtype) -> None:
    term = Product(torch.randn(3, 1, 20, 9).to(dtype), torch.randn(3, 1, 20, 8).to(dtype))
    exact = torch.einsum("ngta,ngtb->ngab", term.left.double(), term.right.double())
    for projection in PROJECTIONS:
        result = gradients_of([Placed.plain(term)], 3).project(projection)
        assert result.dtype == torch.float32
        assert_close(result, projected(projection, {"p": exact}), 1e-5)


# -- Their entries -----------------------------------------------------------------------------------------


def test_projection_moments_of_entries() -> None:
    places = torch.arange(1 << 14)
    result = MatrixEntries(7, 64, torch.device("cpu")).at(places).double()
    assert (result.abs() == 1).all()
    assert abs(result.mean().item()) < 4 / math.sqrt(result.numel())
    for shift in (1, 2, 32, 64 * 16):  # neighbours in a row, in a word, in a column
        flat = result.flatten()
        assert abs((flat[shift:] * flat[:-shift]).mean().item()) < 4 / math.sqrt(len(flat) - shift)


def test_projection_segment_fills_its_columns() -> None:
    for size in (1, 6, 64, 100):
        orders = Orders(3, size)
        places, signs = orders.gathered(range(2, 5), torch.device("cpu"))
        every = torch.arange(size)[:, None] + size * torch.arange(3)
        assert torch.equal(places.sort(0).values, every)
        columns, same = orders.scattered(2 * size + torch.arange(3 * size))
        back = torch.zeros(size, 3 * size)
        back.scatter_(0, columns[None], same[None])
        there = torch.zeros(size, 3 * size).scatter_(1, places, signs)
        assert torch.equal(back, there)


# -- How little they hold ------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.every(3)
@pytest.mark.parametrize(
    ("projection", "positions"),
    [(Sparse(4096), 1), (Sparse(4096), 3), (TwoSided(64, 64), 1), (TwoSided(64, 64), 3)],
)
def test_projection_large_weight_memory(projection: Projection, positions: int) -> None:
    rows, columns, n = 4096, 5000, 4
    term = Product(torch.randn(n, 1, positions, rows), torch.randn(n, 1, positions, columns))
    gradients = PerSampleGradients.of({"p": DeferredGradient.of(term, (rows, columns))}, torch.zeros(n))
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as result:
        out = gradients.project(projection)
    assert out.shape == (n, projection.width)
    events = result.profiler.kineto_results.events()  # type: ignore[union-attr]
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    now = peak = 0
    for _, change in changes:
        now += change
        peak = max(peak, now)
    one_sample = 4 * rows * columns
    assert 0 < peak < one_sample / 3


def test_projection_draws_used_rows_of_table_only() -> None:
    gradients = gradients_of(
        [Placed.plain(Lookup(torch.tensor([[3, 10**9]]), torch.randn(1, 2, 4), 2 * 10**9))], 1
    )
    for projection in (Sparse(8), TwoSided(2, 4)):
        assert gradients.project(projection).shape == (1, 8)


# -- What they say of themselves -----------------------------------------------------------------------------


def test_projection_descriptions_are_plain_and_differ() -> None:
    every = [*PROJECTIONS, Sparse(12, seed=1), Sparse(13)]
    assert len({json.dumps(projection.describe(), sort_keys=True) for projection in every}) == len(every)


def test_projection_columns_of_parameters() -> None:
    assert Sparse(8).columns(["a", "b"]) == {"a": slice(0, 8), "b": slice(0, 8)}
    assert TwoSided(2, 3).columns(["a", "b"]) == {"a": slice(0, 6), "b": slice(6, 12)}


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Sparse(0), "Sparse: k=0; expected a whole number, at least 1"),
        (lambda: Sparse(4, seed=0.5), "Sparse: seed=0.5; expected a whole number"),  # type: ignore[arg-type]
        (lambda: Sparse(4, per="module"), "Sparse: per='module'; expected 'total' or 'parameter'"),  # type: ignore[arg-type]
        (lambda: TwoSided(4, True), "TwoSided: right=True; expected"),
    ],
)
def test_projection_arguments_refused(make: object, words: str) -> None:
    assert callable(make)
    with pytest.raises(TransformArgumentError) as caught:
        make()
    assert str(caught.value).startswith(words)


def test_projection_oracle_matrices() -> None:
    """The oracle itself: columns of length one, as many non-zeros as asked for."""
    for projection in PROJECTIONS:
        written = matrix(projection, "p", (5, 4))
        torch.testing.assert_close(written.norm(dim=0), torch.ones(20, dtype=torch.float64))
        if isinstance(projection, Sparse):
            assert ((written != 0).sum(0) == 1).all()
