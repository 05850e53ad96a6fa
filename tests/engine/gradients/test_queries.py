"""Exactness: every query of the gradients of random programs beside materialised gradients, in float64 and in
float32.

In float64 the materialised gradients are those of a loop of one-sample torch.autograd.grad. In float32 the
same factors, rounded, are asked, and the materialised gradients are made of the rounded factors in float64:
all of the error is the query's own.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from psgrad.engine.gradients import PerSampleGradients, per_sample_gradients, per_sample_square_norms
from psgrad.engine.gradients.deferral import DeferredGradient, Placed
from psgrad.errors import TransformError
from tests.engine.gradients.agreement import (
    SMALLEST_SHARE,
    TOLERANCES,
    assert_close,
    assert_vectors_close,
    deferred_gradients,
    flat,
    rows,
)
from tests.oracles import Gradients, one_sample_gradients
from tests.small_models import Program

few = st.integers(1, 4)
counts = st.integers(0, 4)


@dataclass(frozen=True)
class Drawn:
    """A network, and how n inputs for it are drawn."""

    model: nn.Module
    inputs: Callable[[int], Tensor]


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


# -- Programs: for each kind of term, and for each overlap of terms -----------------------------------


@st.composite
def linear(draw: st.DrawFn) -> Drawn:
    positions, i, o = draw(st.lists(st.integers(0, 3), max_size=2)), draw(few), draw(few)
    return Drawn(
        nn.Sequential(nn.Linear(i, o, bias=draw(st.booleans())), nn.Tanh()), lambda n: randn(n, *positions, i)
    )


@st.composite
def many_positions(draw: st.DrawFn) -> Drawn:
    positions, i, o = draw(st.integers(8, 40)), draw(st.integers(1, 3)), draw(st.integers(1, 3))
    return Drawn(nn.Sequential(nn.Linear(i, o), nn.Tanh()), lambda n: randn(n, positions, i))


CONVOLUTIONS = {
    (1, False): nn.Conv1d,
    (2, False): nn.Conv2d,
    (3, False): nn.Conv3d,
    (1, True): nn.ConvTranspose1d,
    (2, True): nn.ConvTranspose2d,
    (3, True): nn.ConvTranspose3d,
}


@st.composite
def convolutions(draw: st.DrawFn) -> tuple[int, bool, dict[str, Any], list[int]]:
    """Dimensions, transposed or not, the layer's arguments, and the input's shape without the batch axis."""
    dimensions, transposed, groups = draw(st.integers(1, 3)), draw(st.booleans()), draw(st.integers(1, 3))

    def per_axis(low: int, high: int) -> tuple[int, ...]:
        return tuple(draw(st.integers(low, high)) for _ in range(dimensions))

    kernel, stride, padding, dilation = per_axis(1, 3), per_axis(1, 3), per_axis(0, 2), per_axis(1, 2)
    arguments: dict[str, Any] = {
        "in_channels": groups * draw(st.integers(1, 2)),
        "out_channels": groups * draw(st.integers(1, 3)),
        "kernel_size": kernel,
        "stride": stride,
        "padding": padding,
        "dilation": dilation,
        "groups": groups,
        "bias": draw(st.booleans()),
    }
    reach = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
    if transposed:
        arguments["output_padding"] = tuple(
            draw(st.integers(0, max(s, d) - 1)) for s, d in zip(stride, dilation, strict=True)
        )
        # The output, (size - 1) * stride - 2 * padding + reach + 1, must not be empty.
        smallest = [max(1, -(-(2 * p - r) // s) + 1) for p, r, s in zip(padding, reach, stride, strict=True)]
    else:
        smallest = [max(1, r + 1 - 2 * p) for p, r in zip(padding, reach, strict=True)]
    sizes = [size + draw(st.integers(0, 3)) for size in smallest]
    return dimensions, transposed, arguments, [arguments["in_channels"], *sizes]


@st.composite
def convolution(draw: st.DrawFn) -> Drawn:
    dimensions, transposed, arguments, shape = draw(convolutions())
    return Drawn(CONVOLUTIONS[dimensions, transposed](**arguments), lambda n: randn(n, *shape))


@st.composite
def embedding(draw: st.DrawFn) -> Drawn:
    positions, vocabulary = (
        draw(st.integers(0, 6)),
        draw(st.integers(1, 5)),
    )  # more positions than words: some come twice
    padding = draw(st.none() | st.integers(0, vocabulary - 1))
    return Drawn(
        nn.Embedding(vocabulary, draw(few), padding_idx=padding),
        lambda n: torch.randint(vocabulary, (n, positions)),
    )


@st.composite
def bag(draw: st.DrawFn) -> Drawn:
    positions, vocabulary = draw(st.integers(1, 6)), draw(st.integers(1, 5))
    mode = draw(st.sampled_from(["sum", "mean"]))
    return Drawn(
        nn.EmbeddingBag(vocabulary, draw(few), mode=mode), lambda n: torch.randint(vocabulary, (n, positions))
    )


@st.composite
def tied(draw: st.DrawFn) -> Drawn:
    """An embedding whose table is the output's matrix, too."""
    positions, vocabulary, width = draw(st.integers(1, 5)), draw(st.integers(2, 5)), draw(few)
    model = Program(lambda x, w: F.linear(torch.tanh(F.embedding(x, w)), w), (vocabulary, width))
    return Drawn(model, lambda n: torch.randint(vocabulary, (n, positions)))


