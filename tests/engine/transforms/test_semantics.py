"""What torch.func promises, of ours: arguments, results, nesting, randomness, and that nothing is left
behind.
"""

from __future__ import annotations

import copy
import itertools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from psgrad.engine.transforms import functional_call, grad, vjp, vmap
from psgrad.engine.transforms.tracer import Tracer
from psgrad.errors import TransformError

pytestmark = pytest.mark.usefixtures("float64")


def same(ours: Any, theirs: Any) -> None:
    """The same tree with the same numbers; no tracer, and no history, leaves a transform."""
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    for leaf in torch.utils._pytree.tree_leaves(ours):
        assert not isinstance(leaf, Tracer)


# -- grad ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("f", "words"),
    [
        (lambda x: x, "scalar tensor"),
        (lambda x: x.sum().reshape(1), "scalar tensor"),
        (lambda x: 3.0, "returned float"),
        (lambda x: (x.sum(), x), "returned tuple"),
        (lambda x: (x > 0).sum(), "dtype torch.int64"),
        (lambda x: torch.complex(x.detach().sum(), x.detach().sum()) * 1, "complex"),
    ],
)
def test_grad_not_a_scalar_refused(f: Callable[[Tensor], Any], words: str) -> None:
    with pytest.raises(TransformError, match=words):
        grad(f)(torch.randn(3))


def test_grad_unused_argument_is_zero() -> None:
    x, y = torch.randn(3), torch.randn(2)
    same(grad(lambda x, y: x.sum(), (0, 1))(x, y), (torch.ones(3), torch.zeros(2)))
    same(grad(lambda x: torch.ones(()))(x), torch.zeros(3))
    same(vjp(lambda x, y: x, x, y)[1](x), (x, torch.zeros(2)))


# -- vjp -----------------------------------------------------------------------------------------------------


def test_vjp_fn_called_repeatedly() -> None:
    x = torch.randn(3)
    value, pull = vjp(lambda x: {"s": x.sin(), "e": [x.exp()]}, x)
    theirs, pull_theirs = torch.func.vjp(lambda x: {"s": x.sin(), "e": [x.exp()]}, x)
    same(value, theirs)
    for scale in (1.0, 2.0):
        cotangents = {"s": scale * torch.ones(3), "e": [torch.ones(3)]}
        same(pull(cotangents), pull_theirs(cotangents))
    with torch.no_grad():
        same(pull({"s": x, "e": [x]}), pull_theirs({"s": x, "e": [x]}))
    rows = torch.randn(4, 3)
    expected = torch.func.vmap(lambda c: pull_theirs({"s": c, "e": [c]}))(rows)
    same(vmap(lambda c: pull({"s": c, "e": [c]}))(rows), expected)


def test_vjp_fn_wrong_cotangent_refused() -> None:
    _, pull = vjp(lambda x: (x, x), torch.randn(3))
    with pytest.raises(TransformError, match="pytree structure"):
        pull(torch.randn(3))
    with pytest.raises(TransformError, match="shape"):
        pull((torch.randn(3), torch.randn(2)))


def test_vjp_value_changed_before_backward_refused() -> None:
    x, y = torch.randn(3), torch.randn(3)
    _, pull = vjp(lambda x: x * y, x)
    pull(x)
    y.add_(1)
    with pytest.raises(TransformError, match="changed in place"):
        pull(x)


# -- nesting -------------------------------------------------------------------------------------------------


def cubic(x: Tensor) -> Tensor:
    return (x**3).sum() + (x[0] * x[1]).exp()


