"""Special functions that PyTorch takes for constants, against finite differences; and derivatives that are
unknown, refused.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, special
from torch.nn.functional import ctc_loss

from psgrad.engine.transforms import grad, jvp, vjp, vmap
from psgrad.errors import UnsupportedOperatorError
from tests.engine.transforms.loops import gradients_by_loop

FUNCTIONS = [
    "bessel_j0",
    "bessel_j1",
    "bessel_y0",
    "bessel_y1",
    "modified_bessel_i0",
    "modified_bessel_i1",
    "modified_bessel_k0",
    "modified_bessel_k1",
    "scaled_modified_bessel_k0",
    "scaled_modified_bessel_k1",
    "spherical_bessel_j0",
]
POLYNOMIALS = [
    "chebyshev_polynomial_t",
    "shifted_chebyshev_polynomial_t",
    "hermite_polynomial_h",
    "hermite_polynomial_he",
]


def slope(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    step = 1e-5
    return (function(x + step) - function(x - step)) / (2 * step)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_bessel_functions(name: str) -> None:
    function, x = getattr(special, name), torch.linspace(0.2, 4.5, 40, dtype=torch.float64)
    derivative = vmap(grad(function))
    torch.testing.assert_close(derivative(x), slope(function, x), rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(vmap(grad(grad(function)))(x), slope(derivative, x), rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(jvp(function, (x,), (torch.ones_like(x),))[1], derivative(x))


@pytest.mark.parametrize(
    ("name", "at_zero"),
    [("bessel_j0", 0), ("bessel_j1", 0.5), ("modified_bessel_i1", 0.5), ("spherical_bessel_j0", 0)],
)
def test_bessel_functions_at_zero(name: str, at_zero: float) -> None:
    assert grad(getattr(special, name))(torch.zeros((), dtype=torch.float64)).item() == at_zero


@pytest.mark.parametrize("degree", [0, 1, 2, 5])
@pytest.mark.parametrize("name", POLYNOMIALS)
def test_orthogonal_polynomials(name: str, degree: int) -> None:
    x = torch.linspace(0.1, 0.9, 20, dtype=torch.float64)
    for n in (degree, torch.tensor(float(degree), dtype=torch.float64)):
        function = lambda x, n=n: getattr(special, name)(x, n)
        torch.testing.assert_close(vmap(grad(function))(x), slope(function, x), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "program",
    [
        lambda x: special.airy_ai(x),
        lambda x: special.legendre_polynomial_p(x, 3),
        lambda x: special.zeta(x, torch.ones_like(x)),
        lambda x: torch.igamma(x, torch.ones_like(x)),
    ],
)
def test_unknown_derivative_refused(program: Callable[[Tensor], Tensor]) -> None:
    x = torch.tensor(1.5, dtype=torch.float64)
    for differentiate in (lambda: grad(program)(x), lambda: jvp(program, (x,), (x,))):
        with pytest.raises(UnsupportedOperatorError, match="is not known"):
            differentiate()
    torch.testing.assert_close(grad(lambda x: x * program(x.detach()))(x), program(x))


def test_ctc_loss_lengths_on_the_cpu(device: torch.device) -> None:
    x = torch.randn(4, 6, 2, 5, device=device)
    targets, lengths = torch.ones(2, 3, dtype=torch.long, device=device), torch.tensor([2, 3])

    def loss(x: Tensor) -> Tensor:
        return ctc_loss(x.log_softmax(-1), targets, torch.tensor([6, 5]), lengths, zero_infinity=True)

    expected = gradients_by_loop(loss, x)
    torch.testing.assert_close(vmap(grad(loss, (0,)))(x), expected)
    torch.testing.assert_close(grad(loss)(x[0]), expected[0][0])


def test_ctc_loss_second_derivative_refused() -> None:
    x = torch.randn(6, 2, 5, dtype=torch.float64)
    targets, lengths = torch.ones(2, 3, dtype=torch.long), torch.tensor([2, 3])

    def gradient(x: Tensor) -> Tensor:
        return grad(lambda x: ctc_loss(x.log_softmax(-1), targets, torch.tensor([6, 5]), lengths))(x)

    with pytest.raises(UnsupportedOperatorError, match="_ctc_loss_backward"):
        vjp(gradient, x)
    with pytest.raises(UnsupportedOperatorError, match="_ctc_loss_backward"):
        jvp(gradient, (x,), (x,))
