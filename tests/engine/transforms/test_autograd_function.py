"""torch.autograd.Function with setup_context, inside transforms: its own backward, jvp and vmap are what
counts.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from psgrad.engine import transforms
from psgrad.engine.transforms import grad, hessian, jvp, vjp, vmap
from psgrad.errors import TransformError
from tests.engine.transforms.nests import NESTS, WEIGHTS, YS, X, Y, agree, plain, slopes, weighted

BASE = torch.autograd.Function.__mro__[1]


pytestmark = pytest.mark.usefixtures("float64")


class Tripled(torch.autograd.Function):
    """`plain`, with three times its derivative; a second result without one; and a number that is none of
    either's business.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, y: Tensor, factor: float = 3.0) -> tuple[Tensor, Tensor, str]:
        return plain(x, y), x.sign(), "unused"

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, y, ctx.factor = inputs
        ctx.save_for_backward(x, y)
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, g: Tensor, *others: Any) -> Any:
        assert not others[0].any()
        assert others[1] is None
        in_x, in_y = slopes(*ctx.saved_tensors)
        wanted = ctx.needs_input_grad
        return (
            ctx.factor * g * in_x if wanted[0] else None,
            ctx.factor * g * in_y if wanted[1] else None,
            None,
        )


class WithJvp(Tripled):
    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        Tripled.setup_context(ctx, inputs, output)
        ctx.save_for_forward(*slopes(*inputs[:2]))

    @staticmethod
    def jvp(ctx: Any, in_x: Tensor, in_y: Tensor, in_factor: Any) -> Any:
        by_x, by_y = ctx.saved_tensors
        return ctx.factor * (by_x * in_x + by_y * in_y), torch.zeros(3), None


class InNumpy(torch.autograd.Function):
    """Its forward is invisible to anybody, and it says itself how a batch is computed; the result is kept for
    the backward.
    """

    @staticmethod
    def forward(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        a, b = x.numpy(), y.numpy()
        c = np.cos(a * b)
        return (
            torch.tensor(np.sin(a * b) + a * a * b),
            torch.tensor(c * b + 2 * a * b),
            torch.tensor(c * a + a * a),
        )

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(*output[1:])

    @staticmethod
    def backward(ctx: Any, g: Tensor, *others: Tensor) -> Any:
        by_x, by_y = ctx.saved_tensors
        return 3 * g * by_x, 3 * g * by_y

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, y: Tensor) -> Any:
        assert info.randomness == "error"
        x, y = (a if d is None else a.movedim(d, -1) for a, d in zip((x, y), in_dims, strict=True))
        x, y = (
            a if d is not None else a.unsqueeze(-1).expand(*a.shape, info.batch_size)
            for a, d in zip((x, y), in_dims, strict=True)
        )
        return InNumpy.apply(x.contiguous(), y.contiguous()), (-1, -1, -1)


KINDS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "backward": lambda x, y: Tripled.apply(x, y)[0],
    "backward and jvp": lambda x, y: WithJvp.apply(x, y, 3.0)[0],
}


@pytest.mark.parametrize("nest", NESTS)
@pytest.mark.parametrize("kind", KINDS)
def test_autograd_function_rules_in_every_nest(kind: str, nest: str) -> None:
    agree(NESTS[nest](transforms, KINDS[kind]), NESTS[nest](torch.func, plain), 3.0)


apply_tripled = Tripled.apply


def test_autograd_function_bound_before_transform_refused() -> None:
    """PyTorch 2.14 calls it from C, where nothing can be in between: refused, as a gradient of its own would
    be wrong.
    """
    loss = lambda x: apply_tripled(x, Y)[0].sum()
    if isinstance(vars(torch.autograd.Function)["apply"], classmethod):
        agree(grad(loss)(X[0]), grad(lambda x: Tripled.apply(x, Y)[0].sum())(X[0]))
    else:
        with pytest.raises(TransformError, match="call it by its class"):
            grad(loss)(X[0])
    agree(vmap(lambda x: apply_tripled(x, Y)[0])(X), plain(X, Y))


FIRST_ORDER = [
    name
    for name in NESTS
    if not any(
        word in name for word in ("grad(grad", "grad(vmap(grad", "hessian", "jac", "third", "grad(jvp")
    )
]


@pytest.mark.parametrize("nest", FIRST_ORDER)
def test_autograd_function_own_vmap_numpy_forward(nest: str) -> None:
    agree(NESTS[nest](transforms, lambda x, y: InNumpy.apply(x, y)[0]), NESTS[nest](torch.func, plain), 3.0)
    assert len(FIRST_ORDER) > 10


def test_autograd_function_values_and_other_results() -> None:
    value, sign, word = grad(lambda x: (x.sum(), Tripled.apply(x, Y)), has_aux=True)(X[0])[1]
    agree((value, sign), (plain(X[0], Y), X[0].sign()))
    assert word == "unused"
    agree(vmap(lambda x: Tripled.apply(x, Y)[:2])(X), (plain(X, Y), X.sign()))
    agree(grad(lambda x: Tripled.apply(x, Y)[1].sum())(X[0]), torch.zeros(3))