def nestings(grad: Any, vmap: Any, vjp: Any) -> dict[str, Callable[[Tensor], Any]]:
    """Programs of transforms within transforms, over a matrix [4, 3]."""
    return {
        "grad(grad)": lambda m: grad(lambda x: grad(cubic)(x).sin().sum())(m[0]),
        "grad(grad(grad))": lambda m: grad(lambda x: grad(lambda x: grad(cubic)(x).sin().sum())(x)[1])(m[0]),
        "vmap(vmap)": lambda m: vmap(vmap(lambda a: a.sin() * 2))(m),
        "vmap(vmap), other axis": lambda m: vmap(
            lambda row: vmap(lambda a, b: a * b, in_dims=(0, None))(row, row.sum()), in_dims=1
        )(m),
        "grad(vmap)": lambda m: grad(lambda m: vmap(cubic)(m).sin().sum())(m),
        "vmap(grad)": lambda m: vmap(grad(cubic))(m),
        "vmap(grad(grad))": lambda m: vmap(grad(lambda x: grad(cubic)(x).sin().sum()))(m),
        "grad(vmap(grad))": lambda m: grad(lambda m: vmap(grad(cubic))(m).square().sum())(m),
        "vmap(vmap(grad))": lambda m: vmap(lambda s: vmap(grad(lambda x: cubic(x) * s.sum()))(m))(m),
        "vmap over vjp_fn": lambda m: vmap(vjp(lambda x: x.sin() * x.sum(), m[0])[1])(m),
        "vjp inside vmap": lambda m: vmap(lambda x: vjp(lambda x: x * x.sum(), x)[1](x))(m),
        "vjp(vmap)": lambda m: vjp(vmap(cubic), m)[1](m[:, 0]),
        "vjp(grad)": lambda m: vjp(grad(cubic), m[0])[1](m[1]),
        "grad of a captured outer value": lambda m: grad(
            lambda x: grad(lambda y: (x * y * y).sum())(x).sum()
        )(m[0]),
        "hessian by rows": lambda m: vmap(vjp(grad(cubic), m[0])[1])(torch.eye(3)),
    }


@pytest.mark.parametrize("name", nestings(grad, vmap, vjp))
def test_transforms_nested(name: str) -> None:
    m = torch.randn(4, 3)
    theirs = nestings(torch.func.grad, torch.func.vmap, torch.func.vjp)[name](m)
    same(nestings(grad, vmap, vjp)[name](m), theirs)


# -- vmap ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("program", "words"),
    [
        (lambda: vmap(torch.sin)(), "got no inputs"),
        (lambda: vmap(torch.sin, in_dims=[0])(torch.randn(3)), "expected `in_dims` to be int or a"),
        (lambda: vmap(torch.sin, in_dims=(0, 0))(torch.randn(3)), "not compatible with the structure"),
        (lambda: vmap(torch.sin, in_dims=None)(torch.randn(3)), "expected `in_dims` to be int or a"),
        (lambda: vmap(torch.sin, in_dims=(None,))(torch.randn(3)), "at least one Tensor"),
        (lambda: vmap(torch.sin, in_dims=1)(torch.randn(3)), "an input of a tensor of 1 axes"),
        (lambda: vmap(torch.sin)(torch.randn(())), "an input of a tensor of 0 axes"),
        (lambda: vmap(torch.add)(torch.randn(3), 2.0), "expected an axis of a tensor"),
        (lambda: vmap(torch.add)(torch.randn(3), torch.randn(4)), "same size in the mapped dimension"),
        (lambda: vmap(lambda x: 3.0)(torch.randn(3)), "must only return Tensors"),
        (lambda: vmap(lambda x: x, out_dims=None)(torch.randn(3)), "when out_dim is None"),
        (lambda: vmap(lambda x: x, out_dims=1)(torch.randn(3)), "out of range"),
        (lambda: vmap(lambda x: x, out_dims=(0, 0))(torch.randn(3)), "not compatible with the structure"),
        (lambda: vmap(torch.sin, randomness="none")(torch.randn(3)), "allowed values for randomness"),
        (lambda: vmap(torch.sin, chunk_size=0)(torch.randn(3)), "chunk_size"),
    ],
)
def test_vmap_refused(program: Callable[[], Any], words: str) -> None:
    with pytest.raises(TransformError, match=words):
        program()


# -- randomness ----------------------------------------------------------------------------------------------


def drawn(program: Callable[[], Any]) -> Any:
    torch.manual_seed(3)
    return program()


DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda x: F.dropout(x, 0.4),
    "dropout in place": lambda x: F.dropout(x.clone(), 0.4, inplace=True),
    "alpha dropout": lambda x: F.alpha_dropout(x, 0.4, training=True),
    "rand_like": lambda x: x * torch.rand_like(x),
    "randn_like": lambda x: x + torch.randn_like(x),
    "bernoulli": lambda x: torch.bernoulli(x.sigmoid()),
    "normal": lambda x: torch.normal(x, 1.0),
    "uniform_": lambda x: torch.empty_like(x).uniform_(),
    "bernoulli_": lambda x: torch.empty_like(x).bernoulli_(0.3),
}


