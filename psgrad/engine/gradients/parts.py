"""Parts of a set of samples: those that were computed together. Samples whose lengths or whose branches of
the loss differ are in different parts, so that no factor is padded to the positions of another part.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from psgrad.engine.gradients.deferred import DeferredGradient
from psgrad.engine.transforms.private_torch import tree_map
from psgrad.ragged import padded_and_joined


@dataclass(frozen=True)
class Part:
    """The gradients of samples that were computed together.

    Attributes:
        places: [k] int64, the samples' indices among those of all parts.
        gradients: name -> deferred gradient of the k samples.
    """

    places: torch.Tensor
    gradients: dict[str, DeferredGradient]

    def __len__(self) -> int:
        return len(self.places)

    @property
    def device(self) -> torch.device:
        return self.places.device

    def materialise(self, name: str) -> torch.Tensor:
        """[k, *shape], zeros where the loss does not depend on the parameter."""
        gradient = self.gradients[name]
        return gradient.new_zeros(len(self)) if gradient.is_zero else gradient.materialise()


def in_short(words: Iterable[str]) -> str:
    """The different words, each once, separated by bars."""
    return " | ".join(dict.fromkeys(words))


def of_samples(found: Any, samples: slice | torch.Tensor) -> Any:
    """Results (a pytree of tensors, sample axis in front) of some of the samples: a slice of n, or their
    indices [k].
    """
    return tree_map(lambda x: x[samples] if isinstance(x, torch.Tensor) else x, found)


def in_order(found: Sequence[Any], places: Sequence[torch.Tensor]) -> Any:
    """The results of all parts (pytrees of tensors, sample axis in front), joined in the samples' order.
    places: [k] of each part. Tensors whose other axes differ in length are padded: floating-point ones with
    NaN, others with zeros.

    A result may have several entries for each sample, which are neighbours.
    """
    order = torch.cat(list(places)).argsort()

    def joined(*items: Any) -> Any:
        if not isinstance(items[0], torch.Tensor):
            return items[0]
        whole = padded_and_joined(items, float("nan") if items[0].is_floating_point() else 0)
        each = len(whole) // max(len(order), 1)
        if each == 1:
            return whole.index_select(0, order.to(whole.device))
        return whole.unflatten(0, (-1, each)).index_select(0, order.to(whole.device)).flatten(0, 1)

    return tree_map(joined, *found)
