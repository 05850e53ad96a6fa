"""Determinants, their logarithms, and cofactors."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from psgrad.engine.transforms.rules.elementwise import conj
from psgrad.engine.transforms.rules.families import aten, leading
from psgrad.engine.transforms.rules.linear_systems import diag_of, eye_like
from psgrad.engine.transforms.rules.matmul import h
from psgrad.engine.transforms.rules.registry import define


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
