"""Hugging Face models with random weights, from small configs: each sample's gradient is the loop's. Needs
the extra `hugging-face`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from psgrad.engine.gradients import PerSampleGradients, per_sample_gradients
from psgrad.engine.transforms import functional_call, grad, vmap
from tests.engine.gradients.agreement import (
    SMALLEST_SHARE,
    TOLERANCES,
    assert_close,
    assert_vectors_close,
    flat,
    rows,
)
from tests.engine.transforms.test_architectures import KernelCalls
from tests.oracles import Gradients

transformers = pytest.importorskip("transformers", reason="the extra hugging-face is not installed")

VOCABULARY, TIMES = 31, 7

Inputs = dict[str, Tensor]


@dataclass(frozen=True)
class Pretrained:
    """A model class with its config, what it is given, and arguments that all samples share."""

    name: str
    build: Callable[[str], nn.Module]  # from the attention's implementation
    draw: Callable[[int], Inputs]
    shared: tuple[tuple[str, Any], ...] = ()
    implementations: tuple[str, ...] = ("sdpa", "eager")


def text(n: int) -> Tensor:
    return torch.randint(3, VOCABULARY, (n, TIMES))


def padding(n: int) -> Tensor:
    """Ones, then zeros: every sample has padding, of several lengths."""
    return (torch.arange(TIMES) < 3 + (torch.arange(n) % 3)[:, None]).long()


def some_padded_text(n: int) -> Inputs:
    """Every other sample fills its array: the models branch on whether there is padding at all."""
    mask = (torch.arange(TIMES) < torch.where(torch.arange(n) % 2 == 0, 4, TIMES)[:, None]).long()
    return {**padded_text(n), "attention_mask": mask}


def labelled_text(n: int) -> Inputs:
    return {"input_ids": text(n), "labels": torch.arange(n) % 2}


def padded_text(n: int) -> Inputs:
    return {"input_ids": text(n), "attention_mask": padding(n), "labels": torch.arange(n) % 2}


def continued_text(n: int) -> Inputs:
    tokens = text(n)
    return {"input_ids": tokens, "labels": tokens}


def padded_continued_text(n: int) -> Inputs:
    tokens, mask = text(n), padding(n)
    return {"input_ids": tokens, "attention_mask": mask, "labels": tokens.masked_fill(mask == 0, -100)}


def some_padded_continued_text(n: int) -> Inputs:
    inputs = some_padded_text(n)
    return {**inputs, "labels": inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)}


def images(n: int) -> Inputs:
    return {"pixel_values": torch.randn(n, 3, 8, 8), "labels": torch.arange(n) % 2}


ENCODER = {
    "vocab_size": VOCABULARY,
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 16,
}


def bert(attention: str) -> nn.Module:
    return transformers.BertForSequenceClassification(
        transformers.BertConfig(**ENCODER, attn_implementation=attention)
    )


def distilbert(attention: str) -> nn.Module:
    config = transformers.DistilBertConfig(
        vocab_size=VOCABULARY, dim=8, n_layers=2, n_heads=2, hidden_dim=16, attn_implementation=attention
    )
    return transformers.DistilBertForSequenceClassification(config)


def roberta(attention: str) -> nn.Module:
    config = transformers.RobertaConfig(
        **ENCODER, max_position_embeddings=TIMES + 4, attn_implementation=attention
    )
    return transformers.RobertaForSequenceClassification(config)


def gpt2(attention: str) -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_embd=8, n_layer=2, n_head=2, n_positions=TIMES, attn_implementation=attention
    )
    return transformers.GPT2LMHeadModel(config)


def llama(attention: str) -> nn.Module:
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**ENCODER, num_key_value_heads=1, attn_implementation=attention)
    )


def t5(attention: str) -> nn.Module:
    config = transformers.T5Config(
        vocab_size=VOCABULARY,
        d_model=8,
        d_kv=4,
        d_ff=16,
        num_layers=2,
        num_heads=2,
        decoder_start_token_id=0,
        pad_token_id=0,
    )
    return transformers.T5ForConditionalGeneration(config)


def vit(attention: str) -> nn.Module:
    config = transformers.ViTConfig(
        hidden_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=16,
        image_size=8,
        patch_size=4,
        attn_implementation=attention,
    )
    return transformers.ViTForImageClassification(config)


WITHOUT_CACHE = (("use_cache", False),)

MODELS = (
    Pretrained("bert", bert, labelled_text),
    Pretrained("bert-padded", bert, padded_text),
    Pretrained("bert-some-padded", bert, some_padded_text),
    Pretrained("distilbert", distilbert, padded_text),
    Pretrained("roberta", roberta, labelled_text),
    Pretrained("gpt2", gpt2, continued_text),
    Pretrained("gpt2-padded", gpt2, padded_continued_text, WITHOUT_CACHE),
    Pretrained("llama", llama, continued_text, WITHOUT_CACHE),
    Pretrained("llama-padded", llama, padded_continued_text, WITHOUT_CACHE),
    Pretrained("llama-some-padded", llama, some_padded_continued_text, WITHOUT_CACHE),
    Pretrained("t5", t5, continued_text, WITHOUT_CACHE, ("eager",)),
    Pretrained("t5-padded", t5, padded_continued_text, WITHOUT_CACHE, ("eager",)),
    Pretrained("vit", vit, images),
)

each_model = pytest.mark.parametrize(
    ("pretrained", "attention"),
    [
        pytest.param(model, attention, id=f"{model.name}-{attention}")
        for model in MODELS
        for attention in model.implementations
    ],
)


def build(pretrained: Pretrained, attention: str, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return pretrained.build(attention).eval().to(dtype)


def batch(pretrained: Pretrained, n: int, dtype: torch.dtype) -> Inputs:
    torch.manual_seed(1)
    return {
        name: value.to(dtype) if value.is_floating_point() else value
        for name, value in pretrained.draw(n).items()
    }


def loss_of(model: nn.Module, shared: dict[str, Any]) -> Callable[[Gradients, Inputs], Tensor]:
    def loss(params: Gradients, inputs: Inputs) -> Tensor:
        return functional_call(
            model, params, (), {**{name: value[None] for name, value in inputs.items()}, **shared}
        ).loss

    return loss


def deferred(model: nn.Module, shared: dict[str, Any], inputs: Inputs) -> PerSampleGradients:
    params = {name: value.detach() for name, value in model.named_parameters()}
    return per_sample_gradients(loss_of(model, shared), params, inputs)


def one_by_one(model: nn.Module, shared: dict[str, Any], inputs: Inputs) -> Gradients:
    params = dict(model.named_parameters())
    result = []
    for sample in range(len(next(iter(inputs.values())))):
        loss = model(**{name: value[[sample]] for name, value in inputs.items()}, **shared).loss
        result.append(torch.autograd.grad(loss, list(params.values()), materialize_grads=True))
    return {name: torch.stack(column) for name, column in zip(params, zip(*result, strict=True), strict=True)}


@pytest.mark.every(2)  # each model in float64, and in the sweep in float32
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@each_model
def test_hugging_face_gradients_equal_the_loop(
    pretrained: Pretrained, attention: str, dtype: torch.dtype
) -> None:
    model, shared = build(pretrained, attention, dtype), dict(pretrained.shared)
    inputs = batch(pretrained, 4, dtype)
    exact = {name: value.double() if value.is_floating_point() else value for name, value in inputs.items()}
    expected = one_by_one(copy.deepcopy(model).double(), shared, exact)
    whole = flat(expected).norm(dim=1)

    result = deferred(model, shared, inputs)
    assert_vectors_close("deferred", result.materialise(), expected, whole, TOLERANCES[dtype])
    params = {name: value.detach() for name, value in model.named_parameters()}
    mapped = vmap(grad(loss_of(model, shared)), in_dims=(None, 0))(params, inputs)
    assert_vectors_close("vmap(grad)", mapped, expected, whole, TOLERANCES[dtype])
    for name, square in result.square_norms(per="parameter").items():
        norm = rows(expected[name]).norm(dim=1)
        assert_close(
            f"norm of {name}",
            square.sqrt(),
            norm,
            torch.maximum(norm, SMALLEST_SHARE * whole),
            TOLERANCES[dtype],
        )


@each_model
def test_hugging_face_kernel_count_independent_of_samples(pretrained: Pretrained, attention: str) -> None:
    model, shared = build(pretrained, attention, torch.float32), dict(pretrained.shared)
    calls = []
    for n in (2, 5):
        inputs = batch(pretrained, n, torch.float32)
        with KernelCalls() as kernels:
            deferred(model, shared, inputs).materialise()
        calls.append(kernels.calls)
    assert calls[0] == calls[1]