@st.composite
def grouped(draw: st.DrawFn) -> Drawn:
    """A matrix for each head."""
    positions, heads, i, o = draw(st.integers(1, 3)), draw(few), draw(few), draw(few)
    model = Program(lambda x, w: torch.matmul(x, w), (heads, i, o))
    return Drawn(model, lambda n: randn(n, heads, positions, i))


@st.composite
def two_shapes(draw: st.DrawFn) -> Drawn:
    """One kernel of a convolution and of a matrix product."""
    o, i, k = draw(few), draw(few), draw(st.integers(1, 2))

    def forward(x: Tensor, w: Tensor) -> Tensor:
        return F.linear(torch.tanh(F.conv1d(x, w)).mean(2), w.reshape(i * k, o))

    return Drawn(Program(forward, (o, i, k)), lambda n: randn(n, i, 4))


@st.composite
def parts_of_one(draw: st.DrawFn) -> Drawn:
    """Slices of one matrix, apart or overlapping, and its transpose."""
    size, cut, step = draw(st.integers(3, 5)), draw(st.integers(1, 2)), draw(st.integers(1, 2))
    kinds: list[Callable[[Tensor, Tensor], Tensor]] = [
        lambda x, w: F.linear(F.linear(x, w[:cut]).sum(-1, keepdim=True).tanh() * x, w[cut:]),
        lambda x, w: F.linear(x, w[:, ::step].sum(1, keepdim=True).expand(-1, size)),
        lambda x, w: F.linear(torch.tanh(F.linear(x, w)), w[cut - 1 :]),
        lambda x, w: F.linear(torch.tanh(F.linear(x, w)), w.t()),
        lambda x, w: (
            F.linear(torch.tanh(F.linear(x, w)), w.t().reshape(size, size)) + F.embedding(x.argmax(-1), w)
        ),
    ]
    positions = draw(st.lists(st.integers(1, 3), max_size=1))
    return Drawn(Program(draw(st.sampled_from(kinds)), (size, size)), lambda n: randn(n, *positions, size))


@st.composite
def shared_factors(draw: st.DrawFn) -> Drawn:
    """Low-rank, scaled and masked weights, and a parameter that is not used."""
    i, o = draw(few), draw(few)

    def forward(x: Tensor, a: Tensor, b: Tensor, s: Tensor, unused: Tensor) -> Tensor:
        return F.linear(x, a @ b + s * torch.ones(o, i, dtype=torch.float64, device=x.device).tril())

    return Drawn(Program(forward, (o, 2), (2, i), (o, 1), (3, 2)), lambda n: randn(n, 2, i))