@pytest.mark.parametrize("name", DRAWS)
def test_vmap_randomness_different_equals_native_batch(name: str) -> None:
    x = torch.randn(5, 4)
    ours = drawn(lambda: vmap(DRAWS[name], randomness="different")(x))
    assert torch.equal(ours, drawn(lambda: DRAWS[name](x)))


@pytest.mark.parametrize("name", DRAWS)
def test_vmap_randomness_error(name: str) -> None:
    with pytest.raises(TransformError, match=r"randomness='error'.*test_semantics\.py:\d+"):
        vmap(DRAWS[name])(torch.randn(5, 4))


def test_vmap_dropout_gradients() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
    params, x = dict(model.named_parameters()), torch.randn(6, 4)

    def loss(params: Any, x: Tensor) -> Tensor:
        return functional_call(model, params, (x,)).square().sum()

    ours = drawn(lambda: vmap(grad(loss), (None, 0), randomness="different")(params, x))
    step = drawn(lambda: torch.autograd.grad(loss(params, x), list(params.values())))
    same([g.sum(0) for g in ours.values()], list(step))


# -- grad modes ----------------------------------------------------------------------------------------------


def test_no_grad_inside_and_outside() -> None:
    x = torch.randn(3)

    def f(x: Tensor) -> Tensor:
        with torch.no_grad():
            constant = x * 2
        return (constant * x + x.detach()).sum()

    same(grad(f)(x), torch.func.grad(f)(x))
    with torch.no_grad():
        same(grad(f)(x), torch.func.grad(f)(x))
        same(vmap(grad(cubic))(torch.ones(2, 3)), vmap(torch.func.grad(cubic))(torch.ones(2, 3)))
        same(
            grad(lambda x: grad(cubic)(x).sum())(x),
            torch.func.grad(lambda x: torch.func.grad(cubic)(x).sum())(x),
        )


def test_no_grad_between_two_levels() -> None:
    x = torch.randn(3)

    def programs(grad: Any) -> Callable[[Tensor], Tensor]:
        def f(x: Tensor) -> Tensor:
            with torch.no_grad():
                inner = grad(cubic)(x)
            return (inner * x).sum()

        return f

    same(grad(programs(grad))(x), torch.func.grad(programs(torch.func.grad))(x))


def test_inference_mode_outside() -> None:
    with torch.inference_mode():
        x = torch.randn(2, 3)
        ours = vmap(grad(cubic))(x)
    same(ours.clone(), torch.func.vmap(torch.func.grad(cubic))(x.clone()))


# -- nothing is left behind, nothing is touched --------------------------------------------------------------


class Broken(Exception):
    pass


@pytest.mark.parametrize(
    "wrap",
    [
        grad,
        vmap,
        lambda f: vmap(grad(f)),
        lambda f: grad(lambda x: vmap(f)(x).sum()),
        lambda f: grad(grad(f)),
    ],
)
def test_exception_in_function_restores_state(wrap: Any) -> None:
    def f(x: Tensor) -> Tensor:
        torch.set_grad_enabled(True)
        raise Broken

    with torch.no_grad(), pytest.raises(Broken):
        wrap(f)(torch.randn(2, 3))
    assert torch.is_grad_enabled()
    same(grad(cubic)(torch.ones(3)), torch.func.grad(cubic)(torch.ones(3)))


def test_exception_in_backward_pass_restores_state() -> None:
    with pytest.raises(TransformError, match="scale_grad_by_freq"):
        grad(lambda w: F.embedding(torch.tensor([0, 0]), w, scale_grad_by_freq=True).sum())(torch.randn(3, 2))


def test_leaked_tracer_is_its_value() -> None:
    kept: list[Tensor] = []

    def f(x: Tensor) -> Tensor:
        kept.append(x * 2)
        return x.sum()

    x = torch.randn(3)
    grad(f)(x)
    vmap(f)(torch.stack([x, x]))
    assert torch.equal(kept[0] + 0, 2 * x)
    assert torch.equal(kept[1] + 0, torch.stack([2 * x, 2 * x]))
    same(grad(lambda y: (y * kept[0]).sum())(x), 2 * x)
    same(vmap(lambda y: y * kept[0])(torch.ones(2, 3)), torch.stack([2 * x, 2 * x]))
    assert torch.equal(torch.cat([kept[0], x]), torch.cat([2 * x, x]))


