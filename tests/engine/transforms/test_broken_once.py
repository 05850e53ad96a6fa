"""Programs that once gave a wrong number, or a failure that told nothing: each the smallest that showed it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from psgrad.engine.transforms import grad, hessian, jacfwd, jacrev, jvp, linearize, vjp, vmap
from psgrad.errors import TransformError
from tests.engine.transforms.loops import gradients_by_loop

X = torch.tensor([[1.5, -0.5, 0.25], [-2.0, 0.75, -1.0], [0.0, 1.0, 3.0]], dtype=torch.float64)
NOTHING = torch.zeros(3, dtype=torch.float64)

# -- what is masked out has no derivative, however steep what comes after it is there -------------------------------------------------

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
    "saturated probabilities": lambda x: F.binary_cross_entropy(x.clamp(0, 1), torch.tensor([0.0, 1.0, 1.0], dtype=x.dtype)),
    "certain and right": lambda x: F.binary_cross_entropy((x > 0).to(x.dtype) + 0 * x, (x > 0).to(x.dtype)),
    "weighted probabilities": lambda x: F.binary_cross_entropy(x.sigmoid(), NOTHING, weight=X[2].abs(), reduction="sum"),
}


@pytest.mark.parametrize("name", STEEP)
def test_what_is_masked_out_stays_out(name: str) -> None:
    function = STEEP[name]
    torch.testing.assert_close(vmap(grad(function))(X), gradients_by_loop(function, X)[0], rtol=1e-7, atol=1e-12, equal_nan=True)


# -- derivatives of scalars in scalars -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("derivative", [jacrev, jacfwd])
def test_a_jacobian_of_a_number_in_a_number(derivative: Callable[..., Callable[..., Tensor]]) -> None:
    x = torch.tensor(2.0, dtype=torch.float64)
    assert derivative(lambda x: x**3)(x) == 12
    assert torch.equal(vmap(hessian(lambda x: x**3))(X[0]), 6 * X[0])


# -- a record that is used later, and a write in between --------------------------------------------------------------------------------

W = torch.tensor([2.0, -3.0, 0.5], dtype=torch.float64)


def written_outside(through: Callable[[Tensor], Tensor], derivative: Callable[..., Any]) -> Tensor:
    w = W.clone()
    back = derivative(lambda x: x * through(w), X[0])[1]
    w.mul_(2)
    return back(X[1])


def written_inside(wrap: Callable[..., Any], what: str) -> Tensor:
    """vjp's function reads a value of an outer level, or a view of it, and vjp_fn is called after a write to it."""

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
def test_a_late_write_is_noticed(name: str) -> None:
    with pytest.raises(TransformError, match="was changed in place before vjp_fn was called"):
        LATE[name]()


def test_a_write_to_what_is_not_needed_goes_by() -> None:
    x, w = X[0].clone(), W.clone()
    out, back = vjp(lambda x: (x * w).sum(0, keepdim=True).view(1, 1), x)
    out.add_(1)

    def elsewhere(x: Tensor) -> Tensor:
        y = x.clone()
        y.mul_(3)
        return y

    vmap(elsewhere)(X)
    torch.testing.assert_close(back(torch.ones(1, 1, dtype=x.dtype))[0], w)
