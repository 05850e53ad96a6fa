"""Solving with matrices: linear systems and inverses.

All kernels take leading batch axes, so the sample axis is one more. The derivatives are those of Giles, "An
extended collection of matrix derivative results for forward and reverse mode algorithmic differentiation"
(2008), written for complex matrices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from psgrad.engine.transforms.rules.families import aten, leading, one_by_one, sum_to
from psgrad.engine.transforms.rules.matmul import h
from psgrad.engine.transforms.rules.registry import JointVJP, Op, constant, define, replace


def raised(batch: Any, x: torch.Tensor, rank: int) -> Any:
    """The operand with `rank` logical axes behind the sample axis, which has length one if it is not
    mapped.
    """
    return batch.aligned(x, rank) if batch.is_mapped(x) else x.reshape(*(1,) * (rank + 1 - x.dim()), *x.shape)


def matrices(batch: Any, op: Op, *args: Any, **kwargs: Any) -> Any:
    """Batching for operators on matrices whose leading axes broadcast."""
    rank = max(a.dim() for a in args if isinstance(a, torch.Tensor))
    return op(*[raised(batch, a, rank) if isinstance(a, torch.Tensor) else a for a in args], **kwargs)


def with_empty(
    batch: Any, results: Sequence[torch.Tensor], places: Iterable[int]
) -> tuple[torch.Tensor, ...]:
    """A kernel's results [n, ...]. Results at `places` were not requested: PyTorch returns one empty vector,
    which becomes an empty vector for each sample.
    """
    return tuple(x.new_empty(batch.size, 0) if i in places else x for i, x in enumerate(results))


def eye_like(a: torch.Tensor) -> torch.Tensor:
    """The identity matrix of `a`'s last two axes."""
    return torch.eye(a.shape[-2], a.shape[-1], dtype=a.dtype, device=a.device)


def diag_of(x: torch.Tensor) -> torch.Tensor:
    """[..., 1, 1]: a number for each matrix, ready to scale it."""
    return x.unsqueeze(-1).unsqueeze(-1)


constant(
    aten._linalg_check_errors.default,
    batch=lambda batch, op, info, name, *, is_matrix: op(batch.raw(info), name, is_matrix=False),
)

# -- triangular systems --------------------------------------------------------------------------------------


def _triangular_back(
    out: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    upper: bool,
    left: bool = True,
    unitriangular: bool = False,
) -> Callable[..., Any]:
    shapes = (a.shape, b.shape)

    def back(g: torch.Tensor, positions: Sequence[int]) -> dict[int, Any]:
        gb = torch.linalg.solve_triangular(h(a), g, upper=not upper, left=left, unitriangular=unitriangular)
        cotangents = {1: sum_to(gb, shapes[1], g.dtype)}
        if 0 in positions:
            ga = -(gb @ h(out) if left else h(out) @ gb)
            ga = ga.triu(int(unitriangular)) if upper else ga.tril(-int(unitriangular))
            cotangents[0] = sum_to(ga, shapes[0], g.dtype)
        return cotangents

    return back


define(aten.linalg_solve_triangular.default, vjp=JointVJP(_triangular_back), linear=(1,), batch=matrices)


