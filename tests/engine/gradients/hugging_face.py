"""Hugging Face models with random weights, from small configs, and rows of unequal length for their tasks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

transformers = pytest.importorskip("transformers", reason="the extra hugging-face is not installed")

VOCABULARY = 40
LENGTHS = (3, 12, 7, 5)
WINDOW = 16  # of sliding attention: no shorter than the rows
PADDING = {"attention_mask": 0, "labels": -100}  # input_ids: the model's pad token

Row = dict[str, Tensor]

WIDTHS = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
ENCODER = {"vocab_size": VOCABULARY, **WIDTHS}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
DECODER = {**ENCODER, **TOKENS, "num_key_value_heads": 1}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
SEQ2SEQ = {
    "vocab_size": VOCABULARY,
    "d_model": 16,
    **{f"{side}_layers": 2 for side in ("encoder", "decoder")},
    **{f"{side}_attention_heads": 2 for side in ("encoder", "decoder")},
    **{f"{side}_ffn_dim": 24 for side in ("encoder", "decoder")},
    "max_position_embeddings": 32,
}


# -- rows of each task, of the lengths LENGTHS ---------------------------------------------------------------


def text(length: int) -> Tensor:
    return torch.randint(3, VOCABULARY, (length,))


def tokens(length: int) -> Row:
    return {"input_ids": text(length), "attention_mask": torch.ones(length, dtype=torch.long)}


def classified() -> list[Row]:
    return [{**tokens(length), "labels": torch.tensor(i % 2)} for i, length in enumerate(LENGTHS)]


def regressed() -> list[Row]:
    return [{**tokens(length), "labels": torch.randn(1)} for length in LENGTHS]


def tagged() -> list[Row]:
    """The first token of each row has no label, as a special token has none."""
    rows = [{**tokens(length), "labels": torch.randint(3, (length,))} for length in LENGTHS]
    for row in rows:
        row["labels"][0] = -100
    return rows


def masked() -> list[Row]:
    """Every third token is to be found, in the place of which another one stands."""
    rows = []
    for length in LENGTHS:
        row = tokens(length)
        hidden = torch.arange(length) % 3 == 1
        row["labels"] = row["input_ids"].masked_fill(~hidden, -100)
        row["input_ids"] = row["input_ids"].masked_fill(hidden, 2)
        rows.append(row)
    return rows


def continued() -> list[Row]:
    """The loss is that of what comes behind a prompt of one or two tokens."""
    rows = []
    for i, length in enumerate(LENGTHS):
        row = tokens(length)
        row["labels"] = row["input_ids"].masked_fill(torch.arange(length) < 1 + i % 2, -100)
        rows.append(row)
    return rows


def translated() -> list[Row]:
    return [
        {**tokens(length), "labels": text(other)} for length, other in zip(LENGTHS, (4, 2, 9, 5), strict=True)
    ]


def answered() -> list[Row]:
    return [
        {**tokens(length), "start_positions": torch.tensor(1), "end_positions": torch.tensor(length - 1)}
        for length in LENGTHS
    ]


def chosen() -> list[Row]:
    """Three choices a row; those of one row are padded to the longest of them."""
    rows = []
    for i, length in enumerate(LENGTHS):
        choices = [tokens(length), tokens(length - 1), tokens(length - 2)]
        rows.append({**padded(choices, 0), "labels": torch.tensor(i % 3)})
    return rows


def pictured(size: int = 32) -> list[Row]:
    return [{"pixel_values": torch.randn(3, size, size), "labels": torch.tensor(i % 2)} for i in range(4)]


def padded(rows: list[Row], pad_token: int) -> Row:
    """The rows as one batch, each padded behind its end to the longest, as tokenizers do; labels with
    -100.
    """

    def column(name: str) -> Tensor:
        values = [row[name] for row in rows]
        longest = max(value.shape[-1] if value.dim() else 0 for value in values)
        filling = PADDING.get(name, pad_token)
        return torch.stack(
            [
                F.pad(value, (0, longest - value.shape[-1]), value=filling) if value.dim() else value
                for value in values
            ]
        )

    return {name: column(name) for name in rows[0]}


# -- models --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A model type as the library names it, its config, and rows for it."""

    architecture: str
    task: str
    config: dict[str, Any]
    draw: Callable[[], list[Row]]
    pad_token: int = 0
    shared: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.architecture}-{self.task}"

    def build(self, dtype: torch.dtype) -> nn.Module:
        """In eval mode, with random weights in all parameters, biases and norms, too."""
        torch.manual_seed(0)
        config = transformers.AutoConfig.for_model(self.architecture, architectures=[], **self.config)
        model = getattr(transformers, f"AutoModelFor{AUTO[self.task]}").from_config(config).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
        return model.to(dtype)

    def rows(self, dtype: torch.dtype) -> list[Row]:
        torch.manual_seed(1)
        return [
            {name: value.to(dtype) if value.is_floating_point() else value for name, value in row.items()}
            for row in self.draw()
        ]


