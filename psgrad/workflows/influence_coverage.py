"""Which parameters of a model scores are about, by the parts of a language model: attention, MLP, experts,
adapters, embedding, head.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import nn

OTHER = "other layers"
# The first part whose pattern a component of a parameter's name has. Names of an expert are also those of an
# MLP, and an adapter stands inside the layer that it adapts.
_PARTS = (
    ("adapters", r"lora_.*|.*adapter.*|ia3_.*|prompt_encoder|prefix_encoder"),
    ("experts", r"experts?|moe|.*_moe|shared_expert.*|router|gate"),
    ("norms", r".*norm(_.*|\d*)|ln_.*|ln\d*"),
    ("attention", r".*attn|.*attention|.*_attn_.*"),
    ("head", r"lm_head|embed_out|score|.*classifier|cls|qa_outputs|head|output_projection|pooler"),
    ("embedding", r"wte|wpe|emb|embed.*|.*embeddings?|shared"),
    ("MLP", r"mlp|ffn?|feed_?forward|intermediate|fc\d+|.*_mlp|mlp_.*|dense.*dense"),
)


def part_of(name: str) -> str:
    """The part that a parameter belongs to, by its name."""
    components = [each.lower() for each in name.split(".")]
    for part, pattern in _PARTS:
        if any(re.fullmatch(pattern, each) for each in components):
            return part
    # the second half of the MLP of BERT is called output, beside the intermediate one
    return "MLP" if "output" in components else OTHER


def coverage(
    model: nn.Module, covered: Collection[str], facts: Sequence[Mapping[str, Any]] = ()
) -> list[dict[str, Any]]:
    """A row for each part: `part`, how many numbers its parameters have, how many of these are `covered`, and
    the names of those that are `left_out`; the largest part first.

    covered: the names of the parameters that scores are about. facts: of the method at each checkpoint; where
    it has blocks, `blocks` says of what kinds those of the part are, and how many.
    """
    rows: dict[str, dict[str, Any]] = {}
    for name, parameter in model.named_parameters():
        row = rows.setdefault(
            part_of(name),
            {"part": part_of(name), "parameters": 0, "covered": 0, "left_out": [], "blocks": {}},
        )
        row["parameters"] += parameter.numel()
        if name in covered:
            row["covered"] += parameter.numel()
        else:
            row["left_out"].append(name)
    for label, kind in (facts[0].get("blocks") or {}).items() if facts else ():
        counted = rows[part_of(re.split(r"[ \[]", label)[0])]["blocks"]
        name = _kind(kind)
        counted[name] = counted.get(name, 0) + 1
    return sorted(rows.values(), key=lambda row: -row["parameters"])


def _kind(description: str) -> str:
    """The kind of a block without its sizes."""
    return re.split(r",? \d", description)[0]
