"""A few numbers of each row's inputs, by which a corrupted picture or text is told from others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

# Whole numbers with fewer values than this are masks, kinds or classes, and no words.
_FEWEST_WORDS = 16


class InputProperties:
    """The properties of the inputs of batches; rarity is counted over all batches so far."""

    def __init__(self) -> None:
        self._counts: dict[str, np.ndarray] = {}

    def of(self, batch: Any) -> dict[str, np.ndarray]:
        """name -> [k], of the rows: brightness, contrast and roughness (mean absolute difference of
        neighbours) of floating-point inputs with two axes or more, rarity (mean of -log frequency) of words.
        """
        named = dict(batch) if isinstance(batch, Mapping) else dict(enumerate(_sequence(batch)))
        mask = named.get("attention_mask")
        found: dict[str, np.ndarray] = {}
        for name, x in named.items():
            if not isinstance(x, torch.Tensor) or not x.numel() or name in ("labels", "attention_mask"):
                continue
            mark = "" if len(named) < 3 else f" ({name})"
            if x.is_floating_point() and x.dim() > 2:
                values = x.detach().double()
                found[f"brightness{mark}"] = values.flatten(1).mean(1).cpu().numpy()
                found[f"contrast{mark}"] = values.flatten(1).std(1).cpu().numpy()
                found[f"roughness{mark}"] = values.diff(dim=-1).abs().flatten(1).mean(1).cpu().numpy()
            elif not x.is_floating_point() and x.dtype != torch.bool and x.dim() == 2:
                words = x.detach().cpu().numpy()
                real = np.ones(words.shape, bool)
                if isinstance(mask, torch.Tensor) and mask.shape == x.shape:
                    real = mask.detach().cpu().numpy() > 0
                rarity = self._rarity(str(name), words, real)
                if rarity is not None:
                    found[f"rarity{mark}"] = rarity
        return found

    def _rarity(self, name: str, words: np.ndarray, real: np.ndarray) -> np.ndarray | None:
        """[k]: of each row's words, by the counts of all batches before; None while they have few values."""
        if words.min() < 0:
            return None
        counts = self._counts.get(name, np.zeros(0))
        size = max(len(counts), int(words.max()) + 1)
        counts = np.pad(counts, (0, size - len(counts)))
        surprise = -np.log((counts + 0.5) / (counts.sum() + 0.5 * size))[words]
        self._counts[name] = counts + np.bincount(words[real], minlength=size)
        if (counts > 0).sum() < _FEWEST_WORDS:
            return None
        rarity: np.ndarray = (surprise * real).sum(1) / np.maximum(real.sum(1), 1)
        return rarity


def _sequence(batch: Any) -> tuple[Any, ...]:
    return (batch,) if isinstance(batch, torch.Tensor) else tuple(batch)
