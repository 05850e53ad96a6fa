"""What PyTorch's database does not show of linear algebra and Fourier transforms: samples that differ in
kind, shapes that can be taken for others, singular and degenerate matrices, single precision. The oracle is
torch.autograd on one sample at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from psgrad.engine.transforms import grad, hessian, vmap
from psgrad.errors import TransformError
from tests.engine.gradients.agreement import LargestTensor
from tests.engine.transforms.loops import gradients_by_loop

aten = torch.ops.aten


def draws(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def positive(x: Tensor) -> Tensor:
    return x @ x.mT + torch.eye(x.shape[-1], dtype=x.dtype)


def check(
    loss: Callable[..., Tensor], in_dims: tuple[int | None, ...], *arguments: Tensor, **tolerance: float
) -> None:
    places = tuple(range(len(arguments)))
    ours = vmap(grad(loss, argnums=places), in_dims=in_dims)(*arguments)
    count = len(arguments[in_dims.index(0)])
    each = [x if d == 0 else x.expand(count, *x.shape) for x, d in zip(arguments, in_dims, strict=True)]
    torch.testing.assert_close(ours, gradients_by_loop(loss, *each, argnums=places), **tolerance)


# -- which axis is what --------------------------------------------------------------------------------------

SIDES = [
    ((4, 3, 3), (4, 3)),
    ((4, 3, 3), (4, 3, 2)),
    ((3, 3, 3), (3, 3)),
    ((3, 3, 3), (3, 3, 3)),
    ((4, 2, 3, 3), (4, 3)),
]


@pytest.mark.parametrize(("matrix", "side"), SIDES)
@pytest.mark.parametrize("in_dims", [(0, 0), (None, 0), (0, None)])
def test_solve_vector_or_matrix_right_hand_side(matrix: Any, side: Any, in_dims: Any) -> None:
    a = draws(*(matrix if in_dims[0] == 0 else matrix[1:]))
    b = draws(*(side if in_dims[1] == 0 else side[1:]), seed=1)
    if a.dim() - (in_dims[0] == 0) == 3 and b.dim() - (in_dims[1] == 0) == 1:
        b = b.unsqueeze(-1)
    check(lambda a, b: torch.linalg.solve(a, b).pow(3).sum(), in_dims, a, b)


def test_solve_shared_matrix_factored_once() -> None:
    a, b = draws(3, 3), draws(5, 3, 2)
    factors = vmap(lambda b: aten._linalg_solve_ex(a, b)[1])(b)
    assert factors.shape == (5, 3, 3)
    assert factors.stride(0) == 0


@pytest.mark.parametrize(
    "function",
    [
        torch.linalg.inv,
        torch.linalg.det,
        torch.linalg.svdvals,
        torch.linalg.eigvalsh,
        torch.linalg.pinv,
        torch.matrix_exp,
        torch.fft.fft,
    ],
)
def test_linear_algebra_no_samples(function: Callable[[Tensor], Tensor]) -> None:
    none = torch.zeros(0, 3, 3, dtype=torch.float64)
    assert vmap(function)(none).shape == (0, *function(torch.eye(3, dtype=torch.float64)).shape)
    assert vmap(grad(lambda a: function(a).abs().sum()))(none).shape == (0, 3, 3)


# -- where there is no inverse -------------------------------------------------------------------------------


def cofactors(a: Tensor) -> Tensor:
    """The derivative of a determinant of three rows, as a polynomial. (PyTorch's own is zero where a matrix
    is singular.)
    """
    minors = [
        [a[[i for i in range(3) if i != row]][:, [j for j in range(3) if j != column]] for column in range(3)]
        for row in range(3)
    ]
    signed = [
        [(-1) ** (i + j) * (m[0, 0] * m[1, 1] - m[0, 1] * m[1, 0]) for j, m in enumerate(row)]
        for i, row in enumerate(minors)
    ]
    return torch.stack([torch.stack(row) for row in signed])


def of_rank(rank: int) -> Tensor:
    left, right = draws(3, 3, seed=2), draws(3, 3, seed=3)
    return left[:, :rank] @ right[:rank] if rank else torch.zeros(3, 3, dtype=torch.float64)


def test_determinant_derivative_at_every_rank() -> None:
    """Samples of every rank, side by side: what one of them can't be divided by must not reach the others."""
    exactly_singular = torch.tensor([[1.0, 2, 4], [2, 4, 8], [1, 0, 1]], dtype=torch.float64)
    matrices = torch.stack(
        [of_rank(0), exactly_singular, of_rank(1), of_rank(2), of_rank(3), torch.eye(3, dtype=torch.float64)]
    )
    result = vmap(grad(torch.linalg.det))(matrices)
    torch.testing.assert_close(result, torch.stack([cofactors(a) for a in matrices]), rtol=1e-9, atol=1e-9)


