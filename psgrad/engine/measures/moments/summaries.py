"""What is kept of a sample's output at one checkpoint: how sure the model was of the label, and whether it was right."""

from __future__ import annotations

import math
from typing import Any

import torch

from psgrad.engine.gradients.terms import accumulating
from psgrad.engine.measures.measure import Arrays
from psgrad.engine.objective import Summary


def moment_summary(kind: str, ignore_index: int = -100) -> Summary:
    """The summary for a kind of loss; what the loss does not have is left out.

    confidence: the probability of the label, 0 to 1. right: 1 where the most likely class is the label, else 0. el2n: the distance
    |softmax(z) - onehot(y)| of the probabilities. All three are means over the positions where a sample has several, those that do not
    count left out; NaN where none counts, or the output is not finite. prediction: the most likely class, the probability (binary) or
    the value, for outputs of one number or one vector of classes.
    """

    def summary(output: Any, target: Any) -> Arrays:
        if not isinstance(output, torch.Tensor):
            return {}
        output = accumulating(output.detach())
        if kind == "class" and output.dim() and isinstance(target, torch.Tensor) and output.shape[1:] == target.shape:
            return _of_classes(output.movedim(0, -1), target, ignore_index)
        if kind == "token" and isinstance(target, torch.Tensor) and output.shape[:-1] == target.shape:
            return _of_classes(output, target, ignore_index)
        if kind == "binary" and output.numel() == 1 and isinstance(target, torch.Tensor):
            return _of_one_probability(output.reshape(()), target.reshape(()))
        return {"prediction": output.reshape(())} if kind == "value" and output.numel() == 1 else {}

    return summary


def _of_classes(output: torch.Tensor, target: torch.Tensor, ignore_index: int) -> Arrays:
    """output: [*positions, c] logits or log-probabilities. target: [*positions], whole numbers."""
    if target.is_floating_point():
        return {}
    probabilities = torch.softmax(output, -1)
    counted = target != ignore_index
    label = torch.where(counted, target, 0).long()
    kind = probabilities.dtype
    of_label = probabilities.gather(-1, label.unsqueeze(-1)).squeeze(-1)
    finite = torch.isfinite(probabilities).all(-1)
    right = torch.where(finite, (probabilities.argmax(-1) == label).to(kind), math.nan)
    # Not F.one_hot, which looks at the values: a pass with it could not be recorded or foreseen.
    onehot = torch.arange(output.shape[-1], device=output.device) == label.unsqueeze(-1)
    distance = torch.linalg.vector_norm(probabilities - onehot.to(kind), dim=-1)
    found = {name: _mean(x, counted) for name, x in (("confidence", of_label), ("right", right), ("el2n", distance))}
    if not target.dim():
        found["prediction"] = torch.where(finite, probabilities.argmax(-1).to(kind), math.nan)
    return found


def _mean(values: torch.Tensor, counted: torch.Tensor) -> torch.Tensor:
    """(): of values [*positions], over those that count; NaN where none does."""
    return torch.where(counted, values, 0).sum() / counted.sum()


def _of_one_probability(output: torch.Tensor, target: torch.Tensor) -> Arrays:
    probability, target = torch.sigmoid(output), target.to(output.dtype)
    right = torch.where(torch.isfinite(output), ((output > 0) == (target > 0.5)).to(output.dtype), math.nan)
    return {"confidence": probability * target + (1 - probability) * (1 - target), "right": right, "prediction": probability}