def test_autograd_function_outside_transforms() -> None:
    leaf = X[0].clone().requires_grad_()
    assert type(apply_tripled(leaf, Y)[0].grad_fn).__name__ == "TripledBackward"
    expected = 3 * slopes(X[0], Y)[0] * WEIGHTS
    agree(torch.autograd.grad((apply_tripled(leaf, Y)[0] * WEIGHTS).sum(), leaf)[0], expected)
    agree(torch.func.grad(lambda x: (apply_tripled(x, Y)[0] * WEIGHTS).sum())(X[0]), expected)

    results: list[Any] = []

    def in_another_thread() -> None:
        leaf = X[0].clone().requires_grad_()
        results.append(torch.autograd.grad((apply_tripled(leaf, Y)[0] * WEIGHTS).sum(), leaf)[0])

    def f(x: Tensor) -> Tensor:
        thread = threading.Thread(target=in_another_thread)
        thread.start()
        thread.join()
        return weighted(KINDS["backward"])(x, Y)

    agree(grad(f)(X[0]), expected)
    agree(results[0], expected)


def test_autograd_function_outer_autograd() -> None:
    leaf = X[0].clone().requires_grad_()
    apply = KINDS["backward"]
    batched = vmap(apply, (0, None))(leaf[None], Y)
    agree(batched[0].detach(), plain(X[0], Y))
    with pytest.raises(RuntimeError, match="Function Tripled has a derivative of its own"):
        batched.sum().backward()
    value, way_back = vjp(lambda y: apply(leaf, y), Y)
    agree(torch.autograd.grad((value * WEIGHTS).sum(), leaf)[0], 3 * slopes(X[0], Y)[0] * WEIGHTS)
    expected = torch.func.grad(lambda x: (3 * slopes(x, Y)[1] * WEIGHTS).sum())(X[0])
    agree(torch.autograd.grad(way_back(WEIGHTS)[0].sum(), leaf)[0], expected)
    gradient = grad(lambda x: weighted(apply)(x, Y))(leaf)
    agree(
        torch.autograd.grad(gradient.sum(), leaf)[0],
        torch.func.grad(lambda x: (3 * slopes(x, Y)[0] * WEIGHTS).sum())(X[0]),
    )


def test_autograd_function_needs_input_grad() -> None:
    wanted: list[Any] = []

    class Asks(torch.autograd.Function):
        @staticmethod
        def forward(x: Tensor, y: Tensor, unused: Tensor) -> tuple[Tensor, Tensor]:
            return x * y, x + y

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            ctx.set_materialize_grads(False)
            ctx.save_for_backward(*inputs[:2], None)

        @staticmethod
        def backward(ctx: Any, g: Any, h: Any) -> Any:
            _, y, nothing = ctx.saved_tensors
            assert nothing is None
            wanted.append((ctx.needs_input_grad, g is None, h is None))
            return g * y, None, None

    agree(grad(lambda x: Asks.apply(x, Y, X[1])[0].sum())(X[0]), Y)
    assert wanted == [((True, False, False), False, True)]
    agree(grad(lambda x, y: Asks.apply(x, y, x)[0].sum(), 1)(X[0], Y), torch.zeros(3))
    assert wanted[1] == ((False, True, False), False, True)


def test_autograd_function_broadcast_gradients_are_summed() -> None:
    class Times(torch.autograd.Function):
        @staticmethod
        def forward(x: Tensor, scale: Tensor) -> Tensor:
            return x * scale

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            ctx.save_for_backward(*inputs)

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Any:
            x, scale = ctx.saved_tensors
            return g * scale, g * x

    for scale in (torch.tensor(2.0), torch.tensor([2.0])):
        leaf = scale.clone().requires_grad_()
        expected = torch.autograd.grad(Times.apply(Y, leaf).sum(), leaf)[0]
        agree(grad(lambda s: Times.apply(Y, s).sum())(scale), expected)
        agree(
            grad(lambda s: vmap(lambda y: Times.apply(y, s).sum())(Y.expand(4, 3)).sum())(scale), 4 * expected
        )


# -- what is refused -----------------------------------------------------------------------------------------