def test_determinant_second_derivative_at_zero() -> None:
    a = torch.tensor([[1.0, 2, 4], [2, 4, 8], [1, 0, 1]], dtype=torch.float64)
    assert float(torch.linalg.det(a)) == 0
    second = vmap(hessian(torch.linalg.det))(torch.stack([a, of_rank(3)]))
    expected = torch.stack([torch.autograd.functional.jacobian(cofactors, x) for x in (a, of_rank(3))])
    torch.testing.assert_close(second, expected, rtol=1e-8, atol=1e-8)


def test_determinant_derivatives_rows_and_columns_in_unlike_units() -> None:
    """Scales that differ by 1e18 make no matrix singular; nor are the other samples' derivatives any the
    worse for it.
    """
    rows, columns = (2.0 ** torch.tensor(e, dtype=torch.float64) for e in ([-30, 30, 0], [10, 0, 30]))
    units = torch.stack([rows[:, None] * columns, torch.ones(3, 3, dtype=torch.float64)])
    matrices = of_rank(3) * units
    result = vmap(grad(torch.linalg.det))(matrices)
    torch.testing.assert_close(result, torch.stack([cofactors(a) for a in matrices]), rtol=1e-12, atol=0)
    second = vmap(hessian(torch.linalg.det))(matrices)
    in_its_units = (
        second
        * units[:, :, :, None, None]
        * units[:, None, None]
        / torch.tensor([2.0**40, 1.0])[:, None, None, None, None]
    )
    expected = torch.autograd.functional.jacobian(cofactors, of_rank(3)).expand(2, 3, 3, 3, 3)
    torch.testing.assert_close(in_its_units, expected, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0, 3.0])
def test_determinant_derivatives_matrix_of_one_number(value: float) -> None:
    a = torch.full((2, 1, 1), value, dtype=torch.float64)
    assert torch.equal(vmap(grad(torch.linalg.det))(a), torch.ones_like(a))
    assert torch.equal(vmap(hessian(torch.linalg.det))(a), torch.zeros(2, 1, 1, 1, 1, dtype=torch.float64))


# -- degenerate matrices -------------------------------------------------------------------------------------

REPEATED = torch.diag(torch.tensor([2.0, 2.0, 1.0], dtype=torch.float64))


@pytest.mark.parametrize(
    "loss",
    [
        lambda a: torch.linalg.svdvals(a).pow(2).sum(),
        lambda a: torch.linalg.matrix_norm(a, "nuc"),
        lambda a: torch.linalg.eigvalsh(a).exp().sum(),
        lambda a: torch.linalg.matrix_norm(a, 2),
        lambda a: torch.linalg.eigvals(a).abs().sum(),
    ],
)
def test_repeated_eigenvalues_derivatives(loss: Callable[[Tensor], Tensor]) -> None:
    check(loss, (0,), torch.stack([REPEATED, positive(draws(3, 3))]))


@pytest.mark.parametrize("vectors", [lambda a: torch.linalg.eigh(a)[1], lambda a: torch.linalg.svd(a)[0]])
def test_repeated_eigenvalues_eigenvectors_not_finite(vectors: Callable[[Tensor], Tensor]) -> None:
    """As in PyTorch: an infinite number, or none, rather than one that looks right."""

    def loss(a: Tensor) -> Tensor:
        return (vectors(a) * torch.arange(9.0, dtype=a.dtype).reshape(3, 3)).pow(2).sum()

    assert not bool(grad(loss)(REPEATED).isfinite().all())
    assert not bool(gradients_by_loop(loss, REPEATED.unsqueeze(0))[0].isfinite().all())