@replace(aten.triangular_solve.default)
def _triangular_solve(
    b: torch.Tensor, a: torch.Tensor, upper: bool = True, transpose: bool = False, unitriangular: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    matrix = a.mT if transpose else a
    solution = torch.linalg.solve_triangular(matrix, b, upper=upper != transpose, unitriangular=unitriangular)
    return solution, a.clone().expand(*solution.shape[:-2], *a.shape[-2:])


# -- systems given by a factorisation ------------------------------------------------------------------------


def _cholesky_solve_back(
    out: torch.Tensor, b: torch.Tensor, factor: torch.Tensor, upper: bool = False
) -> Callable[..., Any]:
    """The VJP of cholesky_solve. As in PyTorch, the factor may be any matrix with (factor factor^H) x = b,
    and its cotangent is not triangular.
    """
    shape = b.shape

    def back(g: torch.Tensor, positions: Sequence[int]) -> dict[int, Any]:
        gb = aten.cholesky_solve.default(g, factor, upper)
        cotangents = {0: sum_to(gb, shape, g.dtype)}
        if 1 in positions:
            twice = gb @ h(out) + out @ h(gb)
            cotangents[1] = sum_to(-(factor @ twice if upper else twice @ factor), factor.shape, g.dtype)
        return cotangents

    return back


def _cholesky_inverse_back(
    out: torch.Tensor, factor: torch.Tensor, upper: bool = False
) -> Callable[[torch.Tensor], torch.Tensor]:
    def back(g: torch.Tensor) -> torch.Tensor:
        twice = out @ (g + h(g)) @ out
        return -(factor @ twice if upper else twice @ factor)

    return back


define(aten.cholesky_solve.default, vjp=JointVJP(_cholesky_solve_back), linear=(0,), batch=matrices)
define(aten.cholesky_inverse.default, vjp={0: _cholesky_inverse_back}, batch=leading)


@replace(aten.linalg_lu_solve.default)
def _lu_solve(
    lu: torch.Tensor, pivots: torch.Tensor, b: torch.Tensor, *, left: bool = True, adjoint: bool = False
) -> torch.Tensor:
    """The solution x of a x = b with a = P L U; of a^H x = b; or (not left) of x a = b, which is
    a^H x^H = b^H.
    """
    if not left:
        return h(_lu_solve(lu, pivots, h(b), adjoint=not adjoint))
    p, lower, upper = aten.lu_unpack.default(lu, pivots)
    if adjoint:
        inner = torch.linalg.solve_triangular(h(upper), b, upper=False)
        return p @ torch.linalg.solve_triangular(h(lower), inner, upper=True, unitriangular=True)
    inner = torch.linalg.solve_triangular(lower, p.mT @ b, upper=False, unitriangular=True)
    return torch.linalg.solve_triangular(upper, inner, upper=True)


define(aten.linalg_ldl_solve.default, batch=one_by_one)

# -- systems and inverses ------------------------------------------------------------------------------------


def is_vector(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether PyTorch treats the right-hand side `b` as vectors, one for each matrix of `a`."""
    return b.dim() == 1 or (b.dim() == a.dim() - 1 and b.shape == a.shape[:-1])


def _solve_back(
    out: Any, a: torch.Tensor, b: torch.Tensor, *, left: bool = True, check_errors: bool = False
) -> Callable[..., Any]:
    x, lu, pivots, _ = out
    shapes, dtype = (a.shape, b.shape), a.dtype

    def back(gs: list[Any], positions: Sequence[int]) -> dict[int, Any]:
        cotangents = {}
        if gs[0] is not None:
            gb = aten.linalg_lu_solve.default(lu, pivots, gs[0], left=left, adjoint=True)
            cotangents[1] = sum_to(gb, shapes[1], dtype)
            if 0 in positions:
                cotangents[0] = sum_to(-(gb @ h(x) if left else h(x) @ gb), shapes[0], dtype)
        if gs[1] is not None:  # another factorisation of the same matrix, from a second backward pass
            from_factors = lu_back(gs[1], lu, pivots)
            cotangents[0] = cotangents[0] + from_factors if 0 in cotangents else from_factors
        return cotangents

    return back


def _solve_vectors(a: torch.Tensor, b: torch.Tensor, **kwargs: Any) -> Any:
    if not is_vector(a, b):
        return None
    x, *factors = aten._linalg_solve_ex.default(a, b.unsqueeze(-1), **kwargs)
    return x.squeeze(-1), *factors


def _solve_batch(batch: Any, op: Op, a: torch.Tensor, b: torch.Tensor, **kwargs: Any) -> Any:
    vector = is_vector(a, b)
    columns = b.unsqueeze(-1) if vector else b
    rank = max(a.dim(), columns.dim())
    x, *factors = op(raised(batch, a, rank), raised(batch, columns, rank), **kwargs)
    # A matrix that all samples share is factored once.
    shapes = (a.shape, a.shape[:-1], a.shape[:-2])
    whole = [
        f.reshape(f.shape[0], *shape).expand(batch.size, *shape)
        for f, shape in zip(factors, shapes, strict=True)
    ]
    return x.squeeze(-1) if vector else x, *whole


define(aten._linalg_solve_ex.default, vjp=JointVJP(_solve_back), batch=_solve_batch, instead=_solve_vectors)


def _inverse_back(out: Any, a: torch.Tensor, **kwargs: Any) -> Callable[[list[Any]], torch.Tensor]:
    adjoint = h(out[0])
    return lambda gs: -(adjoint @ gs[0] @ adjoint)


define(aten.linalg_inv_ex.default, vjp={0: _inverse_back}, batch=leading)

# -- the factorisation P L U ---------------------------------------------------------------------------------


def _plu_back(gl: Any, gu: Any, p: Any, lower: torch.Tensor, upper: torch.Tensor) -> torch.Tensor:
    """The cotangent of P L U. Besides their square parts, L may have more rows, or U more columns, but not
    both.
    """
    size = lower.shape[-1]
    gl = torch.zeros_like(lower) if gl is None else gl
    gu = torch.zeros_like(upper) if gu is None else gu
    l1, l2, gl1, gl2 = lower[..., :size, :], lower[..., size:, :], gl[..., :size, :], gl[..., size:, :]
    u1, u2, gu1, gu2 = upper[..., :size], upper[..., size:], gu[..., :size], gu[..., size:]
    inner = (h(l1) @ gl1 - gu2 @ h(u2)).tril(-1) + (gu1 @ h(u1) - h(l2) @ gl2).triu()

    def from_the_left(x: torch.Tensor) -> torch.Tensor:
        return torch.linalg.solve_triangular(h(l1), x, upper=True, unitriangular=True)

    def from_the_right(x: torch.Tensor) -> torch.Tensor:
        return torch.linalg.solve_triangular(h(u1), x, upper=False, left=False)

    g = from_the_right(from_the_left(inner))
    if u2.shape[-1]:
        g = torch.cat([g, from_the_left(gu2)], -1)
    if l2.shape[-2]:
        g = torch.cat([g, from_the_right(gl2)], -2)
    return g if p is None else p @ g


def lu_back(g: torch.Tensor, lu: torch.Tensor, pivots: torch.Tensor) -> torch.Tensor:
    """The cotangent of a matrix from that of its packed factors; only the triangles of each factor are
    read.
    """
    p, lower, upper = aten.lu_unpack.default(lu, pivots)
    size = lower.shape[-1]
    return _plu_back(g[..., :size], g[..., :size, :], p, lower, upper)


def _lu_parts_back(out: Any, a: torch.Tensor, *, pivot: bool = True) -> Callable[[list[Any]], torch.Tensor]:
    p, lower, upper = out
    return lambda gs: _plu_back(gs[1], gs[2], p if pivot else None, lower, upper)


def _unpack_back(
    out: Any, lu: torch.Tensor, pivots: torch.Tensor, *what: bool
) -> Callable[[list[Any]], torch.Tensor]:
    rows, columns = lu.shape[-2:]

    def back(gs: list[Any]) -> torch.Tensor:
        parts = []
        if gs[1] is not None:
            parts.append(aten.constant_pad_nd.default(gs[1].tril(-1), [0, columns - gs[1].shape[-1]]))
        if gs[2] is not None:
            parts.append(aten.constant_pad_nd.default(gs[2].triu(), [0, 0, 0, rows - gs[2].shape[-2]]))
        return parts[0] + parts[1] if len(parts) == 2 else parts[0]

    return back


define(
    aten.linalg_lu_factor_ex.default,
    vjp={0: lambda out, a, **kwargs: lambda gs: lu_back(gs[0], out[0], out[1])},
    batch=leading,
)
define(
    aten.linalg_lu.default,
    vjp={0: _lu_parts_back},
    batch=lambda batch, op, a, *, pivot=True: with_empty(
        batch, op(batch.physical(a), pivot=pivot), () if pivot else (0,)
    ),
)
define(
    aten.lu_unpack.default,
    vjp={0: _unpack_back},
    batch=lambda batch, op, lu, pivots, data=True, order=True: with_empty(
        batch,
        op(batch.physical(lu), batch.physical(pivots), data, order),
        [*(() if order else (0,)), *(() if data else (1, 2))],
    ),
)
define(aten.linalg_ldl_factor_ex.default, batch=leading)
