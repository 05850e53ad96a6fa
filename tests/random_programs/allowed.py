"""The refusals by name that a random program may meet. Any other fails."""

from __future__ import annotations

ALLOWED = (
    "BatchNorm in training mode",
    "GroupNorm of groups that have one value each",
    "writes in place into a tensor that has views",
    "writes in place into a view made by",
    "writes in place into one of several views",
    "writes in place into a traced tensor",
    "writes in place into a tensor without a sample axis",
    "writes in place into a tensor from outside",
    "writes in place into a tensor made outside the transformed function",
    "writes in place into a tensor that has one place in memory for several elements",
    "writes in place into memory that another argument reads as other elements",
    "can't turn a tensor of shape",
    "has no rule",
    "as_strided with size",
    "is not known",
    "samples take different branches",
    "refers to a single memory location",
    "refer to a single memory location",
)


def allowed(words: str) -> str:
    """Which of them a refusal is; empty for none."""
    return next((pattern for pattern in ALLOWED if pattern in words), "")
