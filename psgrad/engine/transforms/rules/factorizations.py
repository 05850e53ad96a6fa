"""Factorisations of matrices: Cholesky, QR, singular values, eigenvalues, Householder reflections; and
determinants, with their logarithms and cofactors. All kernels take leading batch axes.

Sources of the derivatives: for the Cholesky factor Murray, "Differentiation of the Cholesky decomposition"
(2016); for QR Walter and Lehmann (2010); for eigenvalues and singular values Giles (2008), with the terms for
complex vectors of Wan and Zhang (2019). Some vectors are unique only up to a sign or a phase. They have a
derivative if the user's function does not depend on that choice, as in PyTorch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from psgrad.engine.transforms.rules.elementwise import conj
from psgrad.engine.transforms.rules.families import aten, cast, leading
from psgrad.engine.transforms.rules.linear_systems import diag_of, eye_like, with_empty
from psgrad.engine.transforms.rules.matmul import h
from psgrad.engine.transforms.rules.registry import Op, define, replace
from psgrad.engine.transforms.state import state
from psgrad.engine.transforms.tracer import Tracer
from psgrad.errors import TransformError


def _half_upper(x: torch.Tensor) -> torch.Tensor:
    """The upper triangle of a Hermitian matrix with half of its diagonal: its sum with its adjoint is the
    matrix.
    """
    return (x.triu() + x.triu(1)) / 2


def _real_diagonal(x: torch.Tensor) -> torch.Tensor:
    return torch.real(x.diagonal(0, -2, -1))


# -- Cholesky ------------------------------------------------------------------------------------------------


def _cholesky_back(factor: torch.Tensor, upper: bool) -> Callable[[torch.Tensor], torch.Tensor]:
    """The VJP of the Cholesky factor U, with a = U^H U. The cotangent of the Hermitian matrix is Hermitian,
    as in PyTorch.
    """
    u = factor if upper else h(factor)

    def back(g: torch.Tensor) -> torch.Tensor:
        inner = (g if upper else h(g)) @ h(u)
        inner = torch.linalg.solve_triangular(u, (inner.triu(1) + h(inner.triu())) / 2, upper=True)
        return torch.linalg.solve_triangular(h(u), inner, upper=False, left=False)

    return back


def _cholesky_ex_back(
    out: Any, a: torch.Tensor, *, upper: bool = False, check_errors: bool = False
) -> Callable[[list[Any]], Any]:
    back = _cholesky_back(out[0], upper)
    return lambda gs: back(gs[0])


if hasattr(aten, "cholesky"):  # superseded by linalg_cholesky_ex, and gone from PyTorch 2.14
    define(
        aten.cholesky.default, vjp={0: lambda out, a, upper=False: _cholesky_back(out, upper)}, batch=leading
    )
define(aten.linalg_cholesky_ex.default, vjp={0: _cholesky_ex_back}, batch=leading)

# -- QR ------------------------------------------------------------------------------------------------------


def _qr_back(out: Any, a: torch.Tensor, mode: str = "reduced") -> Callable[[list[Any]], torch.Tensor]:
    """The VJP of QR for at least as many rows as columns: R's diagonal is real, Q's columns are
    orthonormal.
    """
    q, r = out
    columns = a.shape[-1]
    spare = q.shape[-1] > columns
    q, r = q[..., :columns], r[..., :columns, :]

    def back(gs: list[Any]) -> torch.Tensor:
        gq, gr = gs
        if spare and gq is not None:
            raise TransformError(
                "the derivative of linalg.qr with mode='complete' of a matrix with more rows than columns",
                hint="use mode='reduced', or R alone: the other columns of Q are an arbitrary basis",
            )
        inner = torch.zeros_like(r) if gr is None else gr[..., :columns, :] @ h(r)
        if gq is not None:
            inner = inner - h(q) @ gq
        half = _half_upper(inner)
        g = q @ (half + h(half))
        return torch.linalg.solve_triangular(h(r), g if gq is None else g + gq, upper=False, left=False)

    return back


def _qr_instead(a: torch.Tensor, mode: str = "reduced") -> Any:
    """QR by the square part of a wide matrix, which determines Q; and for R alone, by the QR with Q, which
    the derivative of R contains.
    """
    rows, columns = a.shape[-2:]
    if mode == "r":
        return a.new_empty(0), aten.linalg_qr.default(a, "reduced")[1]
    if rows >= columns:
        return None
    q, r = aten.linalg_qr.default(a[..., :rows], mode)
    return q, torch.cat([r, h(q) @ a[..., rows:]], -1)


def _qr_batch(batch: Any, op: Op, a: torch.Tensor, mode: str = "reduced") -> Any:
    return with_empty(batch, op(batch.physical(a), mode), (0,) if mode == "r" else ())


define(aten.linalg_qr.default, vjp={0: _qr_back}, batch=_qr_batch, instead=_qr_instead)
define(aten.geqrf.default, batch=leading)  # PyTorch has no derivative of it either

# -- Householder reflections ---------------------------------------------------------------------------------


def _reflect(
    vectors: torch.Tensor, scales: torch.Tensor, x: torch.Tensor, adjoint: bool = False
) -> torch.Tensor:
    """H_1 ... H_k x, or its adjoint: H_i = 1 - scale_i v_i v_i^H, where v_i is one at i, zero above, and as
    given below.
    """
    whole = vectors.tril(-1) + eye_like(vectors)
    places = range(scales.shape[-1])
    for i in places if adjoint else reversed(places):
        v, scale = whole[..., i : i + 1], scales[..., i : i + 1].unsqueeze(-1)
        x = x - (conj(scale) if adjoint else scale) * (v @ (h(v) @ x))
    return x


@replace(aten.linalg_householder_product.default)
def _householder_product(vectors: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return _reflect(vectors, scales, eye_like(vectors).expand(vectors.shape))


@replace(aten.ormqr.default)
def _ormqr(
    vectors: torch.Tensor, scales: torch.Tensor, x: torch.Tensor, left: bool = True, transpose: bool = False
) -> torch.Tensor:
    return (
        _reflect(vectors, scales, x, transpose) if left else h(_reflect(vectors, scales, h(x), not transpose))
    )


# -- eigenvalues ---------------------------------------------------------------------------------------------


def _gaps(values: torch.Tensor) -> torch.Tensor:
    """[j, k]: value k minus value j; infinite for j = k, so that a division by it makes the diagonal zero."""
    own = torch.eye(values.shape[-1], dtype=torch.bool, device=values.device)
    return (values.unsqueeze(-2) - values.unsqueeze(-1)).masked_fill(own, torch.inf)


def _eigh_back(
    out: Any, a: torch.Tensor, triangle: str = "L", vectors: bool = True
) -> Callable[[list[Any]], torch.Tensor]:
    """The VJP of eigh. The cotangent of the Hermitian matrix is Hermitian, for both triangles that the kernel
    may read.
    """
    values, v = out

    def back(gs: list[Any]) -> torch.Tensor:
        if gs[1] is None:
            return (v * gs[0].unsqueeze(-2)) @ h(v)
        inner = h(v) @ gs[1] / _gaps(values)
        inner = (inner + h(inner)) / 2
        return v @ (inner if gs[0] is None else inner + cast(torch.diag_embed(gs[0]), inner.dtype)) @ h(v)

    return back


def _with_vectors(a: torch.Tensor, UPLO: str = "L", compute_v: bool = True) -> Any:
    """The eigenvalues alone, by the operator with vectors, which the derivative of the eigenvalues
    contains.
    """
    if compute_v:
        return None
    return aten._linalg_eigh.default(a, UPLO, True)[0], a.new_empty(0)


def _eigh_batch(batch: Any, op: Op, a: torch.Tensor, UPLO: str = "L", compute_v: bool = True) -> Any:
    return with_empty(batch, op(batch.physical(a), UPLO, compute_v), () if compute_v else (1,))


def _recorded(a: torch.Tensor) -> bool:
    """Whether PyTorch's autograd, outside of the transforms, records operators on a value."""
    while isinstance(a, Tracer):
        a = a.below()
    return state.attached and a.requires_grad