def decoder(architecture: str, **config: Any) -> Case:
    return Case(architecture, "causal-lm", {**DECODER, **config}, continued)


BERT_POSITIONS = {"pad_token_id": 1, "max_position_embeddings": 32}  # as RoBERTa counts them
BART = {**SEQ2SEQ, "bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2}
DISTILBERT = {"vocab_size": VOCABULARY, "dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 24}
DEBERTA = {
    **ENCODER,
    "relative_attention": True,
    "pos_att_type": ["p2c", "c2p"],
    "position_buckets": 4,
    "max_position_embeddings": 32,
    "norm_rel_ebd": "layer_norm",
    "share_att_key": True,
    "position_biased_input": False,
    "conv_kernel_size": 3,
    "conv_act": "gelu",
}
GPT2 = {"vocab_size": VOCABULARY, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32, **TOKENS}
MAMBA = {"vocab_size": VOCABULARY, "hidden_size": 16, "state_size": 4, "num_hidden_layers": 2, **TOKENS}
T5 = {
    "vocab_size": VOCABULARY,
    "d_model": 16,
    "d_kv": 8,
    "d_ff": 24,
    "num_layers": 2,
    "num_heads": 2,
    "decoder_start_token_id": 0,
    "pad_token_id": 0,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 8,
}
PATCHES = {**WIDTHS, "image_size": 32, "patch_size": 8}
CLASSIFY, TAG, MASKED = "sequence-classification", "token-classification", "masked-lm"
IMAGE, SEQ_TO_SEQ = "image-classification", "seq2seq-lm"
AUTO = {
    CLASSIFY: "SequenceClassification",
    "regression": "SequenceClassification",
    TAG: "TokenClassification",
    MASKED: "MaskedLM",
    "causal-lm": "CausalLM",
    SEQ_TO_SEQ: "Seq2SeqLM",
    IMAGE: "ImageClassification",
    "multiple-choice": "MultipleChoice",
    "question-answering": "QuestionAnswering",
}

CASES = (
    Case("bert", CLASSIFY, ENCODER, classified),
    Case("distilbert", CLASSIFY, DISTILBERT, classified),
    Case("roberta", CLASSIFY, {**ENCODER, **BERT_POSITIONS}, classified, 1),
    Case("deberta-v2", CLASSIFY, DEBERTA, classified),
    Case("electra", CLASSIFY, {**ENCODER, "embedding_size": 8}, classified),
    Case("gpt2", CLASSIFY, GPT2, classified),
    Case("bert", "regression", {**ENCODER, "num_labels": 1, "problem_type": "regression"}, regressed),
    Case("bert", TAG, {**ENCODER, "num_labels": 3}, tagged),
    Case("xlm-roberta", TAG, {**ENCODER, **BERT_POSITIONS, "num_labels": 3}, tagged, 1),
    Case("bert", MASKED, ENCODER, masked),
    Case("albert", MASKED, {**ENCODER, "embedding_size": 8}, masked),
    Case(
        "modernbert",
        MASKED,
        {
            **ENCODER,
            **TOKENS,
            "cls_token_id": 1,
            "sep_token_id": 2,
            "local_attention": 4,
            "global_attn_every_n_layers": 2,
        },
        masked,
    ),
    Case("gpt2", "causal-lm", GPT2, continued),
    decoder("llama"),
    decoder("qwen2"),
    decoder("qwen3", head_dim=8),
    decoder("mistral", sliding_window=4),
    decoder("gemma2", head_dim=8, sliding_window=WINDOW, query_pre_attn_scalar=8),
    decoder(
        "gemma3_text",
        head_dim=8,
        sliding_window=4,
        query_pre_attn_scalar=8,
        layer_types=["sliding_attention", "full_attention"],
    ),
    decoder("phi3"),
    Case("gpt_neox", "causal-lm", {**ENCODER, **TOKENS}, continued),
    Case("mamba", "causal-lm", MAMBA, continued, shared={"use_cache": False}),
    decoder("olmo2"),
    Case("t5", SEQ_TO_SEQ, T5, translated),
    Case("bart", SEQ_TO_SEQ, BART, translated, 1),
    Case("vit", IMAGE, PATCHES, pictured),
    Case("convnext", IMAGE, {"hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1]}, pictured),
    Case(
        "resnet",
        IMAGE,
        {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"},
        pictured,
    ),
    Case(
        "swin",
        IMAGE,
        {
            "image_size": 32,
            "patch_size": 4,
            "embed_dim": 8,
            "depths": [2, 2],
            "num_heads": [1, 2],
            "window_size": 4,
        },
        pictured,
    ),
    Case("bert", "multiple-choice", ENCODER, chosen),
)

# Layers of experts: `grouped_mm` by default, which PyTorch's own kernel does not take in float64.
MIXTURES = (
    decoder("mixtral", num_local_experts=4, num_experts_per_tok=2),
    decoder("qwen3_moe", head_dim=8, moe_intermediate_size=16, **EXPERTS),
    decoder("olmoe", **EXPERTS),
    decoder("gpt_oss", head_dim=8, num_local_experts=4, num_experts_per_tok=2, sliding_window=WINDOW),
)

# Beyond the usual ones.
MORE = (
    *map(decoder, ("gemma", "starcoder2", "granite", "stablelm", "smollm3", "cohere", "glm4")),
    Case(
        "falcon",
        "causal-lm",
        {"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2},
        continued,
    ),
    Case("mpnet", CLASSIFY, {**ENCODER, **BERT_POSITIONS}, classified, 1),
    Case(
        "deberta",
        CLASSIFY,
        {**ENCODER, "relative_attention": True, "pos_att_type": ["p2c"], "max_position_embeddings": 32},
        classified,
    ),
    Case("longformer", CLASSIFY, {**ENCODER, **BERT_POSITIONS, "attention_window": 4}, classified, 1),
    Case("deit", IMAGE, PATCHES, pictured),
)

# What padding behind the end changes in the library itself.
XLNET = {"vocab_size": VOCABULARY, "d_model": 16, "n_layer": 2, "n_head": 2, "d_inner": 24}
CHANGED_BY_PADDING = (
    Case("bert", "question-answering", ENCODER, answered),
    Case("xlnet", CLASSIFY, XLNET, classified),
    Case(
        "fnet",
        CLASSIFY,
        {"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2, "intermediate_size": 24},
        lambda: [
            {name: value for name, value in row.items() if name != "attention_mask"} for row in classified()
        ],
    ),
    # Padded positions that see no key at all: their mean is taken over nothing.
    decoder("gemma2", head_dim=8, sliding_window=4, query_pre_attn_scalar=8),
)
