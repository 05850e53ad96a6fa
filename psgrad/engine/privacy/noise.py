"""The noise of a private step, continuous or on a grid of integers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from psgrad.engine.privacy.clipping import Clipping
from psgrad.engine.privacy.discrete import LARGEST_SIGMA, SMALLEST_SIGMA, discrete_gaussian
from psgrad.engine.privacy.generators import Generator
from psgrad.engine.privacy.records import Relation
from psgrad.engine.privacy.rounding import noisy
from psgrad.errors import ConfigError

Mechanism = Literal["gaussian", "discrete_gaussian"]

# The standard deviation on the grid is rounded up by more than its few roundings can be off.
_UP = 1 + 2.0**-49


@dataclass(frozen=True)
class Noise:
    """Noise on the sum of clipped gradients (not on their mean), of standard deviation multiplier *
    sensitivity in each coordinate.

    Args:
        multiplier: z; 0 adds nothing, and epsilon is infinite.
        mechanism: 'gaussian' draws in float64, and rounds what is released to a public grid (`rounding.py`);
            'discrete_gaussian' draws integers on the grid that each clipped record is rounded to
            (Clipping.grid), and is exact.

    Raises:
        ConfigError: the multiplier is negative or not finite, or there is no such mechanism.
    """

    multiplier: float
    mechanism: Mechanism = "gaussian"

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
        if self.mechanism not in get_args(Mechanism):
            raise ConfigError(
                f"the noise mechanism is {self.mechanism!r}",
                expected=f"one of {', '.join(get_args(Mechanism))}",
            )

    def standard_deviation(self, sensitivity: float) -> float:
        """The standard deviation of each coordinate of the noise on the sum; for discrete noise sigma times
        the grid.
        """
        return self.multiplier * sensitivity

    def add(
        self, sums: Mapping[str, Tensor], clipping: Clipping, relation: Relation, generator: Generator
    ) -> dict[str, Tensor]:
        """name -> [*shape]: sum plus noise, drawn for each coordinate by itself; the sums are not changed.

        Args:
            sums: float32 or float64; for discrete noise int64, multiples of the grid. All tensors that are
                released have to be among them, and whatever was summed into them was clipped by `clipping`.
                Zeros where the batch is empty.

        Returns:
            Tensors like the sums, multiples of `grid_of` the standard deviation; for discrete noise float64,
            the noisy integers times the clipping's grid.

        Raises:
            ConfigError: the sums have another dtype, the clipping has no grid where one is needed or has one
                where none is, or the grid is so fine that 64-bit integers can't hold the noise.
        """
        deviation = self.standard_deviation(clipping.sensitivity(relation))
        self._check(sums, clipping, relation)
        if clipping.grid is None:
            return self._continuous(sums, deviation, generator)
        sigma = deviation / clipping.grid * _UP
        return {name: self._discrete(value, sigma, clipping.grid, generator) for name, value in sums.items()}

    def _continuous(
        self, sums: Mapping[str, Tensor], deviation: float, generator: Generator
    ) -> dict[str, Tensor]:
        """The noisy sums, by one draw for all tensors of a type: in a network of many small tensors, calls
        take longer than numbers.
        """
        if not self.multiplier:
            return {name: value.clone() for name, value in sums.items()}
        kinds: dict[tuple[torch.dtype, torch.device], list[str]] = {}
        for name, value in sums.items():
            kinds.setdefault((value.dtype, value.device), []).append(name)
        noisy_sums: dict[str, Tensor] = {}
        for names in kinds.values():
            flat = [sums[name].reshape(-1) for name in names]
            together = noisy(torch.cat(flat) if len(flat) > 1 else flat[0], deviation, generator)
            parts = together.split([part.numel() for part in flat])
            noisy_sums.update(
                (name, part.view(sums[name].shape)) for name, part in zip(names, parts, strict=True)
            )
        return {name: noisy_sums[name] for name in sums}

    def _discrete(self, value: Tensor, sigma: float, grid: float, generator: Generator) -> Tensor:
        if self.multiplier:
            drawn = torch.from_numpy(discrete_gaussian(value.numel(), sigma, generator))
            value = value + drawn.reshape(value.shape).to(value.device)
        return value.double().mul_(grid)

    def require_grid(self, clipping: Clipping, relation: Relation) -> None:
        """Raises ConfigError if the grid of a clipping is too fine or too coarse for this noise."""
        if clipping.grid is None or not self.multiplier:
            return
        deviation = self.standard_deviation(clipping.sensitivity(relation))
        if not SMALLEST_SIGMA <= deviation / clipping.grid * _UP <= LARGEST_SIGMA:
            raise ConfigError(
                f"the noise's standard deviation is {deviation:g}, and the grid {clipping.grid:g}",
                expected=(
                    f"a grid from {deviation / LARGEST_SIGMA:g} (sums and noise fit in 64 bits) to"
                    f" {deviation / SMALLEST_SIGMA:g}"
                ),
                cause="a noise multiplier that is far from 1, or a grid that was chosen for another",
                next_step="correct the noise multiplier, or set such a grid",
            )

    def _check(self, sums: Mapping[str, Tensor], clipping: Clipping, relation: Relation) -> None:
        """Whether mechanism, grid and dtypes fit together. Nothing here depends on the values of the sums."""
        discrete = self.mechanism == "discrete_gaussian"
        if discrete != (clipping.grid is not None):
            raise ConfigError(
                f"{self.mechanism} noise on sums"
                f" {'with no grid' if discrete else f'on a grid of {clipping.grid}'}",
                expected="discrete_gaussian with a grid, or gaussian without one",
                next_step=(
                    "give the clipping a grid (default_grid finds one)"
                    if discrete
                    else "take mechanism: discrete_gaussian"
                ),
            )
        wanted = (torch.int64,) if discrete else (torch.float32, torch.float64)
        cause = (
            "records that were not rounded to the grid before the sum"
            if discrete
            else "a sum in half precision, or of integers"
        )
        for name, value in sums.items():
            if value.dtype not in wanted:
                raise ConfigError(
                    f"the sum of {name} is {value.dtype}",
                    expected=" or ".join(map(str, wanted)) + f" for {self.mechanism} noise",
                    cause=cause,
                    next_step=(
                        None if discrete else "sum in float32; what is released may be converted afterwards"
                    ),
                )
        self.require_grid(clipping, relation)
