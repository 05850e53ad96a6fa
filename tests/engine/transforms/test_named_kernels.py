"""Kernels that a GPU's dispatcher picks by name, where they are written with others and so can be run
here.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from psgrad.engine.transforms import grad, vmap
from tests.engine.transforms.loops import gradients_by_loop


def test_cudnn_attention_with_a_mask() -> None:
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 4, 1, 2, 5, 6, dtype=torch.float64).unbind()
    mask = torch.randn(4, 1, 2, 5, 5, dtype=torch.float64)

    def by_name(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        return (
            torch.ops.aten._scaled_dot_product_cudnn_attention(query, key, value, mask, True, scale=0.3)[0]
            ** 3
        ).sum()

    def plainly(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        return (scaled_dot_product_attention(query, key, value, mask, scale=0.3) ** 3).sum()

    expected = gradients_by_loop(plainly, query, key, value, mask, argnums=(0, 1, 2, 3))
    torch.testing.assert_close(vmap(grad(by_name, (0, 1, 2, 3)))(query, key, value, mask), expected)
