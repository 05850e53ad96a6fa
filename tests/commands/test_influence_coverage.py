"""Which parameters influence scores are about, by the parts of a model."""

from __future__ import annotations

import pytest
from torch import nn

from psgrad.commands.influence_tables import OTHER, coverage, part_of
from psgrad.reports.influence_page import coverage_words


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("model.embed_tokens.weight", "embedding"),
        ("transformer.wpe.weight", "embedding"),
        ("shared.weight", "embedding"),
        ("vit.embeddings.cls_token", "embedding"),
        ("model.layers.0.self_attn.q_proj.weight", "attention"),
        ("bert.encoder.layer.0.attention.output.dense.weight", "attention"),
        ("transformer.h.0.attn.c_attn.bias", "attention"),
        ("encoder.block.0.layer.1.EncDecAttention.q.weight", "attention"),
        ("model.layers.0.mlp.gate_proj.weight", "MLP"),
        ("bert.encoder.layer.0.output.dense.weight", "MLP"),
        ("encoder.block.0.layer.1.DenseReluDense.wi.weight", "MLP"),
        ("model.decoder.layers.0.fc1.weight", "MLP"),
        ("model.layers.0.mlp.experts.down_proj", "experts"),
        ("model.layers.0.mlp.gate.weight", "experts"),
        ("model.layers.0.mlp.shared_expert_gate.weight", "experts"),
        ("base.layers.0.self_attn.q_proj.lora_A.default.weight", "adapters"),
        ("model.layers.0.post_attention_layernorm.weight", "norms"),
        ("bert.encoder.layer.0.attention.output.LayerNorm.bias", "norms"),
        ("vit.layers.0.layernorm_before.weight", "norms"),
        ("lm_head.weight", "head"),
        ("classifier.bias", "head"),
        ("3.weight", OTHER),
    ],
)
def test_influence_coverage_part_of_parameter(name: str, part: str) -> None:
    assert part_of(name) == part


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mlp, self.head = nn.Embedding(5, 4), nn.Linear(4, 4), nn.Linear(4, 5, bias=False)


def test_influence_coverage_counts_numbers_and_blocks() -> None:
    model = Small()
    blocks = {"mlp.weight + mlp.bias": "Kronecker factors 4 x 5", "head.weight[0:5]": "exact, 20 x 20"}
    found = coverage(model, {"mlp.weight", "mlp.bias", "head.weight"}, [{"blocks": blocks}])
    assert {row["part"]: (row["parameters"], row["covered"], row["left_out"]) for row in found} == {
        "embedding": (20, 0, ["embed.weight"]),
        "MLP": (20, 20, []),
        "head": (20, 20, []),
    }
    assert [row["blocks"] for row in found] == [{}, {"Kronecker factors": 1}, {"exact": 1}]
    assert coverage_words(found) == (
        "Scores are about 40 of 60 parameters (66.7%). Left out, as frozen or not named by"
        " influence.parameters: embed.weight."
    )
    whole = coverage(model, {name for name, _ in model.named_parameters()})
    assert coverage_words(whole) == "Scores are about all 60 parameters."