def test_nearly_repeated_eigenvalues_precision() -> None:
    a = REPEATED + 1e-5 * positive(draws(3, 3))
    check(
        lambda a: (torch.linalg.eigh(a)[1].abs() * torch.arange(9.0, dtype=a.dtype).reshape(3, 3)).sum(),
        (0,),
        a.expand(2, 3, 3),
    )


def test_qr_complete_derivative_refused() -> None:
    a = draws(4, 5, 3)
    with pytest.raises(TransformError, match="mode='complete'"):
        vmap(grad(lambda a: torch.linalg.qr(a, "complete")[0].sum()))(a)
    complete = vmap(grad(lambda a: torch.linalg.qr(a, "complete")[1].pow(3).sum()))(a)
    torch.testing.assert_close(
        complete, gradients_by_loop(lambda a: torch.linalg.qr(a, "reduced")[1].pow(3).sum(), a)[0]
    )
    alone = vmap(grad(lambda a: torch.linalg.qr(a, "r")[1].pow(3).sum()))(a)
    torch.testing.assert_close(alone, complete)


# -- precision -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "loss",
    [
        lambda a, b: torch.linalg.solve(a, b).pow(2).sum(),
        lambda a, b: torch.cholesky_solve(b.unsqueeze(-1), torch.linalg.cholesky(a)).sum() + torch.logdet(a),
        lambda a, b: (torch.linalg.eigh(a)[1] @ b).pow(2).sum() + torch.linalg.eigvalsh(a).log().sum(),
        lambda a, b: torch.linalg.svd(a)[1].log().sum() + (torch.linalg.qr(a)[1].abs() @ b).sum(),
        lambda a, b: torch.matrix_exp(-a).sum() + torch.linalg.pinv(a).sum(),
        lambda a, b: torch.fft.rfft(a @ b).abs().sum() + torch.fft.irfft(torch.fft.fft2(a), n=5).sum(),
    ],
)
def test_linear_algebra_float32(loss: Callable[..., Tensor]) -> None:
    a, b = positive(draws(4, 3, 3)), draws(4, 3, seed=1)
    ours = vmap(grad(loss, argnums=(0, 1)))(a.float(), b.float())
    for result, expected in zip(ours, gradients_by_loop(loss, a, b, argnums=(0, 1)), strict=True):
        assert result.dtype == torch.float32
        torch.testing.assert_close(result.double(), expected, rtol=1e-4, atol=1e-5)


# -- at work -------------------------------------------------------------------------------------------------


def test_cholesky_gaussian_process_likelihood() -> None:
    """Each sample has a kernel of its own, of shared length scale and noise: logdet and solve through one
    Cholesky factor.
    """

    def loss(scale: Tensor, noise: Tensor, x: Tensor, y: Tensor) -> Tensor:
        kernel = torch.exp(-((x.unsqueeze(0) - x.unsqueeze(1)) ** 2) / scale) + noise.exp() * torch.eye(
            5, dtype=x.dtype
        )
        factor = torch.linalg.cholesky(kernel)
        return (
            y @ torch.cholesky_solve(y.unsqueeze(-1), factor).squeeze(-1) + 2 * factor.diagonal().log().sum()
        )

    scale, noise = torch.tensor(0.7, dtype=torch.float64), torch.tensor(-1.0, dtype=torch.float64)
    check(loss, (None, None, 0, 0), scale, noise, draws(3, 5), draws(3, 5, seed=1))


def test_matmul_matrix_mapped_is_not_copied_for_rows() -> None:
    """A product of many rows of one column each with a matrix of each sample takes no batch of small ones."""
    rows, matrices = draws(50, 1, 8), draws(6, 8, 9)
    with LargestTensor() as largest:
        vmap(torch.matmul, in_dims=(None, 0))(rows, matrices)
        vmap(torch.matmul)(rows.expand(6, 50, 1, 8), matrices)
    assert largest.elements <= 6 * 50 * 9