@st.composite
def stacked(draw: st.DrawFn) -> Drawn:
    """Several layers: parameters of several modules."""
    width = draw(few)
    model = nn.Sequential(
        nn.Embedding(5, width), nn.Linear(width, 4), nn.LayerNorm(4), nn.Tanh(), nn.Linear(4, 3)
    )
    return Drawn(model, lambda n: torch.randint(5, (n, 3)))


KINDS: dict[str, Callable[[], st.SearchStrategy[Drawn]]] = {
    "linear": linear,
    "many positions": many_positions,
    "convolution": convolution,
    "embedding": embedding,
    "bag": bag,
    "tied": tied,
    "grouped": grouped,
    "two shapes": two_shapes,
    "parts of one": parts_of_one,
    "shared factors": shared_factors,
    "stacked": stacked,
}


# -- The two sides of each comparison ------------------------------------------------------------------------


def loss(output: Tensor, target: Tensor) -> Tensor:
    return target * output.square().sum()


def taken(drawn: Drawn, n: int, device: torch.device) -> tuple[PerSampleGradients, Gradients]:
    """The engine's gradients of n new inputs, and the loop's."""
    model, inputs = drawn.model.to(device, torch.float64), (drawn.inputs(n).to(device),)
    target = torch.linspace(0.5, 2, n, dtype=torch.float64, device=device)
    grads = deferred_gradients(model, loss, inputs, target)
    if n:
        return grads, one_sample_gradients(model, loss, inputs, target)
    return grads, {
        name: parameter.new_zeros(0, *parameter.shape) for name, parameter in model.named_parameters()
    }


def rounded(grads: PerSampleGradients) -> tuple[PerSampleGradients, Gradients]:
    """The same in float32, and what its factors make in float64."""

    def of(gradient: DeferredGradient, *kinds: torch.dtype) -> DeferredGradient:
        terms = []
        for placed in gradient.terms:
            term = placed.term
            for kind in kinds:
                term = term.at(slice(None), kind)
            terms.append(Placed(term, placed.layout))
        return replace(gradient, terms=tuple(terms), dtype=kinds[-1])

    less = {name: of(gradient, torch.float32) for name, gradient in grads.parts[0].gradients.items()}
    same = {
        name: of(gradient, torch.float32, torch.float64)
        for name, gradient in grads.parts[0].gradients.items()
    }
    exact = PerSampleGradients.of(same, grads.losses).materialise()
    return PerSampleGradients.of(less, grads.losses.float()), exact


def grouped_by(per: str, names: list[str]) -> dict[str, list[str]]:
    labels = {
        "total": lambda name: "",
        "parameter": lambda name: name,
        "module": lambda name: name.rpartition(".")[0],
    }
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(labels[per](name), []).append(name)
    return groups


def by_label(answer: Any, per: str) -> dict[str, Tensor]:
    return {"": answer} if per == "total" else answer


def lengths(gradients: Gradients) -> Tensor:
    return flat(gradients).norm(dim=1)


def assert_norms(grads: PerSampleGradients, exact: Gradients, tolerance: float) -> None:
    for per in ("total", "parameter", "module"):
        result = by_label(grads.square_norms(per), per)
        groups = grouped_by(per, list(exact))
        assert result.keys() == groups.keys()
        for label, names in groups.items():
            norms = lengths({name: exact[name] for name in names})
            scale = torch.maximum(norms, SMALLEST_SHARE * lengths(exact))
            assert_close(f"norms per {per} {label}", result[label].sqrt(), norms, scale, tolerance)


def assert_products(found: Any, per: str, one: Gradients, other: Gradients, tolerance: float) -> None:
    """The error of each inner product is measured by the two gradients' lengths."""
    groups, answers = grouped_by(per, list(one)), by_label(found, per)
    assert answers.keys() == groups.keys()
    whole = lengths(one), lengths(other)
    for label, names in groups.items():
        x, y = ({name: side[name] for name in names} for side in (one, other))
        floor = [SMALLEST_SHARE * size for size in whole]
        scale = torch.maximum(lengths(x), floor[0])[:, None] * torch.maximum(lengths(y), floor[1])
        assert answers[label].dtype == torch.float64
        assert_close(f"products per {per} {label}", answers[label], flat(x) @ flat(y).t(), scale, tolerance)