def snapshot(model: nn.Module) -> dict[str, tuple[int, int, Tensor, bool, Any]]:
    tensors = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
    return {
        name: (id(t), t._version, t.detach().clone(), t.requires_grad, t.grad) for name, t in tensors.items()
    }


def test_functional_call_restores_model() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1))
    model.eval()
    before, params = snapshot(model), dict(model.named_parameters())

    def loss(params: Any, x: Tensor) -> Tensor:
        return functional_call(model, params, (x[None],)).sum()

    vmap(grad(loss), (None, 0))(params, torch.randn(5, 3))
    after = snapshot(model)
    assert list(before) == list(after)
    for name, (identity, version, value, wants, gradient) in before.items():
        assert after[name][:2] == (identity, version)
        assert torch.equal(after[name][2], value)
        assert after[name][3] == wants
        assert after[name][4] is gradient is None


def test_transforms_in_two_threads() -> None:
    layer, x = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval(), torch.randn(3, 5, 8)

    def work() -> Any:
        own = copy.deepcopy(layer)

        def loss(params: Any, x: Tensor) -> Tensor:
            return functional_call(own, params, (x[None],)).square().sum()

        return vmap(grad(loss), (None, 0))({name: p.detach() for name, p in own.named_parameters()}, x)

    expected, result, failed = work(), [], []

    def run() -> None:
        try:
            result.extend(work() for _ in range(5))
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    assert len(result) == 15
    for answer in result:
        same(answer, expected)


# -- functional_call -----------------------------------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, x: Tensor, shift: float = 0.0) -> Any:
        return self.head(self.embed(x)) * self.scale + shift


def test_functional_call_tied_weight_gradient() -> None:
    model, x = Tied(), torch.tensor([1, 2])
    loss = lambda params: functional_call(model, params, (x,)).square().sum()
    same(
        list(grad(loss)(dict(model.named_parameters())).values()),
        list(torch.autograd.grad(model(x).square().sum(), list(model.parameters()))),
    )


# -- in place, and through views -----------------------------------------------------------------------------


def slices(x: Tensor) -> Tensor:
    y = x * 2
    y[1:] = y[:-1] * x[1:]
    return y


def slices_plainly(x: Tensor) -> Tensor:
    y = x * 2
    return torch.cat([y[:1], y[:-1] * x[1:]])


def view_before_the_write(x: Tensor) -> Tensor:
    y = x * 2
    part = y[1:]
    y.mul_(x)
    return part


def write_through_a_view(x: Tensor) -> Tensor:
    y = x * 2
    y.view(2, 2)[0].mul_(y[2])
    return y


def write_through_a_view_plainly(x: Tensor) -> Tensor:
    y = x * 2
    return torch.cat([y[:2] * y[2], y[2:]])


def write_to_a_piece(x: Tensor) -> Tensor:
    y = x * 2
    first, second = y.split(2)
    first.add_(second * x[0])
    return y * first.sum()


def write_to_a_piece_plainly(x: Tensor) -> Tensor:
    first = 2 * x[:2] + 2 * x[2:] * x[0]
    return torch.cat([first, 2 * x[2:]]) * first.sum()


def views_of_views(x: Tensor) -> Tensor:
    y = (x * 2).reshape(2, 2)
    row = y.t()[0]
    row[1:].mul_(x[3])
    y.add_(1)
    return row * y.flatten()[:2]


def writes_between_columns(x: Tensor) -> Tensor:
    y = (x * 2).view(2, 2)
    a, b = y.unbind(1)
    a.mul_(b)
    b += a
    return y


def writes_between_columns_plainly(x: Tensor) -> Tensor:
    a, b = (x * 2).view(2, 2).unbind(1)
    return torch.stack([a * b, b + a * b], 1)


def masked(x: Tensor) -> Tensor:
    y = x.clone()
    y.masked_fill_(torch.tensor([True, False, True, False]), 0.5)
    return y * x


def indexed(x: Tensor) -> Tensor:
    y = x * 1
    y[torch.tensor([0, 2])] = x[1] * x[:2]
    y[3] += x[0]
    return y


def axes_added_and_swapped(x: Tensor) -> Tensor:
    y = x * 1
    y.unsqueeze(0).transpose(0, 1).mul_(x[1])
    return y.squeeze()


