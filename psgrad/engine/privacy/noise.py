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
                f"the noise multiplier is {self.multiplier}",
                expected=(
                    "a finite number, at least 0: the noise's standard deviation as a multiple of the"
                    " sensitivity"
                ),
                next_step="leave the multiplier out and give a target_epsilon, from which it is computed",
            )

    def standard_deviation(self, sensitivity: float) -> float:
        """The standard deviation of each coordinate of the noise on the sum."""
        return self.multiplier * sensitivity

    def add(
        self, sums: Mapping[str, Tensor], clipping: Clipping, relation: Relation, generator: Generator
    ) -> dict[str, Tensor]:
        """name -> [*shape]: sum plus noise, drawn for each coordinate by itself; the sums are not changed.

        One draw for all tensors of a type: in a network of many small tensors, calls take longer than
        numbers.

        Args:
            sums: float32 or float64. All tensors that are released have to be among them, and whatever was
                summed into them was clipped by `clipping`. Zeros where the batch is empty.

        Returns:
            Tensors like the sums, multiples of `grid_of` the standard deviation.

        Raises:
            ConfigError: the sums have another dtype.
        """
        kinds: dict[tuple[torch.dtype, torch.device], list[str]] = {}
        for name, value in sums.items():
            if value.dtype not in (torch.float32, torch.float64):
                raise ConfigError(
                    f"the sum of {name} is {value.dtype}",
                    expected="torch.float32 or torch.float64",
                    cause="a sum in half precision, or of integers",
                    next_step="sum in float32; what is released may be converted afterwards",
                )
            kinds.setdefault((value.dtype, value.device), []).append(name)
        if not self.multiplier:
            return {name: value.clone() for name, value in sums.items()}
        deviation = self.standard_deviation(clipping.sensitivity(relation))
        noisy_sums: dict[str, Tensor] = {}
        for names in kinds.values():
            flat = [sums[name].reshape(-1) for name in names]
            together = noisy(torch.cat(flat) if len(flat) > 1 else flat[0], deviation, generator)
            parts = together.split([part.numel() for part in flat])
            noisy_sums.update(
                (name, part.view(sums[name].shape)) for name, part in zip(names, parts, strict=True)
            )
        return {name: noisy_sums[name] for name in sums}