@replace(aten.linalg_eigvalsh.default)
def _eigvalsh(a: torch.Tensor, UPLO: str = "L") -> torch.Tensor:
    """eigvalsh without vectors. PyTorch's definition computes them for all tensor subclasses. For a matrix
    that is not finite, the kernel raises an error without vectors and returns NaN with them.
    """
    return aten._linalg_eigh.default(a, UPLO, _recorded(a))[0]


define(aten._linalg_eigh.default, vjp={0: _eigh_back}, batch=_eigh_batch, instead=_with_vectors)


def _eig_back(out: Any, a: torch.Tensor) -> Callable[[list[Any]], torch.Tensor]:
    """The VJP of eig. The vectors have length one, so the component along the vector itself is removed."""
    values, v = out
    dtype = a.dtype

    def back(gs: list[Any]) -> torch.Tensor:
        inner = torch.zeros_like(v) if gs[0] is None else torch.diag_embed(gs[0])
        if gs[1] is not None:
            turned = h(v) @ gs[1]
            inner = inner + (turned - h(v) @ v * _real_diagonal(turned).unsqueeze(-2)) / conj(_gaps(values))
        return cast(aten._linalg_solve_ex.default(h(v), inner @ h(v))[0], dtype)

    return back


define(aten.linalg_eig.default, vjp={0: _eig_back}, batch=leading)
define(
    aten._linalg_eigvals.default,
    instead=lambda a: aten.linalg_eig.default(a)[0],
    batch=leading,
)

