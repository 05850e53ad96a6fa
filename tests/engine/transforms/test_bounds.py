"""What a value on its bound passes on is PyTorch's choice, which is another since 2.14: ours is that of the
PyTorch that is there.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from psgrad.engine.transforms import grad, jvp, vmap

X = torch.tensor([-1.0, -0.5, 0.0, 1.0, 2.0], dtype=torch.float64)
ZEROS, ONES = torch.zeros_like(X), torch.ones_like(X)
NAN = torch.tensor([torch.nan, 1.0, 0.0, 1.0, 2.0], dtype=torch.float64)

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "numbers": lambda x: x.clamp(0, 1),
    "numbers that cross": lambda x: x.clamp(1, 0),
    "a lower number": lambda x: x.clamp_min(0),
    "an upper number": lambda x: x.clamp(max=1),
    "in place": lambda x: (x * 1).clamp_(0, 1),
    "tensors": lambda x: x.clamp(ZEROS, ONES),
    "tensors that cross": lambda x: x.clamp(ONES, ZEROS),
    "a lower tensor": lambda x: x.clamp(min=ZEROS),
    "an upper tensor": lambda x: x.clamp_max(ONES),
    "of a lower bound": lambda x: ZEROS.clamp(min=x),
    "of an upper bound": lambda x: ZEROS.clamp(max=x),
    "of both": lambda x: ZEROS.clamp(x, x + 1) + ZEROS.clamp(x - 1, x),
    "of bounds that are one": lambda x: ZEROS.clamp(x, x),
    "in the larger": lambda x: torch.fmax(x, ZEROS) + torch.fmax(ONES, x),
    "in the smaller": lambda x: torch.fmin(x, ZEROS) + torch.fmin(ONES, x),
    "beside nan": lambda x: torch.fmax(x, NAN) + torch.fmin(NAN, x),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_derivative_on_the_bound_of_a_piece(name: str) -> None:
    function = FUNCTIONS[name]
    leaf = X.clone().requires_grad_()
    expected = torch.autograd.grad(function(leaf).sum(), leaf)[0]
    assert torch.equal(grad(lambda x: function(x).sum())(X), expected)
    assert torch.equal(
        vmap(grad(lambda x: function(x).sum()))(torch.stack([X, X])), torch.stack([expected, expected])
    )
    assert torch.equal(jvp(function, (X,), (ONES,))[1], expected)
