"""Functions with a rule of the user's own: used wherever a derivative, or a batch, is asked for, and
checked.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from psgrad.engine import transforms
from psgrad.engine.transforms import (
    custom_jvp,
    custom_vjp,
    custom_vmap,
    grad,
    hessian,
    jacfwd,
    jvp,
    vjp,
    vmap,
)
from psgrad.errors import TransformError
from tests.engine.transforms.nests import NESTS, WEIGHTS, YS, X, Y, agree, plain, slopes, weighted

pytestmark = pytest.mark.usefixtures("float64")


def by_vjp(factor: float) -> Any:
    f = custom_vjp(plain)

    def bwd(residuals: Any, g: Tensor) -> Any:
        in_x, in_y = slopes(*residuals)
        return factor * g * in_x, factor * g * in_y

    f.defvjp(lambda x, y: (plain(x, y), (x, y)), bwd)
    return f


def by_jvp(factor: float) -> Any:
    f = custom_jvp(plain)

    def rule(primals: Any, tangents: Any) -> Any:
        in_x, in_y = slopes(*primals)
        return plain(*primals), factor * (in_x * tangents[0] + in_y * tangents[1])

    f.defjvp(rule)
    return f


@pytest.mark.parametrize("nest", NESTS)
@pytest.mark.parametrize("make", [by_vjp, by_jvp])
def test_custom_rule_used_in_every_nest(make: Callable[[float], Any], nest: str) -> None:
    agree(NESTS[nest](transforms, make(3.0)), NESTS[nest](torch.func, plain), 3.0)


@pytest.mark.parametrize("nest", NESTS)
def test_custom_vmap_leaves_derivatives(nest: str) -> None:
    f = custom_vmap(plain)
    f.def_vmap(lambda size, in_batched, x, y: (plain(x, y), True))
    agree(NESTS[nest](transforms, f), NESTS[nest](torch.func, plain))


@pytest.mark.parametrize("make", [by_vjp, by_jvp])
def test_custom_rule_leaves_values(make: Callable[[float], Any]) -> None:
    f = make(3.0)
    agree(f(X[0], Y), plain(X[0], Y))
    agree(vmap(f, (0, None))(X, Y), plain(X, Y))
    agree(vjp(f, X[0], Y)[0], plain(X[0], Y))
    agree(vmap(lambda x: jvp(f, (x, Y), (x, Y))[0])(X), plain(X, Y))
    assert f.__name__ == "plain"


# -- custom_vjp ----------------------------------------------------------------------------------------------


def test_custom_vjp_pytrees_and_zero_cotangents() -> None:
    @custom_vjp
    def f(tree: dict[str, Any], scale: Tensor) -> Any:
        return {"product": tree["a"] * tree["b"][0] * scale, "sum": tree["a"].sum()}

    def fwd(tree: dict[str, Any], scale: Tensor) -> Any:
        return f(tree, scale), (tree, scale)

    def bwd(residuals: Any, g: Any) -> Any:
        tree, scale = residuals
        return {"a": g["product"] * tree["b"][0] * scale + g["sum"], "b": [None]}, None

    f.defvjp(fwd, bwd)
    tree, scale = {"a": X[0], "b": [Y]}, torch.tensor(2.0)
    ours, in_scale = grad(lambda t, s: f(t, s)["product"].sum(), (0, 1))(tree, scale)
    agree(ours, {"a": Y * 2, "b": [torch.zeros(3)]})
    agree(in_scale, torch.zeros(()))
    agree(grad(lambda t: f(t, scale)["sum"] * 5)(tree)["a"], torch.full((3,), 5.0))


def test_custom_rule_skipped_for_zero_cotangents() -> None:
    @custom_vjp
    def never(x: Tensor) -> Tensor:
        return x * 2

    def bwd(residuals: Any, g: Tensor) -> Any:
        raise AssertionError("nobody asked")

    never.defvjp(lambda x: (x * 2, None), bwd)
    f = custom_vjp(lambda x, y: x * y)
    f.defvjp(lambda x, y: (x * y, y), lambda y, g: (g * y, None))
    agree(grad(lambda x: f(x, never(x)).sum())(X[0]), 2 * X[0])
    agree(vmap(grad(lambda x: f(x, never(x)).sum()))(X), 2 * X)
    agree(grad(lambda x: vmap(lambda x: f(x, never(x)).sum())(x).sum())(X), 2 * X)


@pytest.mark.parametrize("position", [0, -1])
def test_custom_vjp_nondiff_argnums(position: int) -> None:
    seen: list[str] = []

    @functools.partial(custom_vjp, nondiff_argnums=(0, 2))
    def f(mode: str, x: Tensor, power: int) -> Tensor:
        return x**power

    def bwd(mode: str, power: int, x: Tensor, g: Tensor) -> Any:
        seen.append(mode)
        return (g * power * x ** (power - 1),)

    f.defvjp(lambda mode, x, power: (x**power, x), bwd)
    agree(grad(lambda x: f("backward", x, power=3).sum())(X[0]), 3 * X[0] ** 2)
    agree(grad(lambda x: vmap(lambda x: f("batched", x, 3).sum())(x).sum())(X), 3 * X**2)
    assert seen == ["backward", "batched"]

    g = custom_jvp(lambda x, power: x**power, nondiff_argnums=(position % 2,) if position == -1 else (1,))
    g.defjvp(
        lambda power, primals, tangents: (
            primals[0] ** power,
            power * primals[0] ** (power - 1) * tangents[0],
        )
    )
    agree(grad(lambda x: g(x, 3).sum())(X[0]), 3 * X[0] ** 2)


def test_custom_vjp_integer_arguments_and_unused_results() -> None:
    @custom_vjp
    def rows(table: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        return table[index], index * 2

    def bwd(residuals: Any, g: Any) -> Any:
        shape, index = residuals
        assert g[1].dtype == torch.int64
        return torch.zeros(shape).index_add(0, index, g[0]), None

    rows.defvjp(lambda table, index: (rows(table, index), (table.shape, index)), bwd)
    index = torch.tensor([2, 0, 2])
    expected = torch.autograd.grad(((leaf := X.clone().requires_grad_())[index] ** 2).sum(), leaf)[0]
    agree(grad(lambda t: (rows(t, index)[0] ** 2).sum())(X), expected)
    per_sample = vmap(grad(lambda t, i: (rows(t, i)[0] ** 2).sum()), (None, 0))(
        X, torch.stack([index, index.flip(0)])
    )
    agree(per_sample, torch.stack([expected, expected]))


def test_custom_vjp_nested_and_method() -> None:
    inner = by_vjp(3.0)

    class Layer:
        @custom_vjp
        def clipped(self, x: Tensor, y: Tensor) -> Tensor:
            return inner(x, y).clamp(-1, 1)

    Layer.clipped.nondiff_argnums = (0,)
    Layer.clipped.defvjp(
        lambda self, x, y: vjp(inner, x, y),  # the result, and the backward function as residuals
        lambda self, way_back, g: way_back(g),
    )
    layer = Layer()
    for nest in ("grad", "vmap(grad)", "grad(vmap)"):
        agree(NESTS[nest](transforms, layer.clipped), NESTS[nest](torch.func, plain), 3.0)


def test_custom_vjp_straight_through_estimator() -> None:
    @custom_vjp
    def ones(x: Tensor) -> Tensor:
        return torch.ones(3)

    ones.defvjp(lambda x: (torch.ones(3), None), lambda residuals, g: (g,))
    agree(grad(lambda x: (vmap(lambda x, s: ones(x) * s)(x, YS)).sum())(X), YS)
    agree(grad(lambda x: (vmap(lambda s: ones(x) * s)(YS)).sum())(Y), YS.sum(0))


def test_custom_rule_closure_over_mapped_value() -> None:
    def f(x: Tensor, y: Tensor) -> Tensor:
        def product(x: Tensor) -> Tensor:
            return x * y

        by_rule = custom_vjp(product)
        by_rule.defvjp(lambda x: (product(x), None), lambda residuals, g: (3 * g * y,))
        return by_rule(x)

    expected = 3 * YS * WEIGHTS
    agree(vmap(grad(weighted(f)))(X, YS), expected)
    agree(grad(lambda x: vmap(weighted(f))(x, YS).sum())(X), expected)
    # once more: the rules are programs, and of those the derivative is what it is
    agree(grad(lambda x: vmap(grad(lambda x, y: (f(x, y) ** 2).sum()))(x, YS).sum())(X), 6 * YS * YS)


@pytest.mark.parametrize("make", [by_vjp, by_jvp])
def test_custom_rule_closure_over_differentiated_value_refused(make: Callable[[float], Any]) -> None:
    def f(x: Tensor, y: Tensor) -> Tensor:
        by_rule: Any = custom_vjp(lambda x: x * y) if make is by_vjp else custom_jvp(lambda x: x * y)
        if make is by_vjp:
            by_rule.defvjp(lambda x: (x * y, None), lambda residuals, g: (g,))
        else:
            by_rule.defjvp(lambda primals, tangents: (primals[0] * y, tangents[0] * y))
        return by_rule(x)

    programs = (
        lambda: grad(weighted(f), (0, 1))(X[0], Y),
        lambda: grad(weighted(f), 1)(X[0], Y),
        lambda: vmap(grad(weighted(f), 1))(X, YS),
        lambda: grad(lambda y: vmap(lambda x: weighted(f)(x, y))(X).sum())(Y),
        lambda: grad(lambda y: vmap(weighted(f))(X, y).sum())(YS),
        lambda: jvp(lambda y: f(X[0], y), (Y,), (Y,)),
    )
    for program in programs:
        with pytest.raises(
            TransformError, match=r"custom_\w+ <lambda> closes over a value that is being differentiated"
        ):
            program()
    agree(grad(weighted(f))(X[0], Y), (Y if make is by_jvp else torch.ones(3)) * WEIGHTS)


WRONG: dict[str, tuple[Callable[..., Any], Callable[..., Any], str]] = {
    "a cotangent too few": (
        lambda x, y: (x * y, None),
        lambda r, g: (g,),
        "returned 1 cotangents for 2 arguments",
    ),
    "no tuple": (lambda x, y: (x * y, None), lambda r, g: g, "returned a Tensor for 2 arguments"),
    "a wrong shape": (
        lambda x, y: (x * y, None),
        lambda r, g: (g, g.sum()),
        r"of shape \(\) for argument 1, of shape \(3,\)",
    ),
    "another structure": (lambda x, y: (x * y, None), lambda r, g: (g, [g]), "for argument 1"),
    "a number": (lambda x, y: (x * y, None), lambda r, g: (g, 1.0), "of type float for argument 1"),
    "no residuals": (
        lambda x, y: x * y,
        lambda r, g: (g, g),
        "the forward rule of custom_vjp product returned a Tensor",
    ),
    "a result that is no tensor": (lambda x, y: (1.0, None), lambda r, g: (g, g), "returned a float"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_custom_vjp_wrong_rule_refused(wrong: str) -> None:
    fwd, bwd, words = WRONG[wrong]

    @custom_vjp
    def product(x: Tensor, y: Tensor) -> Tensor:
        return x * y

    product.defvjp(fwd, bwd)
    for nest in ("grad", "vmap(grad)", "grad(vmap)"):
        with pytest.raises(TransformError, match=words) as caught:
            NESTS[nest](transforms, product)
        assert "custom_vjp product" in str(caught.value)


def test_custom_rule_missing_refused() -> None:
    for kind, setter in ((custom_vjp, "defvjp"), (custom_jvp, "defjvp"), (custom_vmap, "def_vmap")):
        with pytest.raises(TransformError, match=rf"{kind.__name__} plain has no rule[\s\S]*{setter}"):
            grad(weighted(kind(plain)))(X[0], Y)


def test_custom_jvp_wrong_tangent_shape_refused() -> None:
    f = custom_jvp(plain)
    for rule, words in (
        (lambda p, t: (plain(*p), t[0].sum()), r"custom_jvp plain returned a tangent"),
        (lambda p, t: plain(*p), "returned a Tensor"),
    ):
        f.defjvp(rule)
        for nest in ("grad", "jvp", "jvp(vmap)"):
            with pytest.raises(TransformError, match=words):
                NESTS[nest](transforms, f)


@pytest.mark.parametrize("nest", ["grad", "vmap(grad)", "grad(vmap)", "grad(grad)"])
def test_custom_rule_write_refused(nest: str) -> None:
    into_argument, into_cotangent, clean = custom_vjp(plain), custom_vjp(plain), custom_vjp(plain)
    into_argument.defvjp(lambda x, y: (x.mul_(y), (x, y)), lambda r, g: (g, g))
    into_cotangent.defvjp(lambda x, y: (plain(x, y), (x, y)), lambda r, g: (g.mul_(r[1]), g))
    clean.defvjp(
        lambda x, y: (plain(x, y), slopes(x, y)),
        lambda r, g: (g.clone().mul_(r[0]), torch.zeros(3).add_(g * r[1])),
    )
    before = X.clone()
    for f in (into_argument, into_cotangent):
        with pytest.raises(TransformError, match="writes in place into an argument"):
            NESTS[nest](transforms, f)
    agree(X, before)
    agree(NESTS[nest](transforms, clean), NESTS[nest](torch.func, plain))


def test_custom_vjp_numpy_in_rule() -> None:
    @custom_vjp
    def f(x: Tensor) -> Tensor:
        return torch.from_numpy(np.sin(x.numpy()))

    f.defvjp(lambda x: (f(x), torch.from_numpy(np.cos(x.numpy()))), lambda c, g: (g * c,))
    agree(grad(lambda x: (f(x) ** 2).sum())(X[0]), 2 * X[0].sin() * X[0].cos())


def test_custom_vjp_randomness_different() -> None:
    @custom_vjp
    def noisy(x: Tensor) -> Tensor:
        return x + torch.randn(3)

    def fwd(x: Tensor) -> Any:
        noise = torch.randn(3)
        return x + noise, noise

    noisy.defvjp(fwd, lambda noise, g: (g * noise,))
    torch.manual_seed(0)
    values = vmap(noisy, randomness="different")(torch.zeros(4, 3))
    assert values.unique(dim=0).shape == (4, 3)
    shared = vmap(lambda s: noisy(torch.zeros(3)) * s, randomness="different")(torch.ones(4, 3))
    assert shared.unique(dim=0).shape == (4, 3)

    def loss(x: Tensor, y: Tensor) -> Any:
        out = vmap(lambda s: noisy(x) * s, randomness="different")(y)
        return out.sum(), out

    g, out = grad(loss, has_aux=True)(torch.zeros(3), YS)
    agree(g, out.sum(0))


def test_custom_rule_outer_autograd_refused() -> None:
    f = by_vjp(3.0)
    leaf = X[0].clone().requires_grad_()
    agree(f(leaf, Y).detach(), plain(X[0], Y))
    with pytest.raises(RuntimeError, match="custom_vjp plain has a derivative of its own"):
        f(leaf, Y).sum().backward()
    # inside a transform the rules are programs, and autograd differentiates those
    expected = torch.autograd.grad((3 * slopes(leaf, Y)[0] * WEIGHTS).sum(), leaf)[0]
    agree(torch.autograd.grad(grad(weighted(f))(leaf, Y).sum(), leaf)[0], expected)


# -- custom_vmap ---------------------------------------------------------------------------------------------


def test_custom_vmap_in_batched() -> None:
    seen: list[Any] = []

    @custom_vmap
    def f(tree: dict[str, Tensor], y: Tensor) -> tuple[Tensor, Tensor]:
        return tree["a"] * y, y.sum()

    @f.def_vmap
    def rule(size: int, in_batched: Any, tree: dict[str, Tensor], y: Tensor) -> Any:
        seen.append((size, in_batched, tuple(tree["a"].shape), tuple(y.shape)))
        return (tree["a"] * y + 100, y.sum()), (True, False)

    out = vmap(lambda x: f({"a": x}, Y))(X)
    agree(out, (X * Y + 100, Y.sum().expand(4)))
    agree(vmap(lambda y: f({"a": X[0]}, y)[0], in_dims=1, out_dims=1)(YS.T), (X[0] * YS + 100).T)
    assert seen == [(4, [{"a": True}, False], (4, 3), (3,)), (4, [{"a": False}, True], (3,), (4, 3))]
    agree(f({"a": X[0]}, Y)[0], X[0] * Y)


def test_custom_vmap_derivative_of_function() -> None:
    f = custom_vmap(plain)

    @f.def_vmap
    def rule(size: int, in_batched: Any, x: Tensor, y: Tensor) -> Any:
        return torch.from_numpy(np.asarray(plain(x, y).numpy()) + 100), True

    expected = torch.stack([slopes(x, Y)[0] for x in X])
    gradients, values = vmap(transforms.grad_and_value(lambda x: f(x, Y).sum()))(X)
    agree(gradients, expected)
    agree(values, plain(X, Y).sum(1) + 300)
    gradients, value = transforms.grad_and_value(lambda x: vmap(lambda x: f(x, Y).sum())(x).sum())(X)
    agree(gradients, expected)
    agree(value, plain(X, Y).sum() + 1200)
    value, tangent = jvp(lambda x: vmap(f, (0, None))(x, Y), (X,), (torch.ones_like(X),))
    agree(tangent, expected)


def test_custom_vmap_nested() -> None:
    sizes: list[int] = []
    f = custom_vmap(lambda x: x * 2)

    @f.def_vmap
    def rule(size: int, in_batched: Any, x: Tensor) -> Any:
        sizes.append(size)
        return x * 2, True

    agree(vmap(vmap(f))(X), 2 * X)
    agree(vmap(lambda x: vmap(lambda y: f(x).sum() * y)(Y))(X), 2 * X.sum(1, keepdim=True) * Y)
    assert sizes == [3, 4]


def test_custom_vmap_closure_is_differentiated() -> None:
    def loss(w: Tensor, x: Tensor) -> Tensor:
        f = custom_vmap(lambda x: (x * w).sin())
        f.def_vmap(lambda size, in_batched, x: ((x * w).sin(), True))
        return f(x).sum()

    expected = X * (X * Y).cos()
    agree(vmap(grad(loss), (None, 0))(Y, X), expected)
    agree(grad(lambda w: vmap(lambda x: loss(w, x))(X).sum())(Y), expected.sum(0))
    agree(hessian(loss)(Y, X[0]), torch.diag(-(X[0] ** 2) * (X[0] * Y).sin()))


def test_custom_vmap_wrong_rule_refused() -> None:
    f = custom_vmap(plain)
    for rule, words in (
        (lambda n, b, x, y: plain(x, y), "returned a Tensor"),
        (lambda n, b, x, y: (plain(x, y), (True, True)), "with flags"),
        (lambda n, b, x, y: (plain(x, y).sum(), True), r"a batched result of shape \(\)"),
        (lambda n, b, x, y: (3, True), "returned a int"),
    ):
        f.def_vmap(rule)
        with pytest.raises(TransformError, match=words) as caught:
            vmap(f, (0, None))(X, Y)
        assert "custom_vmap plain" in str(caught.value)


def test_custom_vjp_nonlinear_backward_forward_mode_refused() -> None:
    f = custom_vjp(lambda x: x.clone())
    f.defvjp(lambda x: (x.clone(), None), lambda residuals, g: (g.clamp(-1, 1),))
    agree(grad(lambda x: (f(x) * 3).sum())(X), torch.ones_like(X))
    for program in (
        lambda: jvp(f, (X,), (X,)),
        lambda: vmap(lambda x: jvp(f, (x,), (x,)))(X),
        lambda: jacfwd(f)(X),
    ):
        with pytest.raises(TransformError, match="whose backward is not linear"):
            program()