# -- singular values -----------------------------------------------------------------------------------------


def _svd_back(
    out: Any, a: torch.Tensor, full: bool = False, vectors: bool = True, *, driver: Any = None
) -> Callable[[list[Any]], Any]:
    """The VJP of SVD. There is a derivative for one vector of each singular value; the others (`full`) are an
    arbitrary basis.
    """
    s = out[1]
    size = s.shape[-1]
    u, vh = out[0][..., :size], out[2][..., :size, :]
    rows, columns = a.shape[-2:]

    def back(gs: list[Any]) -> torch.Tensor:
        gu, gs_, gvh = gs[0], gs[1], gs[2]
        if gu is None and gvh is None:
            return (u * gs_.unsqueeze(-2)) @ vh
        gaps = _gaps(s * s)
        across = s.unsqueeze(-2)
        inner = torch.zeros_like(u[..., :size, :]) if gs_ is None else cast(torch.diag_embed(gs_), u.dtype)
        outside: Any = 0
        if gu is not None:
            gu = gu[..., :size]
            turned = h(u) @ gu
            inner = inner + (turned - h(turned)) / gaps * across + _phase(turned, s)
            if rows > size:
                outside = ((gu - u @ turned) / across) @ vh
        if gvh is not None:
            gv = h(gvh[..., :size, :])
            turned = vh @ gv
            inner = inner + s.unsqueeze(-1) * ((turned - h(turned)) / gaps) - _phase(turned, s)
            if columns > size:
                outside = outside + (u / across) @ h(gv - h(vh) @ turned)
        return u @ inner @ vh + outside

    return back


def _phase(turned: torch.Tensor, s: torch.Tensor) -> Any:
    """The term of the phase between the two complex vectors of each singular value."""
    if not turned.is_complex():
        return 0
    diagonal = torch.imag(turned.diagonal(0, -2, -1)) / (2 * s)
    return torch.diag_embed(torch.complex(torch.zeros_like(diagonal), diagonal))


def _svd_instead(
    a: torch.Tensor, full_matrices: bool = False, compute_uv: bool = True, *, driver: Any = None
) -> Any:
    """The singular values alone, by the operator with vectors, which the derivative of the values
    contains.
    """
    if compute_uv:
        return None
    values = aten._linalg_svd.default(a, False, True, driver=driver)[1]
    return a.new_empty(0), values, a.new_empty(0)


def _svd_batch(
    batch: Any,
    op: Op,
    a: torch.Tensor,
    full_matrices: bool = False,
    compute_uv: bool = True,
    *,
    driver: Any = None,
) -> Any:
    results = op(batch.physical(a), full_matrices, compute_uv, driver=driver)
    return with_empty(batch, results, () if compute_uv else (0, 2))


define(aten._linalg_svd.default, vjp={0: _svd_back}, batch=_svd_batch, instead=_svd_instead)


