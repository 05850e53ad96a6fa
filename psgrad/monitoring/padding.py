"""Padding of batches of texts to few lengths, so that their rows go the same way through a model, and one
program serves many batches.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

_STEP = 16
# What stands at positions that do not count, by the names that models of transformers have for their inputs.
_FILL = {"input_ids": 0, "attention_mask": 0, "token_type_ids": 0, "labels": -100}


def padded(batch: Any, model: nn.Module) -> Any:
    """A batch whose texts have at least one position without attention each, and a multiple of 16 positions.

    A model may ask whether a text has padding at all: rows with and without would then be computed one after
    the other. Batches without padding, of other inputs, or as long as the model allows stay as they are.
    """
    mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    if not isinstance(mask, torch.Tensor) or mask.dim() != 2 or bool(mask.all()):
        return batch
    length = mask.shape[1]
    new = (length // _STEP + 1) * _STEP
    most = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    texts = {name: x for name, x in batch.items() if getattr(x, "shape", None) == mask.shape}
    if not texts.keys() <= _FILL.keys() or (most is not None and new > most):
        return batch
    at_the_left = not bool(mask[:, 0].all())
    added = (new - length, 0) if at_the_left else (0, new - length)
    return {**batch, **{name: F.pad(x, added, value=_FILL[name]) for name, x in texts.items()}}
