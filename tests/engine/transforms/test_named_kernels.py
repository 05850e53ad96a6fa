"""Kernels that a GPU's dispatcher picks by name, where they are written with others and so can be run
here.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import ctc_loss, scaled_dot_product_attention

from psgrad.engine.transforms import functional_call, grad, vmap
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


@pytest.mark.parametrize("library", ["cudnn", "miopen"])
def test_ctc_loss_that_asks_for_the_kernel_of_a_library(library: str) -> None:
    """As PyTorch's ctc_loss does on a GPU."""
    torch.manual_seed(0)
    scores, labels = torch.randn(4, 6, 2, 5, dtype=torch.float64), torch.randint(1, 5, (4, 2, 3))
    lengths, of_labels = [6, 6], [3, 2]

    def by_name(scores: Tensor, labels: Tensor) -> Tensor:
        given = scores.log_softmax(2), labels, lengths, of_labels
        assert not getattr(torch.ops.aten, f"_use_{library}_ctc_loss")(*given, 0)
        return torch.ops.aten._ctc_loss(*given)[0].sum()

    def plainly(scores: Tensor, labels: Tensor) -> Tensor:
        given = scores.log_softmax(2), labels, torch.tensor(lengths), torch.tensor(of_labels)
        return ctc_loss(*given, reduction="sum")

    expected = gradients_by_loop(plainly, scores, labels)
    torch.testing.assert_close(vmap(grad(by_name, (0,)))(scores, labels), expected)


@pytest.mark.parametrize("trained", [8, 1])
def test_recurrent_layer_whose_weights_pytorch_packs_for_cudnn(
    trained: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It asks for the addresses of all weights, of which those that are trained have none."""
    torch.manual_seed(0)
    layer = nn.LSTM(3, 4, num_layers=2, batch_first=True)
    x = torch.randn(5, 6, 3)
    names = [name for name, _ in layer.named_parameters()][:trained]
    params = {name: getattr(layer, name).detach() for name in names}

    def loss(params: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(layer, params, (x[None],))[0].square().sum()

    expected = vmap(grad(loss), (None, 0))(params, x)
    packed: list[Any] = []
    monkeypatch.setattr(torch.backends.cudnn, "is_acceptable", lambda x: True)
    monkeypatch.setattr(Tensor, "is_cuda", True)
    monkeypatch.setattr(torch, "_cudnn_rnn_flatten_weight", lambda *args: packed.append(args))
    monkeypatch.setattr(torch.cuda, "device_of", lambda x: nullcontext())
    found = vmap(grad(loss), (None, 0))(params, x)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert not any(type(weight) is not nn.Parameter for args in packed for weight in args[0])
