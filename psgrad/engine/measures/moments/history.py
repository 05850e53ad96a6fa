"""What was asked of all samples at all checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

_PREFIX = "moments"


def column(name: str, first: int) -> str:
    """The column of one pass: what its checkpoints, of which this is the first, said."""
    return f"{_PREFIX}.{name}.{first}"


@dataclass(frozen=True)
class History:
    """names: of the T checkpoints, in the order of training. said: name -> [n, T]: `loss` and `grad_norm` always; `confidence`, `right`,
    `el2n` and `prediction` where the loss has them (see moment_summary)."""

    names: Sequence[str]
    said: Mapping[str, torch.Tensor]

    @classmethod
    def of(cls, names: Sequence[str], rows: Mapping[str, torch.Tensor]) -> History:
        """From the columns of all passes over the checkpoints."""
        parts: dict[str, dict[int, torch.Tensor]] = {}
        for key, values in rows.items():
            prefix, _, rest = key.partition(".")
            if prefix == _PREFIX:
                name, _, first = rest.rpartition(".")
                parts.setdefault(name, {})[int(first)] = values
        return cls(names, {name: torch.cat([found[first] for first in sorted(found)], 1) for name, found in parts.items()})

    def __getitem__(self, name: str) -> torch.Tensor:
        """[n, T] float64."""
        return self.said[name].double()

    def __contains__(self, name: str) -> bool:
        return name in self.said

    @property
    def finite(self) -> torch.Tensor:
        """[n, T] bool: where loss and gradient norm are finite."""
        return torch.isfinite(self.said["loss"]) & torch.isfinite(self.said["grad_norm"])

    def whole(self, name: str) -> torch.Tensor:
        """[n, T] float64: NaN throughout for a sample that is not finite at each checkpoint, as a mean over fewer would compare it with
        others at other moments of training."""
        values = self[name]
        return values.where((self.finite & torch.isfinite(values)).all(1, keepdim=True), torch.nan)

    def nonfinite(self) -> dict[str, int]:
        """checkpoint -> how many samples are not finite there, of those where some are."""
        counts = (~self.finite).sum(0).tolist()
        return {name: count for name, count in zip(self.names, counts, strict=True) if count}