def assert_sums(grads: PerSampleGradients, exact: Gradients, tolerance: float) -> None:
    n = len(grads)
    weights = torch.linspace(-1, 1, n, dtype=torch.float64).to(next(iter(exact.values())).device)

    def assert_sum(query: str, found: Gradients, expected: Gradients, each: Gradients) -> None:
        """Sums of vectors that point anywhere: the error is measured by the lengths of those that
        were added.
        """
        for name, value in expected.items():
            assert found[name].shape == value.shape
            error = (found[name].double() - value).norm()[None]
            scale = torch.maximum(rows(each[name]).norm()[None], SMALLEST_SHARE * flat(each).norm()[None])
            assert_close(f"{query} of {name}", error, torch.zeros_like(error), scale, tolerance)

    sums = {name: torch.einsum("n,n...->...", weights, value) for name, value in exact.items()}
    assert_sum("weighted sum", grads.weighted_sum(weights.to(grads.losses.dtype)), sums, exact)
    assert_sum("mean", grads.mean(), {name: value.sum(0) / max(n, 1) for name, value in exact.items()}, exact)
    squares = {name: value.square() for name, value in exact.items()}
    assert_sum(
        "second moment",
        grads.second_moment(),
        {name: value.sum(0) / max(n, 1) for name, value in squares.items()},
        squares,
    )


def assert_every_query(
    grads: PerSampleGradients,
    exact: Gradients,
    others: PerSampleGradients,
    exact_others: Gradients,
    tolerance: float,
) -> None:
    assert len(grads) == len(next(iter(exact.values())))
    whole = lengths(exact)
    assert_norms(grads, exact, tolerance)
    for per in ("total", "parameter", "module"):
        assert_products(grads.inner(others, per), per, exact, exact_others, tolerance)
        assert_products(grads.gram(per), per, exact, exact, tolerance)
    gram = grads.gram()
    assert torch.equal(gram, gram.t())
    assert_close("diagonal of gram", gram.diagonal(), grads.square_norms(), whole.square(), 2 * tolerance)
    assert_sums(grads, exact, tolerance)

    vector = {name: torch.randn_like(value.sum(0)) for name, value in exact.items()}
    direction = flat({name: value[None] for name, value in vector.items()})[0]
    kind = grads.losses.dtype
    exact_vector = flat({name: value.to(kind).double()[None] for name, value in vector.items()})[0]
    scale = flat(exact).abs() @ direction.abs()
    assert_close(
        "dot",
        grads.dot({name: value.to(kind) for name, value in vector.items()}),
        flat(exact) @ exact_vector,
        scale,
        tolerance,
    )

    assert_vectors_close("materialise", grads.materialise(), exact, whole, tolerance)
    some = list(exact)[::2]
    assert_vectors_close(
        "select", grads.select(some).materialise(), {name: exact[name] for name in some}, whole, tolerance
    )

    def largest(state: Tensor, name: str, samples: slice, block: Tensor) -> Tensor:
        assert block.shape == exact[name][samples].shape
        state[samples] = (
            torch.maximum(state[samples], rows(block).abs().amax(1)) if block.numel() else state[samples]
        )
        return state

    result = grads.reduce(largest, torch.zeros_like(grads.losses))
    assert_close("reduce", result, flat(exact).abs().amax(1) if len(grads) else whole, whole, tolerance)


@pytest.mark.long
@pytest.mark.every(2)
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=20)
@given(data=st.data(), n=counts, m=counts)
def test_queries_equal_those_of_materialised_gradients(
    kind: str, data: st.DataObject, n: int, m: int, device: torch.device
) -> None:
    drawn = data.draw(KINDS[kind]())
    (grads, exact), (others, exact_others) = taken(drawn, n, device), taken(drawn, m, device)
    assert_every_query(grads, exact, others, exact_others, TOLERANCES[torch.float64])
    (grads, exact), (others, exact_others) = rounded(grads), rounded(others)
    assert_every_query(grads, exact, others, exact_others, TOLERANCES[torch.float32])


LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "convolution, padding same, odd": (lambda: nn.Conv2d(2, 3, 3, padding="same"), (2, 5, 6)),
    "convolution, padding same, even": (lambda: nn.Conv2d(2, 3, 4, padding="same"), (2, 5, 6)),
    "convolution used twice": (lambda: twice(nn.Conv2d(2, 2, kernel_size=3, padding=1)), (2, 5, 4)),
    "layer norm": (lambda: nn.LayerNorm(3), (3,)),
    "layer norm of two axes": (lambda: nn.LayerNorm((3, 4)), (2, 3, 3, 4)),
    "layer norm without bias": (lambda: nn.LayerNorm(4, bias=False), (2, 4)),
    "layer norm used twice": (lambda: twice(nn.LayerNorm(4)), (5, 4)),
    "group norm": (lambda: nn.GroupNorm(1, 2), (2, 4)),
    "group norm of images": (lambda: nn.GroupNorm(3, 6), (6, 2, 3)),
    "group norm of volumes": (lambda: nn.GroupNorm(2, 2), (2, 2, 4, 3)),
    "batch norm": (lambda: nn.BatchNorm1d(4), (4,)),
    "batch norm of sequences": (lambda: nn.BatchNorm1d(2), (2, 3)),
    "batch norm of images": (lambda: nn.BatchNorm2d(3), (3, 2, 1)),
    "batch norm of volumes": (lambda: nn.BatchNorm3d(1), (1, 4, 2, 3)),
}


def twice(layer: nn.Module) -> nn.Module:
    return nn.Sequential(layer, nn.Tanh(), layer, nn.Tanh())


@pytest.mark.every(1)
@pytest.mark.parametrize("name", LAYERS)
def test_layer_queries_equal_the_loop(name: str, device: torch.device) -> None:
    make, shape = LAYERS[name]
    layer = make().eval()
    for value in layer.state_dict().values():  # fresh norms are all ones and zeros
        if value.is_floating_point() and "norm" in name:
            value.uniform_(0.5, 2)
    (grads, exact), others = (taken(Drawn(layer, lambda n: randn(n, *shape)), n, device) for n in (3, 1))
    assert_every_query(grads, exact, *others, TOLERANCES[torch.float64])


def test_frozen_parameters_have_no_gradient(device: torch.device) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).to(device)
    model[0].requires_grad_(False)
    grads = deferred_gradients(model, loss, (torch.randn(5, 3, device=device),), torch.ones(5, device=device))
    assert set(grads.materialise()) == {"2.weight", "2.bias"}
    assert set(grads.square_norms(per="parameter")) == {"2.weight", "2.bias"}


