"""Programs that once gave a wrong number, or a failure that told nothing: each the smallest that showed it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from psgrad.engine.transforms import grad, hessian, jacfwd, jacrev, vmap
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
