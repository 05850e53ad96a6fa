"""Sampling at places of a grid, up to its second derivative, and upsampling: against torch.autograd sample by
sample.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor
from torch.nn.functional import grid_sample

from psgrad.engine.transforms import grad, vmap
from tests.engine.transforms.loops import gradients_by_loop

MODES = [(2, "bilinear"), (2, "nearest"), (2, "bicubic"), (3, "bilinear"), (3, "nearest")]


def images_and_grids(axes: int) -> tuple[Tensor, Tensor]:
    """Grids that leave the image, too."""
    torch.manual_seed(0)
    images = torch.randn(3, 2, 2, *(4, 5, 3)[:axes], dtype=torch.float64)
    return images, 1.3 * torch.randn(3, 2, *(3, 4, 2)[:axes], axes, dtype=torch.float64)


@pytest.mark.parametrize(
    ("padding", "align"), list(itertools.product(["zeros", "border", "reflection"], [True, False]))
)
@pytest.mark.parametrize(("axes", "mode"), MODES)
def test_grid_sample(axes: int, mode: str, padding: str, align: bool) -> None:
    images, grids = images_and_grids(axes)

    def loss(image: Tensor, grid: Tensor) -> Tensor:
        return (grid_sample(image, grid, mode, padding, align) ** 3).sum()

    def size_of_gradient(image: Tensor, grid: Tensor) -> Tensor:
        gradients = grad(loss, argnums=(0, 1))(image, grid)
        return sum((g**2).sum() for g in gradients)  # type: ignore[return-value]

    def size_by_autograd(image: Tensor, grid: Tensor) -> Tensor:
        gradients = torch.autograd.grad(loss(image, grid), (image, grid), create_graph=True)
        return sum((g**2).sum() for g in gradients)  # type: ignore[return-value]

    torch.testing.assert_close(
        vmap(grad(loss, (0, 1)))(images, grids), gradients_by_loop(loss, images, grids, argnums=(0, 1))
    )
    shared = images[:1].expand_as(images)
    torch.testing.assert_close(
        vmap(grad(loss, argnums=1), in_dims=(None, 0))(images[0], grids),
        *gradients_by_loop(loss, shared, grids, argnums=(1,)),
    )
    try:
        twice = gradients_by_loop(size_by_autograd, images, grids, argnums=(0, 1))
    except RuntimeError as error:
        if "_backward is not implemented" not in str(error):
            raise
        pytest.skip("PyTorch before 2.13 has no second derivative to hold ours against")
    torch.testing.assert_close(vmap(grad(size_of_gradient, (0, 1)))(images, grids), twice)