class BranchesTwice(nn.Module):
    """Samples disagree on a branch, and those of each outcome on a second one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        y = y.tanh() if bool(x[..., 0].sum() > 0) else y.square()
        return self.second(y) if bool(x[..., 1].sum() > 0) else -2 * self.second(y).exp()


def test_queries_of_samples_that_disagree_on_two_branches(device: torch.device) -> None:
    signs = torch.tensor([[1, 1, 1], [1, -1, 1], [-1, 1, 1], [-1, -1, 1]], dtype=torch.float64)
    model = BranchesTwice().double().to(device)

    def gradients(n: int) -> tuple[PerSampleGradients, Gradients]:
        x, target = (randn(n, 3).abs() * signs.repeat(2, 1)[:n]).to(device), randn(n).to(device)
        exact = one_sample_gradients(model, loss, (x,), target)
        return deferred_gradients(model, loss, (x,), target), exact

    (grads, exact), (others, exact_others) = gradients(7), gradients(5)
    assert len(grads.parts) == 4
    assert_every_query(grads, exact, others, exact_others, TOLERANCES[torch.float64])
    some = grads.at(slice(0, 6))
    assert_norms(some, {name: value[:6] for name, value in exact.items()}, TOLERANCES[torch.float64])


# -- What the queries say to what they can't answer ----------------------------------------------------------


def small_gradients(n: int = 3, width: int = 4) -> PerSampleGradients:
    model = nn.Sequential(nn.Linear(width, 2), nn.Tanh(), nn.Linear(2, 1)).double()
    return deferred_gradients(model, loss, (randn(n, width),), torch.ones(n, dtype=torch.float64))


def test_select_by_pattern() -> None:
    grads = small_gradients()
    assert list(grads.select(["2.bias", "0.*"]).shapes) == ["2.bias", "0.weight", "0.bias"]
    assert list(grads.select("*.weight").shapes) == ["0.weight", "2.weight"]
    assert list(grads.select(["*", "0.bias"]).shapes) == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert grads.select("2.*").square_norms().shape == (3,)


def test_some_samples_without_aux() -> None:
    def loss(params: Gradients, x: Tensor) -> Tensor:
        return (params["w"] * x).sum().square()

    params, x = {"w": randn(3)}, randn(5, 3)
    grads = per_sample_gradients(loss, params, x)
    exact = 2 * (x @ params["w"])[:, None] * x
    torch.testing.assert_close(grads.at(slice(0, 2)).materialise()["w"], exact[:2])
    torch.testing.assert_close(grads.at(torch.tensor([4, 0])).materialise()["w"], exact[[4, 0]])
    total = grads.reduce(lambda state, name, samples, block: state + block.sum(0), torch.zeros_like(x[0]))
    torch.testing.assert_close(total, exact.sum(0))
    norms = per_sample_square_norms(loss, params, x).at(slice(0, 2))
    torch.testing.assert_close(norms.square_norms(), exact[:2].square().sum(1))


@pytest.mark.parametrize("name", ["0.weigth", "1.*"])
def test_select_unknown_name_refused(name: str) -> None:
    with pytest.raises(TransformError, match="select: no parameter of the name") as caught:
        small_gradients().select(["0.bias", name])
    assert ("did you mean 0.weight?" in str(caught.value)) == (name == "0.weigth")
    assert "0.bias" in str(caught.value)


def test_inner_products_of_different_parameters_refused() -> None:
    grads = small_gradients()
    with pytest.raises(TransformError, match=r"only one of the two sets has gradients of \['2.bias'\]"):
        grads.inner(grads.select(["0.*", "2.weight"]))
    with pytest.raises(
        TransformError, match=r"0.weight has shape \(2, 4\) in one set and \(2, 5\) in the other"
    ):
        grads.inner(small_gradients(width=5))


@pytest.mark.parametrize("query", ["gram", "square_norms"])
def test_query_unknown_per_refused(query: str) -> None:
    with pytest.raises(ValueError, match="expected 'total', 'parameter' or 'module'"):
        getattr(small_gradients(), query)(per="layer")


def test_inner_products_parameters_in_another_order() -> None:
    grads, others = small_gradients(2), small_gradients(3)
    turned = PerSampleGradients.of(dict(reversed(others.parts[0].gradients.items())), others.losses)
    torch.testing.assert_close(grads.inner(turned), grads.inner(others), rtol=1e-12, atol=0)


def test_reduce_in_bounded_blocks(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    from psgrad.engine.gradients import terms

    monkeypatch.setitem(terms.BLOCK_BYTES, device.type, 400)
    model = nn.Linear(10, 3).to(device)
    grads = deferred_gradients(
        model, loss, (torch.randn(9, 10, device=device),), torch.ones(9, device=device)
    )
    seen: dict[str, list[int]] = {"weight": [], "bias": []}

    def step(state: int, name: str, samples: slice, block: Tensor) -> int:
        seen[name] += range(9)[samples]
        assert block.numel() * block.element_size() <= max(200, math.prod(block.shape[1:]) * 4)
        return state + 1

    assert grads.reduce(step, 0) == 9 + 1
    assert seen == {"weight": list(range(9)), "bias": list(range(9))}
