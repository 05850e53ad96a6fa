"""Nests of transforms around a function of two vectors, each a program for ours and for torch.func alike.

All of them give derivatives of something that is linear in what the function returns: so where a rule says
that a function's derivative is three times what it is, the result is three times that of torch.func, and it
is seen that the rule was used.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Function = Callable[[Tensor, Tensor], Tensor]

X = torch.tensor(
    [[0.3, -1.2, 0.7], [1.1, 0.2, -0.4], [-0.6, 0.9, 1.5], [0.1, -0.8, -1.3]], dtype=torch.float64
)
Y = torch.tensor([0.5, -0.9, 1.4], dtype=torch.float64)
YS = torch.stack([Y, Y + 1, Y * 2, Y - 0.5])
WEIGHTS = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)


def plain(x: Tensor, y: Tensor) -> Tensor:
    return (x * y).sin() + x * x * y


def slopes(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """The derivatives of `plain` in its two arguments."""
    c = (x * y).cos()
    return c * y + 2 * x * y, c * x + x * x


def weighted(f: Function) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda x, y: (f(x, y) * WEIGHTS).sum()


def mapped(t: Any, f: Function, in_dims: Any = (0, None)) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda x, y: t.vmap(weighted(f), in_dims)(x, y).sum()


NESTS: dict[str, Callable[[Any, Function], Any]] = {
    "grad": lambda t, f: t.grad(weighted(f), (0, 1))(X[0], Y),
    "grad in the second argument": lambda t, f: t.grad(weighted(f), 1)(X[0], Y),
    "vmap(grad)": lambda t, f: t.vmap(t.grad(weighted(f), (0, 1)), (0, None))(X, Y),
    "vmap(grad), both mapped": lambda t, f: t.vmap(t.grad(weighted(f), (0, 1)))(X, YS),
    "grad(vmap)": lambda t, f: t.grad(mapped(t, f), (0, 1))(X, Y),
    "grad(vmap), both mapped": lambda t, f: t.grad(mapped(t, f, 0), (0, 1))(X, YS),
    "grad(vmap(vmap))": lambda t, f: t.grad(
        lambda x, y: t.vmap(lambda y: t.vmap(lambda x: weighted(f)(x, y))(x).sum())(y).sum(), (0, 1)
    )(X, YS),
    "vmap(grad(vmap))": lambda t, f: t.vmap(t.grad(mapped(t, f), (0, 1)), (None, 0))(X, YS),
    "grad(grad)": lambda t, f: t.grad(lambda x, y: t.grad(weighted(f))(x, y).sum(), (0, 1))(X[0], Y),
    "grad(vmap(grad))": lambda t, f: t.grad(
        lambda x, y: t.vmap(t.grad(weighted(f)), (0, None))(x, y).sum(), (0, 1)
    )(X, Y),
    "vmap(grad(grad))": lambda t, f: t.vmap(
        t.grad(lambda x, y: t.grad(weighted(f))(x, y).sum(), (0, 1)), (0, None)
    )(X, Y),
    "jvp": lambda t, f: t.jvp(f, (X[0], Y), (X[1], X[2]))[1],
    "jvp in one argument": lambda t, f: t.jvp(lambda y: f(X[0], y), (Y,), (X[2],))[1],
    "vmap(jvp)": lambda t, f: t.vmap(lambda x, v: t.jvp(f, (x, Y), (v, Y))[1])(X, X.flip(0)),
    "jvp(vmap)": lambda t, f: t.jvp(lambda x, y: t.vmap(f, (0, None))(x, y), (X, Y), (X.flip(0), X[1]))[1],
    "hessian": lambda t, f: t.hessian(weighted(f), (0, 1))(X[0], Y),
    "vmap(hessian)": lambda t, f: t.vmap(t.hessian(weighted(f)), (0, None))(X, Y),
    "hessian(vmap)": lambda t, f: t.hessian(mapped(t, f), (0, 1))(X, Y),
    "jacrev(jacrev)": lambda t, f: t.jacrev(t.jacrev(f))(X[0], Y),
    "jacrev(jacfwd)": lambda t, f: t.jacrev(t.jacfwd(f))(X[0], Y),
    "jacfwd(jacfwd)": lambda t, f: t.jacfwd(t.jacfwd(f))(X[0], Y),
    "jacfwd(jacfwd(vmap))": lambda t, f: t.jacfwd(t.jacfwd(mapped(t, f)), argnums=1)(X, Y),
    "grad(jvp(vmap))": lambda t, f: t.grad(lambda x: t.jvp(mapped(t, f), (x, Y), (X.flip(0), Y))[1])(X),
    "vmap(vjp_fn)": lambda t, f: t.vmap(t.vjp(f, X[0], Y)[1])(X),
    "third derivative": lambda t, f: t.grad(lambda x: t.hessian(weighted(f))(x, Y).sum())(X[0]),
}


def agree(ours: Any, theirs: Any, factor: float = 1.0) -> None:
    """The same tree, `factor` times the same numbers."""
    torch.testing.assert_close(
        ours, torch.utils._pytree.tree_map(lambda x: factor * x, theirs), rtol=1e-10, atol=1e-12
    )
