"""checkpoint: the same numbers in every nest, with the memory of the arguments alone."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from psgrad.engine import transforms
from psgrad.engine.gradients import per_sample_gradients
from psgrad.engine.gradients.terms import Product
from psgrad.engine.transforms import checkpoint, functional_call, grad, grad_and_value, vjp, vmap
from psgrad.engine.transforms.tracer import Tracer
from psgrad.errors import TransformError
from tests.engine.transforms.nests import NESTS, YS, X, Y, agree, plain

pytestmark = pytest.mark.usefixtures("float64")


FUNCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "of all arguments": lambda x, y: checkpoint(plain, x, y),
    "closing over one": lambda x, y: checkpoint(lambda x: plain(x, y), x),
    "closing over both": lambda x, y: checkpoint(lambda: plain(x, y)),
    "nested": lambda x, y: checkpoint(
        lambda x: checkpoint(torch.sin, x * y) + checkpoint(lambda z: z * x * y, x), x
    ),
    "of trees": lambda x, y: checkpoint(
        lambda tree, scale: {"out": plain(tree["x"][0], scale)}, {"x": [x]}, scale=y
    )["out"],
    "with fresh tensors": lambda x, y: checkpoint(lambda x: torch.zeros(3).add_(plain(x, y)), x),
    "between": lambda x, y: checkpoint(plain, x * 1, checkpoint(lambda y: y * 1, y)) * 1,
}


@pytest.mark.every(2)
@pytest.mark.parametrize("nest", NESTS)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_checkpoint_equals_plain_in_every_nest(function: str, nest: str) -> None:
    agree(NESTS[nest](transforms, FUNCTIONS[function]), NESTS[nest](torch.func, plain))


def held_bytes() -> int:
    """The memory of all tensors that the collector knows."""
    gc.collect()
    storages = {}
    for thing in gc.get_objects():
        if isinstance(thing, Tensor) and not isinstance(thing, Tracer) and thing.layout is torch.strided:
            storage = thing.untyped_storage()
            storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())


@pytest.fixture
def _only_new_objects_count() -> Iterator[None]:
    gc.freeze()  # the collector's lists begin anew, and are short
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("_only_new_objects_count")
@pytest.mark.parametrize("batched", [False, True])
def test_checkpoint_saved_memory_independent_of_depth(batched: bool) -> None:
    def kept(depth: int, through: Callable[..., Any]) -> int:
        def block(x: Tensor) -> Tensor:
            for _ in range(depth):
                x = x.sin() * 1.5
            return x

        def f(x: Tensor) -> Tensor:
            return through(block, x).square().sum()

        x = torch.randn(8, 1000)
        before = held_bytes()
        _, way_back = vjp(lambda x: vmap(f)(x).sum() if batched else f(x), x)
        held = held_bytes() - before
        agree(
            way_back(torch.ones(())), torch.func.vjp(lambda x: block(x).square().sum(), x)[1](torch.ones(()))
        )
        return held

    def call(block: Callable[..., Any], x: Tensor) -> Tensor:
        return block(x)

    size = 8 * 1000 * 8
    assert kept(20, checkpoint) == kept(2, checkpoint) <= 3 * size
    assert kept(20, call) >= kept(2, call) + 18 * size


def test_checkpoint_runs_function_twice() -> None:
    runs = 0

    def block(x: Tensor) -> Tensor:
        nonlocal runs
        runs += 1
        return x.sin()

    _, way_back = vjp(lambda x: checkpoint(block, x), Y)
    assert runs == 1
    agree(way_back(torch.ones(3))[0], Y.cos())
    assert runs == 2
    agree(way_back(2 * torch.ones(3))[0], 2 * Y.cos())
    assert runs == 3
    with torch.no_grad():
        agree(vmap(lambda x: checkpoint(block, x))(X), X.sin())
    assert runs == 4
    agree(grad(lambda x: checkpoint(block, x.detach()).sum() + x.sum())(Y), torch.ones(3))
    assert runs == 5


# -- the second run does what the first did ------------------------------------------------------------------


@pytest.mark.parametrize("randomness", ["same", "different"])
@pytest.mark.parametrize("nest", ["grad", "vmap(grad)", "grad(vmap)"])
def test_checkpoint_dropout_same_mask(nest: str, randomness: str) -> None:
    generator = torch.Generator()

    def block(x: Tensor) -> Tensor:
        noise = torch.randn(3, generator=generator)
        return F.dropout((x * noise).sin(), 0.5) * torch.rand_like(x)

    def run(through: Callable[..., Any]) -> Any:
        torch.manual_seed(3)
        generator.manual_seed(4)

        def f(x: Tensor) -> Tensor:
            return (through(block, x) * torch.rand(3)).square().sum()

        if nest == "grad":
            result = grad_and_value(f)(Y)
        elif nest == "vmap(grad)":
            result = vmap(grad_and_value(f), randomness=randomness)(X)
        else:
            result = grad_and_value(lambda x: vmap(f, randomness=randomness)(x).sum())(X)
        return result, torch.rand(3), torch.rand(3, generator=generator)

    agree(run(checkpoint), run(lambda block, x: block(x)))


def test_checkpoint_same_draws_inside_kernel() -> None:
    lstm = nn.LSTM(3, 3, num_layers=2, dropout=0.5)

    def run(through: Callable[..., Any]) -> Any:
        torch.manual_seed(5)
        return grad(lambda x: through(lambda x: lstm(x[None, None].expand(4, 1, 3))[0], x).square().sum())(Y)

    agree(run(checkpoint), run(lambda block, x: block(x)))


class Deep(nn.Module):
    """Blocks that keep nothing, each with parameters and dropout of its own."""

    def __init__(self, through: Callable[..., Any]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.LayerNorm(4)) for _ in range(3)
        )
        self.head = nn.Linear(4, 2)
        self.through = through

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + self.through(block, x)
        return self.head(x)


def test_checkpoint_functional_call_parameters() -> None:
    torch.manual_seed(0)
    model, reference = Deep(checkpoint), Deep(lambda block, x: block(x))
    params = {name: torch.randn_like(p) for name, p in model.named_parameters()}  # not the model's own
    x, y = torch.randn(5, 4), torch.randint(2, (5,))

    def loss(model: nn.Module) -> Callable[..., Tensor]:
        return lambda params, x, y: F.cross_entropy(functional_call(model, params, (x[None],)), y[None])

    expected = torch.func.vmap(
        torch.func.grad(
            lambda p, x, y: F.cross_entropy(torch.func.functional_call(reference, p, (x[None],)), y[None])
        ),
        (None, 0, 0),
    )(params, x, y)
    agree(vmap(grad(loss(model)), (None, 0, 0))(params, x, y), expected)
    summed = grad(lambda p: vmap(loss(model), (None, 0, 0))(p, x, y).sum())(params)
    agree(summed, {name: g.sum(0) for name, g in expected.items()})
    per_sample = per_sample_gradients(loss(model), params, x, y, settle=False)
    matrices = [per_sample.parts[0].gradients[name] for name in params if params[name].dim() == 2]
    assert all(isinstance(gradient.terms[0].term, Product) for gradient in matrices)  # not materialised
    agree(per_sample.materialise(), expected)
    agree(per_sample.square_norms().double(), sum(g.flatten(1).square().sum(1) for g in expected.values()))


def test_checkpoint_autocast() -> None:
    weight = torch.randn(3, 3, dtype=torch.float32)

    def run(through: Callable[..., Any]) -> Any:
        def f(w: Tensor, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return through(lambda w: (x[None].float() @ w).sin(), w).float().sum()

        return vmap(grad(f), (None, 0))(weight, X)

    with_checkpoint, without = run(checkpoint), run(lambda f, w: f(w))
    assert torch.equal(with_checkpoint, without)
    assert not torch.equal(
        without, vmap(grad(lambda w, x: (x[None].float() @ w).sin().sum()), (None, 0))(weight, X)
    )


def test_checkpoint_changed_function_refused() -> None:
    class Changing:
        calls = 0

        def __call__(self, x: Tensor) -> Tensor:
            self.calls += 1
            return x.sin() if self.calls == 1 else x.sum()

    with pytest.raises(TransformError, match="computed something else when it ran again"):
        grad(lambda x: checkpoint(Changing(), x).sum())(Y)

    def f(x: Tensor, y: Tensor) -> Tensor:
        reads = [x * 2, y * 3]
        return checkpoint(lambda x: x * reads.pop(), x).sum()

    with pytest.raises(TransformError, match="computed something else when it ran again"):
        grad(f, (0, 1))(X[0], Y)


def test_checkpoint_writes_refused() -> None:
    cache: list[Tensor] = []

    def into_the_argument(x: Tensor) -> Tensor:
        return checkpoint(lambda x: x.relu_() * 2, x * 1).sum()

    def into_what_it_reads(x: Tensor) -> Tensor:
        y = x * 2
        return checkpoint(lambda x: x * y.mul_(2), x).sum()

    def later(x: Tensor) -> Tensor:
        y = x * 2
        out = checkpoint(lambda x: x * y, x)
        y.mul_(3)
        return out.sum()

    def later_through_a_view(x: Tensor) -> Tensor:
        y = torch.zeros(3)
        out = checkpoint(lambda x: x * y[:2].sum(), x)
        y[0] = 5
        return out.sum()

    for f, words in (
        (into_the_argument, "writes in place into an argument"),
        (into_what_it_reads, "writes into a value that checkpoint"),
        (later, "writes into a value that checkpoint"),
        (later_through_a_view, "writes into a value that checkpoint"),
    ):
        for program in (
            lambda f=f: grad(f)(Y),
            lambda f=f: vmap(grad(f))(X),
            lambda f=f: grad(lambda x: vmap(f)(x).sum())(X),
            lambda f=f: grad(lambda x: grad(f)(x).sum())(Y),
        ):
            with pytest.raises(TransformError, match=words):
                program()
    assert not cache


def test_checkpoint_closure_tensor_changed_before_backward_refused() -> None:
    scale = torch.ones(3)
    _, way_back = vjp(lambda x: checkpoint(lambda x: x * scale, x), Y)
    scale.mul_(2)
    with pytest.raises(TransformError, match="changed in place"):
        way_back(torch.ones(3))


def test_checkpoint_branches() -> None:
    def f(x: Tensor, y: Tensor) -> Tensor:
        return checkpoint(lambda x: plain(x, y) if x.sum() > 0 else x * y, x)

    def loss(x: Tensor, y: Tensor) -> Tensor:
        return (plain(x, y) if x.sum() > 0 else x * y).sum()

    expected = torch.stack([torch.func.grad(loss)(x, y) for x, y in zip(X, YS, strict=True)])
    agree(vmap(grad(lambda x, y: f(x, y).sum()))(X, YS), expected)
    agree(grad(lambda x: vmap(f)(x, YS).sum())(X), expected)


def test_checkpoint_outer_autograd() -> None:
    leaf = Y.clone().requires_grad_()
    ours = grad(lambda x: checkpoint(plain, x, leaf).sum())(X[0])
    theirs = torch.func.grad(lambda x: plain(x, leaf).sum())(X[0])
    agree(torch.autograd.grad(ours.sum(), leaf), torch.autograd.grad(theirs.sum(), leaf))
    agree(
        torch.autograd.grad(checkpoint(plain, X[0], leaf).sum(), leaf),
        torch.autograd.grad(plain(X[0], leaf).sum(), leaf),
    )


def test_checkpoint_captured_without_draws() -> None:
    def gradient(dropout: float) -> Callable[[Tensor], Tensor]:
        return vmap(
            grad(lambda x: checkpoint(lambda x: F.dropout(x.sin(), dropout), x).square().sum()),
            randomness="different",
        )

    for dropout in (0.0, 0.5):
        captured = transforms.capture(gradient(dropout))
        for k in range(4):
            torch.manual_seed(k)
            expected = gradient(dropout)(X + k)
            torch.manual_seed(k)
            agree(captured(X + k), expected)
        assert next(iter(captured.entries.values())).replays == (3 if dropout == 0 else 0)  # it seeds itself
    assert torch.fx.experimental.proxy_tensor.make_fx(gradient(0.0))(X) is not None
    with pytest.raises(TransformError, match="make_fx records"):
        torch.fx.experimental.proxy_tensor.make_fx(gradient(0.5))(X)