def activations(x: Tensor) -> Tensor:
    y = x * 1
    F.relu(y, inplace=True)
    y.sigmoid_().exp_().clamp_(1.2, 2.6)
    return y


def activations_plainly(x: Tensor) -> Tensor:
    return x.relu().sigmoid().exp().clamp(1.2, 2.6)


def copied(x: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    y.copy_(x * x)
    return y.clone().neg_() * y


def diagonal(x: Tensor) -> Tensor:
    y = x.reshape(2, 2) * 1
    y.diagonal().mul_(x[:2] * 3)
    return y


# Autograd refuses some of them, where a view or a saved value was written to: those go with the same program
# without writes.
IN_PLACE = {
    slices: slices_plainly,
    view_before_the_write: None,
    write_through_a_view: write_through_a_view_plainly,
    write_to_a_piece: write_to_a_piece_plainly,
    views_of_views: None,
    writes_between_columns: writes_between_columns_plainly,
    masked: None,
    indexed: None,
    axes_added_and_swapped: None,
    activations: activations_plainly,
    copied: None,
    diagonal: None,
}


@pytest.mark.parametrize("f", IN_PLACE)
def test_in_place_operators(f: Callable[[Tensor], Tensor]) -> None:
    """Against autograd on one sample: under grad, vmap(grad), vmap alone, grad(vmap), and grad(grad)."""
    rows = torch.rand(3, 4) + 0.5
    plain = IN_PLACE[f] or f

    def loss(x: Tensor) -> Tensor:
        return f(x).square().sum()

    def gradient(x: Tensor, *, create_graph: bool = False) -> Tensor:
        return torch.autograd.grad(plain(x).square().sum(), x, create_graph=create_graph)[0]

    expected = torch.stack([gradient(row.clone().requires_grad_()) for row in rows])
    same(torch.stack([grad(loss)(row) for row in rows]), expected)
    same(vmap(grad(loss))(rows), expected)
    same(vmap(grad(loss), in_dims=1)(rows.t().contiguous()), expected)
    same(vmap(f)(rows), torch.stack([f(row) for row in rows]))
    same(grad(lambda m: vmap(loss)(m).sum())(rows), expected)
    leaf = rows[0].clone().requires_grad_()
    twice = torch.autograd.grad(gradient(leaf, create_graph=True).sum(), leaf)[0]
    same(grad(lambda x: grad(loss)(x).sum())(rows[0]), twice)


def test_in_place_write_under_no_grad() -> None:
    def loss(x: Tensor) -> Tensor:
        y = x * 2
        with torch.no_grad():
            y.mul_(3)
        return (y * x).sum()

    x = torch.randn(3)
    same(grad(loss)(x), torch.func.grad(loss)(x))
    same(grad(lambda x: grad(loss)(x).sum())(x), torch.func.grad(lambda x: torch.func.grad(loss)(x).sum())(x))


def test_in_place_write_into_fresh_tensor_under_grad() -> None:
    table = torch.ones(3)

    def loss(x: Tensor) -> Tensor:
        y, z, w = torch.zeros(3), torch.tensor([1.0, 2.0, 3.0]), table.clone()
        y[1:] = x[:2] * 2
        z.mul_(x)
        w += x * x
        return (y * z * w).sum()

    x = torch.randn(3)
    expected = torch.autograd.grad(loss(x.requires_grad_()), x)[0]
    same(grad(loss)(x.detach()), expected)
    same(vmap(grad(loss))(torch.stack([x.detach()] * 2)), torch.stack([expected] * 2))
    assert torch.equal(table, torch.ones(3))


def test_in_place_write_into_mapped_argument() -> None:
    x, ours = torch.randn(2, 3), torch.ones(2, 3)
    theirs = ours.clone()
    same(vmap(lambda y, x: y.add_(x))(ours, x), torch.func.vmap(lambda y, x: y.add_(x))(theirs, x))
    assert torch.equal(ours, theirs)


WRITTEN: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "masked_fill_": lambda y, x: y.masked_fill_(torch.tensor([True, False, True]), x[0]),
    "fill_": lambda y, x: y.fill_(x[1]),
    "index_fill_": lambda y, x: y.index_fill_(0, torch.tensor([0, 2]), x[1]),
    "index_add_": lambda y, x: y.index_add_(0, torch.tensor([0, 0]), x[:2]),
    "index_copy_": lambda y, x: y.index_copy_(0, torch.tensor([0, 2]), x[:2]),
    "scatter_": lambda y, x: y.scatter_(0, torch.tensor([2, 0]), x[:2]),
    "scatter_add_": lambda y, x: y.scatter_add_(0, torch.tensor([2, 2]), x[:2]),
    "index_put_": lambda y, x: y.index_put_((torch.tensor([1, 1]),), x[:2], accumulate=True),
    "addcmul_": lambda y, x: y.addcmul_(x, x, value=0.5),
    "lerp_": lambda y, x: y.lerp_(x, 0.3),
    "pow_": lambda y, x: y.abs_().pow_(x),
    "where, through a slice": lambda y, x: y[1:].copy_(torch.where(x[1:] > 0, x[1:], y[:1])),
    "cumsum_": lambda y, x: y.mul_(x).cumsum_(0),
    "tril_": lambda y, x: y.expand(3, 3).clone().mul_(x).tril_(),
    "clamp_": lambda y, x: y.clamp_(max=x[0]),
    "logical": lambda y, x: (y > 0).logical_and_(x > 0) * x,
    "sort": lambda y, x: y.copy_(x.sort().values).flip(0),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_in_place_write_on_mapped_values(name: str) -> None:
    rows = torch.randn(4, 3)

    def f(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x.cos() * 2
        return y, WRITTEN[name](y, x)

    expected = [torch.stack(column) for column in zip(*[f(row) for row in rows], strict=True)]
    same(list(vmap(f)(rows)), expected)
    same(list(vmap(f, in_dims=1)(rows.t().contiguous())), expected)
    same(
        list(vmap(lambda pair: vmap(f)(pair))(rows.view(2, 2, 3))),
        [e.view(2, 2, *e.shape[1:]) for e in expected],
    )


def test_in_place_write_leaves_differentiated_argument() -> None:
    x = torch.randn(3)
    kept = x.clone()
    same(grad(lambda x: x.mul_(2).square().sum())(x), 8 * x)
    assert torch.equal(x, kept)


@pytest.mark.parametrize(
    "draw",
    [
        lambda x: F.dropout(x, 0.5),
        lambda x: torch.native_dropout(x, 0.5, True)[0],
        lambda x: F.dropout2d(x[None, :, None, None], 0.5)[0, :, 0, 0],
        lambda x: x + torch.rand_like(x),
        lambda x: x * torch.empty_like(x).bernoulli_(0.5),
        lambda x: x + torch.randn(4),
        grad(lambda x: (F.dropout(x, 0.5) ** 2).sum()),
    ],
)
def test_vmap_randomness_same_equals_single_call(draw: Any) -> None:
    """With randomness='same' every sample sees what a call without vmap would draw; its own values go through
    it.
    """
    rows = torch.arange(1.0, 13.0).reshape(3, 4)
    torch.manual_seed(1)
    together = vmap(draw, randomness="same")(rows)
    for row, result in zip(rows, together, strict=True):
        torch.manual_seed(1)
        torch.testing.assert_close(result, draw(row))


DTYPES = (torch.bool, torch.int64, torch.bfloat16, torch.float32, torch.float64)


@pytest.mark.parametrize(
    "operator", [torch.mul, torch.add, torch.eq, torch.maximum, lambda a, b: torch.where(a > 0, a, b)]
)
@pytest.mark.parametrize("in_dims", [(0, 0), (0, None), (None, 0)])
def test_vmap_type_promotion(operator: Any, in_dims: tuple[int | None, int | None]) -> None:
    """A scalar promotes less than a tensor with axes, though under vmap it has an axis."""
    for first, second in itertools.product(DTYPES, DTYPES):
        for shapes in itertools.product([(), (3,)], repeat=2):
            a, b = (
                (3 * torch.randn(4, *shape)).to(dtype)
                for shape, dtype in zip(shapes, (first, second), strict=True)
            )
            a, b = a if in_dims[0] == 0 else a[0], b if in_dims[1] == 0 else b[0]
            rows = [
                operator(a[i] if in_dims[0] == 0 else a, b[i] if in_dims[1] == 0 else b) for i in range(4)
            ]
            torch.testing.assert_close(vmap(operator, in_dims)(a, b), torch.stack(rows), equal_nan=True)