class Once(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.sin()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return g * x.cos()


def test_autograd_function_once_differentiable() -> None:
    def f(x: Tensor) -> Tensor:
        return Once.apply(x).sum()

    agree(grad(f)(Y), Y.cos())
    agree(vmap(grad(f))(X), X.cos())
    agree(grad(lambda x: vmap(f)(x).sum())(X), X.cos())
    agree(grad(lambda x: vmap(grad(lambda x, s: f(x) * s, 1))(x, Y[:1].expand(4)).sum())(X), X.cos())
    for program in (
        lambda: grad(lambda x: grad(f)(x).sum())(Y),
        lambda: hessian(f)(Y),
        lambda: vmap(hessian(f))(X),
        lambda: grad(lambda x: vmap(grad(f))(x).sum())(X),
        lambda: grad(lambda x, s: grad(lambda x: f(x) * s)(x).sum(), 1)(Y, torch.tensor(2.0)),
        lambda: grad(lambda x: jvp(lambda x: Once.apply(x), (x,), (x,))[1].sum())(Y),
    ):
        with pytest.raises(TransformError, match=r"Function Once[\s\S]*once_differentiable"):
            program()


def function(**methods: Any) -> Any:
    """A Function of the given methods, the rest of which doubles its argument."""
    given = {
        "forward": lambda x: x * 2,
        "setup_context": lambda ctx, inputs, output: None,
        "backward": lambda ctx, g: g * 2,
        **methods,
    }
    return type(
        "Given", (torch.autograd.Function,), {name: staticmethod(method) for name, method in given.items()}
    )


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "too few gradients": (
        {"forward": lambda x, y=2.0: x * y},
        "backward returned 1 gradients, forward takes 2 arguments",
    ),
    "too many gradients": (
        {"backward": lambda ctx, g: (g, g)},
        "backward returned 2 gradients, forward takes 1 arguments",
    ),
    "a wrong shape": ({"backward": lambda ctx, g: g[:2]}, "gave a cotangent of shape"),
    "mark_dirty": ({"setup_context": lambda ctx, inputs, output: ctx.mark_dirty(inputs[0])}, "mark_dirty"),
    "a write into the argument": ({"forward": lambda x: x.mul_(2)}, "writes in place into an argument"),
    "a write into the gradient": ({"backward": lambda ctx, g: g.mul_(2)}, "writes in place into an argument"),
    "no backward": (
        {"backward": torch.autograd.Function.backward},
        "has no rule for its derivative",
    ),
}


def test_autograd_function_nonlinear_backward_in_forward_mode_refused() -> None:
    kind = function(forward=lambda x: x.clone(), backward=lambda ctx, g: g.clamp(-1, 1))
    f = lambda x: kind.apply(x)
    agree(grad(lambda x: (f(x) * 3).sum())(X), torch.ones_like(X))
    for program in (lambda: jvp(f, (X,), (X,)), lambda: vmap(lambda x: jvp(f, (x,), (x,)))(X)):
        with pytest.raises(TransformError, match="whose backward is not linear"):
            program()


@pytest.mark.parametrize("nest", ["grad", "vmap(grad)", "grad(vmap)"])
@pytest.mark.parametrize("refused", REFUSED)
def test_autograd_function_refused(refused: str, nest: str) -> None:
    methods, words = REFUSED[refused]
    kind = function(**methods)
    with pytest.raises(TransformError, match=words) as caught:
        NESTS[nest](transforms, lambda x, y: kind.apply(x * y))
    assert refused.startswith("a write") or "Given" in str(caught.value)


def test_autograd_function_closure_over_differentiated_value_refused() -> None:
    def f(x: Tensor, y: Tensor) -> Tensor:
        return function(forward=lambda x: x * y, backward=lambda ctx, g: g * y).apply(x).sum()

    agree(grad(f)(X[0], Y), Y)
    agree(vmap(grad(f))(X, YS), YS)
    agree(grad(lambda x: vmap(f)(x, YS).sum())(X), YS)
    for program in (
        lambda: grad(f, (0, 1))(X[0], Y),
        lambda: grad(f, 1)(X[0], Y),
        lambda: vmap(grad(f, 1))(X, YS),
        lambda: grad(lambda y: vmap(f)(X, y).sum())(YS),
    ):
        with pytest.raises(TransformError, match="Given"):
            program()


def test_autograd_function_wrong_vmap_refused() -> None:
    for result, words in (
        (lambda x: x, "vmap returned a Tensor"),
        (lambda x: ((x, x), (0,)), "2 outputs and 1 out_dims"),
    ):
        kind = function(vmap=lambda info, in_dims, x, result=result: result(x))
        with pytest.raises(TransformError, match=words):
            vmap(lambda x, kind=kind: kind.apply(x))(X)


def test_autograd_function_returns_its_argument() -> None:
    identity = function(forward=lambda x: x, backward=lambda ctx, g: -g)
    agree(vmap(grad(lambda x: (identity.apply(x) * Y).sum()))(X), -Y.expand(4, 3))
    shared = function(
        forward=lambda x: x * 2,
        vmap=lambda info, in_dims, x: (torch.ones(3), None),
    )
    agree(vmap(lambda x: shared.apply(x))(X), torch.ones(4, 3))
    value, way_back = vjp(lambda x: shared.apply(x), Y)
    agree((value, way_back(Y)[0]), (2 * Y, 2 * Y))
