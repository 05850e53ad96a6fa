"""The noise of a private step: Gaussian, drawn in float64, and rounded with the sum to a public grid."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from psgrad.engine.privacy.clipping import Clipping
from psgrad.engine.privacy.generators import Generator
from psgrad.engine.privacy.records import Relation
from psgrad.engine.privacy.rounding import noisy
from psgrad.errors import ConfigError


@dataclass(frozen=True)
class Noise:
    """Noise on the sum of clipped gradients (not on their mean), of standard deviation multiplier *
    sensitivity in each coordinate.

    Args:
        multiplier: z; 0 adds nothing, and epsilon is infinite.

    Raises:
        ConfigError: the multiplier is negative or not finite.
    """

    multiplier: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.multiplier) and self.multiplier >= 0):
            raise ConfigError(
                f"the noise multiplier is {self.multiplier}; expected a finite number, at least 0: the"
                " noise's standard deviation as a multiple of the sensitivity",
                hint="leave the multiplier out and give a target_epsilon, from which it is computed",
            )

    def standard_deviation(self, sensitivity: float) -> float:
        """The standard deviation of each coordinate of the noise on the sum."""
        return self.multiplier * sensitivity

    def add(
        self, sums: Mapping[str, Tensor], clipping: Clipping, relation: Relation, generator: Generator
    ) -> dict[str, Tensor]:
        """name -> [*shape]: sum plus noise, drawn for each coordinate by itself; the sums are not changed.

        One draw for all tensors, on the CPU: in a network of many small tensors, calls take longer than
        numbers.

        Args:
            sums: float64. All tensors that are released have to be among them, and whatever was
                summed into them was clipped by `clipping`. Zeros where the batch is empty.

        Returns:
            Tensors like the sums, multiples of `grid_of` the standard deviation.

        Raises:
            ConfigError: a sum has another dtype.
        """
        for name, value in sums.items():
            if value.dtype != torch.float64:
                raise ConfigError(
                    f"the sum of {name} is {value.dtype}",
                    hint="sum in float64; what is released may be converted afterwards",
                )
        if not self.multiplier:
            return {name: value.clone() for name, value in sums.items()}
        deviation = self.standard_deviation(clipping.sensitivity(relation))
        flat = torch.cat([value.detach().cpu().reshape(-1) for value in sums.values()])
        parts = noisy(flat, deviation, generator).split([value.numel() for value in sums.values()])
        return {
            name: part.view(value.shape).to(value.device)
            for (name, value), part in zip(sums.items(), parts, strict=True)
        }