def _determinant_back(out: Any, a: torch.Tensor) -> Callable[[list[Any]], torch.Tensor]:
    def back(gs: list[Any]) -> torch.Tensor:
        if a.shape[-1] < 2:
            return diag_of(gs[0]).expand(a.shape)
        exponents = _exponents_of_scales(a.detach().abs())
        scaled = a * torch.exp2(-exponents)
        # A cofactor lacks one row and one column, and so their scales.
        others = exponents.diagonal(0, -2, -1).sum(-1, keepdim=True).unsqueeze(-1) - exponents
        return diag_of(gs[0]) * (_cofactors(scaled) * torch.exp2(others))

    return back


def _exponents_of_scales(sizes: torch.Tensor) -> torch.Tensor:
    """[..., n, n] whole numbers e_i + e_j: divided by the powers of two with these exponents, rows and
    columns have numbers of size one.

    Rows in different units make no matrix singular, though its pivots differ by as much as the units.
    """
    half = math.floor(-math.log2(torch.finfo(sizes.dtype).tiny)) / 2

    def of_largest(largest: torch.Tensor) -> torch.Tensor:
        usable = largest.isfinite() & (largest > 0)
        return torch.where(usable, largest, 1).log2().floor().clamp(-half, half)

    rows = of_largest(sizes.amax(-1)).unsqueeze(-1)
    return rows + of_largest((sizes * torch.exp2(-rows)).amax(-2)).unsqueeze(-2)


def _cofactors(a: torch.Tensor) -> torch.Tensor:
    """By the inverse, or, for an `a` that is nearly singular, by its singular values.

    Each branch gets only matrices that it can handle: nan from the other branch would reach further
    derivatives.
    """
    pivots = aten.linalg_lu_factor_ex.default(a)[0].diagonal(0, -2, -1).abs()
    singular = diag_of(pivots.amin(-1) <= math.sqrt(torch.finfo(a.dtype).eps) * pivots.amax(-1))
    regular = _cofactors_by_inverse(torch.where(singular, eye_like(a), a))
    distinct = torch.diag(torch.arange(1, a.shape[-1] + 1, device=a.device)).to(a.dtype)
    return torch.where(singular, _cofactors_by_values(torch.where(singular, a, distinct)), regular)


def _cofactors_by_inverse(a: torch.Tensor) -> torch.Tensor:
    """conj(det(a)) a^-H, both from one factorisation: then the rounding error of the smallest pivot
    cancels.
    """
    lu, pivots, _ = aten.linalg_lu_factor_ex.default(a)
    swaps = (pivots != torch.arange(1, a.shape[-1] + 1, device=a.device)).sum(-1)
    determinant = lu.diagonal(0, -2, -1).prod(-1) * (1 - 2 * (swaps % 2))
    return aten.linalg_lu_solve.default(lu, pivots, diag_of(conj(determinant)) * eye_like(a), adjoint=True)


def _cofactors_by_values(a: torch.Tensor) -> torch.Tensor:
    """conj(det(U) det(V^H)) U diag(products of the other singular values) V^H."""
    u, s, vh = torch.linalg.svd(a, full_matrices=False)
    own = torch.eye(s.shape[-1], dtype=torch.bool, device=s.device)
    others = torch.where(own, torch.ones((), dtype=s.dtype, device=s.device), s.unsqueeze(-2)).prod(-1)
    return diag_of(conj(torch.linalg.det(u) * torch.linalg.det(vh))) * ((u * others.unsqueeze(-2)) @ vh)


def _logarithm_back(out: Any, a: torch.Tensor) -> Callable[[list[Any]], torch.Tensor | None]:
    """d log det(a) is the trace of a^-1 da: its real part moves the logarithm of the size, its imaginary part
    the sign's angle.
    """
    sign = out[0]

    def back(gs: list[Any]) -> torch.Tensor | None:
        scale = gs[1]
        if gs[0] is not None and sign.is_complex():
            turn = torch.imag(gs[0] * conj(sign))
            scale = torch.complex(torch.zeros_like(turn) if scale is None else scale, turn)
        if scale is None:  # the sign of a real determinant is constant
            return None
        return diag_of(scale) * h(aten.linalg_inv_ex.default(a)[0])

    return back


define(aten._linalg_det.default, vjp={0: _determinant_back}, batch=leading)
define(aten._linalg_slogdet.default, vjp={0: _logarithm_back}, batch=leading)
