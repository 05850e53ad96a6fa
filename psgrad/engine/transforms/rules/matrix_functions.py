"""The exponential of a matrix, the pseudoinverse and least squares. The sample axis is one more leading axis.

The derivative of the exponential is of Najfeld and Havel (1995), that of the pseudoinverse of Golub and
Pereyra (1973).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from psgrad.engine.transforms.rules.families import aten, leading, on_physical
from psgrad.engine.transforms.rules.linear_systems import is_vector, raised, with_empty
from psgrad.engine.transforms.rules.matmul import h
from psgrad.engine.transforms.rules.registry import JointVJP, Op, define


def _exponential_back(out: torch.Tensor, a: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """The VJP of the matrix exponential. The block above the diagonal of exp([[a, e], [0, a]]) is the
    derivative of exp(a) in the direction e.
    """
    size, adjoint = a.shape[-1], h(a)

    def back(g: torch.Tensor) -> torch.Tensor:
        above = torch.cat([adjoint, g], -1)
        below = torch.cat([torch.zeros_like(adjoint), adjoint], -1)
        return aten.linalg_matrix_exp.default(torch.cat([above, below], -2))[..., :size, size:]

    return back


define(aten.linalg_matrix_exp.default, vjp={0: _exponential_back}, batch=leading)


def _pinv_cotangent(g: torch.Tensor, p: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
    """The cotangent of a from that of p = a^+, for constant rank. The last two terms are the parts outside of
    the row space and the column space.
    """
    ph, gh = h(p), h(g)
    across = gh @ p @ ph
    along = ph @ p @ gh
    return -(ph @ g @ ph) + (across - a @ (p @ across)) + (along - (along @ p) @ a)


def _pinv_batch(
    batch: Any, op: Op, a: torch.Tensor, *, atol: Any = None, rtol: Any = None, **kwargs: Any
) -> torch.Tensor:
    atol, rtol = (raised(batch, t, a.dim() - 2) if t is not None else None for t in (atol, rtol))
    return op(batch.physical(a), atol=atol, rtol=rtol, **kwargs)


define(
    aten.linalg_pinv.atol_rtol_tensor,
    vjp={0: lambda out, a, **kwargs: lambda g: _pinv_cotangent(g, out, a)},
    batch=_pinv_batch,
)


def _least_squares_back(
    out: Any, a: torch.Tensor, b: torch.Tensor, rcond: Any = None, *, driver: Any = None
) -> Callable[..., Any]:
    """The VJP of least squares. The solution is a^+ b; a residual is the squared norm of a column of a x - b,
    whose derivative in x is zero.
    """
    x = out[0]

    def back(gs: list[Any], positions: Sequence[int]) -> dict[int, Any]:
        ga, gb = torch.zeros_like(a), torch.zeros_like(b)
        if gs[0] is not None:
            inverse = torch.linalg.pinv(a)
            gb = gb + h(inverse) @ gs[0]
            if 0 in positions:
                ga = ga + _pinv_cotangent(gs[0] @ h(b), inverse, a)
        if gs[1] is not None and gs[1].numel():  # there are none unless the matrix is tall
            pull = 2 * gs[1].unsqueeze(-2) * (a @ x - b)
            ga, gb = ga + pull @ h(x), gb - pull
        return {0: ga, 1: gb}

    return back


def _least_squares_of_vectors(a: torch.Tensor, b: torch.Tensor, *rest: Any, **kwargs: Any) -> Any:
    if not is_vector(a, b):
        return None
    x, *others = aten.linalg_lstsq.default(a, b.unsqueeze(-1), *rest, **kwargs)
    return x.squeeze(-1), *others


def _least_squares_batch(batch: Any, op: Op, *args: Any, **kwargs: Any) -> Any:
    """The driver decides which of the residuals, the rank and the singular values are returned."""
    results = on_physical(batch, op, *args, **kwargs)
    return with_empty(batch, results, [i for i, x in enumerate(results) if x.shape == (0,)])


define(
    aten.linalg_lstsq.default,
    vjp=JointVJP(_least_squares_back),
    batch=_least_squares_batch,
    instead=_least_squares_of_vectors,
)
