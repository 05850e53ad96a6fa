"""The norms of per-sample gradients, by parameter, and their sums over parameters and modules."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from psgrad.engine.gradients.parts import in_order, in_short, of_samples

Per = Literal["total", "parameter", "module"]


@dataclass(frozen=True)
class SquareNorms:
    """The norms of per-sample gradients, without the gradients.

    Attributes:
        by_parameter: name -> [n] float64, the squared norms.
        losses, aux: as in PerSampleGradients.
        computed_as: name -> the order of contraction of its norms.
        absolute: name -> [n] float64, `bounded_sums.absolute_sum`, to which the rounding error of norms and
            sums is proportional; empty if not requested.
    """

    by_parameter: dict[str, torch.Tensor]
    losses: torch.Tensor
    aux: Any
    computed_as: dict[str, str]
    absolute: dict[str, torch.Tensor] = field(default_factory=dict)

    @classmethod
    def of_groups(cls, parts: list[SquareNorms], groups: list[torch.Tensor]) -> SquareNorms:
        """The norms of all samples, from those of groups of samples. groups: the places [k] of each group's
        samples.
        """
        if len(parts) == 1:
            return parts[0]
        norms, losses, aux, absolute = in_order(
            [(part.by_parameter, part.losses, part.aux, part.absolute) for part in parts], groups
        )
        orders = {name: in_short(part.computed_as[name] for part in parts) for name in parts[0].computed_as}
        return cls(norms, losses, aux, orders, absolute)

    def at(self, samples: slice | torch.Tensor) -> SquareNorms:
        """Of some of the samples: a slice of n, or their indices [k]."""
        found = self.by_parameter, self.losses, self.aux, self.absolute
        norms, losses, aux, absolute = of_samples(found, samples)
        return SquareNorms(norms, losses, aux, self.computed_as, absolute)

    def __len__(self) -> int:
        return int(self.losses.shape[0])

    def square_norms(self, per: Per = "total") -> Any:
        """As PerSampleGradients.square_norms."""
        return by_label(self.by_parameter, per)

    def describe(self) -> dict[str, str]:
        """name -> the order of contraction of its norms."""
        return self.computed_as

    @property
    def unfactored(self) -> list[str]:
        """As PerSampleGradients.unfactored."""
        return [name for name, order in self.computed_as.items() if "materialise after" in order]


def by_label(norms: dict[str, torch.Tensor], per: Per) -> Any:
    """Squared norms by parameter, added up by `per`."""
    if per == "parameter":
        return norms
    if per == "total":
        return torch.stack(list(norms.values())).sum(0)
    return {
        owner: torch.stack([norms[name] for name in names]).sum(0)
        for owner, names in labelled(list(norms), per).items()
    }


def labelled(names: list[str], per: Per) -> dict[str, list[str]]:
    """label -> parameters. The label is the parameter's name, or the name of its module."""
    if per not in ("parameter", "module"):
        raise ValueError(f"per={per!r}: expected 'total', 'parameter' or 'module'")
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(name if per == "parameter" else name.rpartition(".")[0], []).append(name)
    return groups
