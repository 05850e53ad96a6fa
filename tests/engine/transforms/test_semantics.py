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

from psgrad.engine.transforms import functional_call, grad, grad_and_value, vjp, vmap
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


def cubic(x: Tensor) -> Tensor:
    return (x**3).sum() + (x[0] * x[1]).exp()


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


# -- in place, and through views -----------------------------------------------------------------------------


def test_in_place_write_keeps_the_dtype_of_its_target() -> None:
    """A wider operand would make a wider result out of place, of which more digits are read."""
    wide = torch.tensor([1.01, 2.02, 3.03], dtype=torch.float64)

    def loss(x: Tensor) -> Tensor:
        y = x * 2
        y.mul_(wide)
        return (y.double() * y.double()).sum()

    x = torch.randn(3).to(torch.bfloat16)
    gradient, value = grad_and_value(loss)(x)
    assert value.equal(loss(x))
    torch.testing.assert_close(gradient, torch.func.grad(loss)(x))


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
