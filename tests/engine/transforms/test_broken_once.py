"""Programs that once gave a wrong number, or a failure that told nothing: each the smallest that
showed it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from psgrad.engine.gradients import per_sample_gradients
from psgrad.engine.transforms import grad, hessian, jacfwd, jacrev, jvp, linearize, vjp, vmap
from psgrad.errors import TransformError, UnsupportedOperatorError
from tests.engine.transforms.loops import gradients_by_loop

X = torch.tensor([[1.5, -0.5, 0.25], [-2.0, 0.75, -1.0], [0.0, 1.0, 3.0]], dtype=torch.float64)
NOTHING = torch.zeros(3, dtype=torch.float64)
W = torch.tensor([2.0, -3.0, 0.5], dtype=torch.float64)

# -- what is masked out has no derivative, however steep what comes after it is there ------------------------

STEEP: dict[str, Callable[[Tensor], Tensor]] = {
    "clamp from below": lambda x: x.clamp(min=0).sqrt().sum(),
    "clamp from above": lambda x: (-x.clamp(max=0)).sqrt().sum(),
    "clamp": lambda x: x.clamp(0, 1).log().sum(),
    "clamp_min": lambda x: x.clamp_min(0).log().sum(),
    "clamp_max": lambda x: (-x.clamp_max(0)).log().sum(),
    "arcus sine": lambda x: torch.asin(x.clamp(-1, 1)).sum(),
    "maximum": lambda x: torch.maximum(x, NOTHING).sqrt().sum(),
    "minimum": lambda x: (-torch.minimum(NOTHING, x)).sqrt().sum(),
    "median": lambda x: (x - x.median().detach()).median().sqrt(),
    "no label at all": lambda x: F.cross_entropy(x[None], torch.tensor([-100])),
    "no label, smoothed": lambda x: F.cross_entropy(x[None], torch.tensor([-100]), label_smoothing=0.1),
    "spread of equal numbers": lambda x: torch.std_mean(x * 0 + 1)[0],
    "saturated probabilities": lambda x: F.binary_cross_entropy(
        x.clamp(0, 1), torch.tensor([0.0, 1.0, 1.0], dtype=x.dtype)
    ),
    "certain and right": lambda x: F.binary_cross_entropy((x > 0).to(x.dtype) + 0 * x, (x > 0).to(x.dtype)),
    "weighted probabilities": lambda x: F.binary_cross_entropy(
        x.sigmoid(), NOTHING, weight=X[2].abs(), reduction="sum"
    ),
}


@pytest.mark.parametrize("name", STEEP)
def test_gradient_of_masked_infinite_derivative(name: str) -> None:
    function = STEEP[name]
    torch.testing.assert_close(
        vmap(grad(function))(X), gradients_by_loop(function, X)[0], rtol=1e-7, atol=1e-12, equal_nan=True
    )


@pytest.mark.parametrize(
    "transform", [lambda f: grad(f)(W), lambda f: jvp(f, (W,), (W,)), lambda f: vmap(grad(f))(X)]
)
def test_nll_loss_class_weights_have_no_derivative(transform: Callable[..., Any]) -> None:
    """PyTorch has none; it was taken for zero."""
    with pytest.raises(UnsupportedOperatorError, match="in its argument 'weight'"):
        transform(lambda w: F.cross_entropy(X, torch.tensor([0, 1, 2]), weight=w))


# -- derivatives of scalars in scalars -----------------------------------------------------------------------


@pytest.mark.parametrize("derivative", [jacrev, jacfwd])
def test_jacobian_of_scalar_in_scalar(derivative: Callable[..., Callable[..., Tensor]]) -> None:
    x = torch.tensor(2.0, dtype=torch.float64)
    assert derivative(lambda x: x**3)(x) == 12
    assert torch.equal(vmap(hessian(lambda x: x**3))(X[0]), 6 * X[0])


# -- a record that is used later, and a write in between -----------------------------------------------------


def written_outside(through: Callable[[Tensor], Tensor], derivative: Callable[..., Any]) -> Tensor:
    w = W.clone()
    back = derivative(lambda x: x * through(w), X[0])[1]
    w.mul_(2)
    return back(X[1])


def written_inside(wrap: Callable[..., Any], what: str) -> Tensor:
    """vjp's function reads a value of an outer level, or a view of it, and vjp_fn is called after a write to
    it.
    """

    def function(x: Tensor) -> Tensor:
        y = x.clone()
        seen = {"itself": y, "a view": y.view(3), "a view of a view": y.view(3, 1).view(3)}.get(what)
        if what == "the result":
            out, back = vjp(torch.exp, y)
            out.mul_(2)
        else:
            _, back = vjp(lambda z: z * (y.view(3) if seen is None else seen), torch.ones_like(y))
            y.mul_(2)
        return back(torch.ones_like(y))[0].sum()

    return wrap(function)(X)


LATE: dict[str, Callable[[], Any]] = {
    "a captured tensor": lambda: written_outside(lambda w: w, vjp),
    "a view of a captured tensor": lambda: written_outside(lambda w: w.view(3), vjp),
    "one of several views": lambda: written_outside(lambda w: w.expand(2, 3).unbind()[1], vjp),
    "a view, linearized": lambda: written_outside(lambda w: w.view(3), linearize),
    "the result": lambda: result_written(torch.exp),
    "a view of the result": lambda: result_written(lambda x: x.exp().view(3)),
    **{
        f"{what}, under {name}": lambda wrap=wrap, what=what: written_inside(wrap, what)
        for name, wrap in {
            "vmap": vmap,
            "grad": lambda f: lambda x: grad(f)(x[0]),
            "vmap(grad)": lambda f: vmap(grad(f)),
            "grad(vmap)": lambda f: grad(lambda x: vmap(f)(x).sum()),
            "jvp": lambda f: lambda x: jvp(f, (x[0],), (x[1],)),
        }.items()
        for what in ("itself", "a view", "a view of a view", "a view taken inside", "the result")
    },
}


def result_written(function: Callable[[Tensor], Tensor]) -> Tensor:
    out, back = vjp(function, X[0])
    out.mul_(2)
    return back(X[1])


@pytest.mark.parametrize("name", LATE)
def test_vjp_write_before_backward_pass_refused(name: str) -> None:
    with pytest.raises(TransformError, match="was changed in place before vjp_fn was called"):
        LATE[name]()


def test_vjp_write_to_unneeded_value() -> None:
    x, w = X[0].clone(), W.clone()
    out, back = vjp(lambda x: (x * w).sum(0, keepdim=True).view(1, 1), x)
    out.add_(1)

    def elsewhere(x: Tensor) -> Tensor:
        y = x.clone()
        y.mul_(3)
        return y

    vmap(elsewhere)(X)
    torch.testing.assert_close(back(torch.ones(1, 1, dtype=x.dtype))[0], w)


# -- a function that catches everything ----------------------------------------------------------------------


def catching(x: Tensor) -> Tensor:
    try:
        positive = bool(x.sum() > 0)
    except BaseException:
        positive = True
    return (x**2 if positive else x**3).sum()


def suppressing(x: Tensor) -> Tensor:
    y = x**3
    with contextlib.suppress(BaseException):
        if x.sum() > 0:
            y = x**2
    return y.sum()


@pytest.mark.parametrize("function", [catching, suppressing])
def test_vmap_branch_inside_bare_except(
    function: Callable[[Tensor], Tensor],
) -> None:
    expected = gradients_by_loop(function, X)[0]
    torch.testing.assert_close(vmap(grad(function))(X), expected)
    torch.testing.assert_close(jvp(vmap(grad(function)), (X,), (X,))[0], expected)
    torch.testing.assert_close(vmap(vmap(grad(function)))(X.reshape(1, 3, 3)), expected.unsqueeze(0))
    result = per_sample_gradients(lambda w, x: function(w["w"] * x), {"w": torch.ones(3, dtype=X.dtype)}, X)
    torch.testing.assert_close(
        result.materialise()["w"],
        gradients_by_loop(lambda x, w: function(w * x), X, torch.ones_like(X), argnums=[1])[0],
    )


# -- PyTorch's own autograd, inside and outside --------------------------------------------------------------


def grad_of_a_fresh_leaf(x: Tensor) -> Tensor:
    leaf = x.detach().clone().requires_grad_()
    return torch.autograd.grad((leaf**2).sum(), leaf)[0].sum()


def backward(x: Tensor) -> Tensor:
    (x**2).sum().backward()
    return x.sum()


def a_hook(x: Tensor) -> Tensor:
    y = x.clone()
    y.register_hook(lambda g: g * 10)
    return y.sum()


def kept_gradient(x: Tensor) -> Tensor:
    y = x.clone()
    y.retain_grad()
    return y.sum()


def assigned_data(x: Tensor) -> Tensor:
    y = x.clone()
    y.data = x.data * 2
    return (y * x).sum()


def hooked_layer() -> Callable[[Tensor], Tensor]:
    layer = nn.Linear(3, 3).double()
    layer.register_full_backward_hook(lambda module, inwards, outwards: tuple(g * 10 for g in inwards))
    return lambda x: layer(x).sum()


def constrained_layer() -> Callable[[Tensor], Tensor]:
    """As layers with a bound on their weight's norm do it; the parameter lost its memory, and the next look
    at it ended the process.
    """
    layer = nn.Linear(3, 3).double()

    def function(x: Tensor) -> Tensor:
        before = layer.weight.detach().clone()
        try:
            layer.weight.data = torch.renorm(layer.weight.data, 2, 0, 1.0)
        finally:
            assert torch.equal(layer.weight.detach(), before)
        return layer(x).sum()

    return function


INSIDE: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "torch.autograd.grad": (
        lambda x: torch.autograd.grad((x**2).sum(), x)[0].sum(),
        r"torch.autograd or .backward\(\) inside",
    ),
    "of a fresh leaf": (grad_of_a_fresh_leaf, r"torch.autograd or .backward\(\) inside"),
    "backward": (backward, r"torch.autograd or .backward\(\) inside"),
    "retain_grad": (kept_gradient, r"torch.autograd or .backward\(\) inside"),
    "a Jacobian": (
        lambda x: torch.autograd.functional.jacobian(lambda y: y**2, x).sum(),
        "torch.autograd.functional inside",
    ),
    "a recorded Jacobian": (
        lambda x: torch.autograd.functional.jacobian(lambda y: y**2, x, create_graph=True).sum(),
        "torch.autograd.functional inside",
    ),
    "torch.func.jvp": (
        lambda x: torch.func.jvp(lambda y: (y**3).sum(), (x,), (x,))[1],
        "torch.func.jvp, jacfwd, hessian or linearize inside",
    ),
    "torch.func.hessian": (
        lambda x: torch.func.hessian(lambda y: (y**3).sum())(x).sum(),
        "torch.func.jvp, jacfwd, hessian or linearize inside",
    ),
    "a tensor's hook": (a_hook, "a hook on a traced tensor"),
    "a module's hook": (hooked_layer(), "a backward hook of a module"),
    "data": (assigned_data, "an assignment to .data"),
    "a parameter's data": (constrained_layer(), "an assignment to .data"),
}


@pytest.mark.parametrize("name", INSIDE)
@pytest.mark.parametrize(
    "transform", [lambda f: grad(f)(X[0]), lambda f: vmap(grad(f))(X), lambda f: jvp(f, (X[0],), (X[1],))]
)
def test_autograd_inside_transform_refused(name: str, transform: Callable[..., Any]) -> None:
    function, words = INSIDE[name]
    with pytest.raises(TransformError, match=words) as caught:
        transform(function)
    assert "test_broken_once.py:" in caught.value.message


def test_backward_hook_of_frozen_module() -> None:
    layer = nn.Linear(3, 2).double().requires_grad_(False)
    layer.register_full_backward_hook(lambda module, inwards, outwards: None)
    torch.testing.assert_close(vmap(layer)(X), layer(X))


OUTSIDE: dict[str, Callable[[], Any]] = {
    "torch.func.vmap": lambda: torch.func.vmap(grad(lambda x: (x**3).sum()))(X),
    "torch.func.vmap, captured": lambda: torch.func.vmap(lambda x: grad(lambda z: (z * x).sum())(W))(X),
    "torch.func.grad": lambda: torch.func.grad(lambda x: vmap(lambda y: (y**3).sum())(x).sum())(X),
    "torch.func.jvp": lambda: torch.func.jvp(lambda x: grad(lambda y: (y**3).sum())(x), (X,), (X,)),
    "forward mode": lambda: in_forward_mode(lambda x: grad(lambda y: (y**3).sum())(x)),
}


def in_forward_mode(function: Callable[[Tensor], Tensor]) -> Tensor:
    with torch.autograd.forward_ad.dual_level():
        return function(torch.autograd.forward_ad.make_dual(X, X))


@pytest.mark.parametrize("name", OUTSIDE)
def test_transform_inside_torch_func_refused(name: str) -> None:
    with pytest.raises(TransformError, match=r"inside one of torch\.func.*test_broken_once\.py:"):
        OUTSIDE[name]()


def test_torch_func_inside_transform() -> None:
    torch.testing.assert_close(vmap(lambda x: torch.func.grad(lambda y: (y**3).sum())(x))(X), 3 * X**2)
    torch.testing.assert_close(grad(lambda x: torch.func.vmap(lambda y: (y**3).sum())(x).sum())(X), 3 * X**2)


# -- other layouts in memory ---------------------------------------------------------------------------------

IMAGES = torch.linspace(-2, 2, 2 * 4 * 3 * 5, dtype=torch.float64).sin().reshape(2, 4, 3, 5)


@pytest.mark.parametrize("inputs", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("cotangents", [torch.contiguous_format, torch.channels_last])
def test_group_norm_of_channels_last_images(
    inputs: torch.memory_format, cotangents: torch.memory_format
) -> None:
    weights = IMAGES.cos().contiguous(memory_format=cotangents)

    def function(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        return (F.group_norm(x, 2, scale, shift) * weights).sum()

    arguments = [
        IMAGES.contiguous(memory_format=inputs),
        torch.ones(4, dtype=IMAGES.dtype),
        torch.zeros(4, dtype=IMAGES.dtype),
    ]
    leaves = [t.clone().requires_grad_() for t in arguments]
    torch.testing.assert_close(
        grad(function, (0, 1, 2))(*arguments), torch.autograd.grad(function(*leaves), leaves)
    )


# -- PyTorch's autograd looks on from outside ----------------------------------------------------------------

MATRIX = torch.tensor([[3.0, 0.5, -0.2], [0.1, 2.5, 0.4], [-0.3, 0.2, 4.0]], dtype=torch.float64)


def clamped_under_no_grad(x: Tensor) -> Tensor:
    y = x * x
    with torch.no_grad():
        y.clamp_(min=0.2)
    return y * x


LOOKED_ON: dict[str, Callable[[Tensor], Tensor]] = {
    "solve": lambda x: torch.linalg.solve(MATRIX + x.outer(x), x),
    "solve from the right": lambda x: torch.linalg.solve(
        MATRIX + x.outer(x), x[None] * MATRIX[:2], left=False
    ),
    "layer norm": lambda x: F.layer_norm(x, (3,)),
    "layer norm with weights": lambda x: F.layer_norm(x.outer(x), (3,), x, x + 1),
    "group norm": lambda x: F.group_norm((x.outer(x) + MATRIX)[None], 3, x, x + 1),
    "cosine similarity": lambda x: F.cosine_similarity(x.outer(x) + MATRIX, MATRIX, 0),
    "gaussian likelihood": lambda x: F.gaussian_nll_loss(x, MATRIX[0], x * x),
    "silu": F.silu,
    "mish": F.mish,
    "logit": lambda x: torch.logit(x.sigmoid()),
    "circular padding": lambda x: F.pad(x[None], (1, 1), mode="circular").cumprod(1),
    "a write under no_grad": clamped_under_no_grad,
}


@pytest.mark.parametrize("name", LOOKED_ON)
@pytest.mark.parametrize(
    "transform",
    [
        lambda f: lambda x: grad(f)(x),
        lambda f: lambda x: vmap(grad(f))(torch.stack([x, 2 * x])),
        lambda f: lambda x: vjp(f, x)[1](x.sum())[0],
        lambda f: lambda x: jvp(f, (x,), (x.detach(),))[1],
        lambda f: lambda x: hessian(f)(x),
    ],
)
def test_outer_autograd_equals_inner_grad(
    name: str, transform: Callable[..., Callable[[Tensor], Tensor]]
) -> None:
    function = transform(lambda x: LOOKED_ON[name](x).sin().sum())
    leaf = X[0].clone().requires_grad_()
    torch.testing.assert_close(
        torch.autograd.grad(function(leaf).cos().sum(), leaf)[0],
        grad(lambda x: function(x).cos().sum())(X[0]),
    )


def test_outer_autograd_of_attention_gradient() -> None:
    leaf = MATRIX.clone().requires_grad_()

    def by_products(x: Tensor) -> Tensor:
        return (((x @ MATRIX.mT) * 3**-0.5).softmax(-1) @ x).sum()

    gradient = grad(
        lambda x: F.scaled_dot_product_attention(*[t.reshape(1, 1, 3, 3) for t in (x, MATRIX, x)]).sum()
    )(leaf)
    expected = torch.autograd.grad(by_products(leaf), leaf, create_graph=True)[0]
    torch.testing.assert_close(
        *[torch.autograd.grad(x.square().sum(), leaf)[0] for x in (gradient, expected)]
    )
