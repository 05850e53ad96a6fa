"""Checks of the numbers of a private run before its first step: delta, expected batch size, the noise's tail.

They read the size of the private data, and can only stop a run that has released nothing yet. Their messages
are for the owner of the data.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from psgrad.engine.privacy.box_muller import REACH
from psgrad.engine.privacy.sampling import Sampling
from psgrad.errors import ConfigError

# The share of delta for the end of the noise's tail.
_SHARE_OF_DELTA = 1e-3
# How far the divisor may be from the expected batch size; more is a mistake in the config.
_FACTOR = 2.0


def require_small_delta(delta: float, records: int, key: str = "privacy.delta") -> None:
    """Raises ConfigError unless delta is below one over the number of records. key: which delta it is."""
    if delta * records < 1:
        return
    raise ConfigError(
        f"{key} is {delta:g}, and the dataset has {records} records; expected less than 1 / {records} ="
        f" {1 / records:.3g}",
        hint=(
            "with such a delta a record could be published as it is; set"
            f" {key} well below that, such as {_power_of_ten_below(0.1 / records)}"
        ),
    )


def require_expected_batch_size(expected_batch_size: float, sampling: Sampling, records: int) -> None:
    """Raises ConfigError if the divisor is off from the expected size of batches by more than a factor of 2.

    Any public divisor is private; one that is far off is a mistake, which scales every update.
    """
    if sampling.batch_size is not None:
        size, how = float(sampling.batch_size), f"batch_size {sampling.batch_size}"
    else:
        assert sampling.sample_rate is not None
        size, how = (
            sampling.sample_rate * records,
            f"sample_rate {sampling.sample_rate:g} of {records} records",
        )
    if size / _FACTOR <= expected_batch_size <= size * _FACTOR:
        return
    raise ConfigError(
        f"privacy.expected_batch_size is {expected_batch_size:g}, and batches will have about {size:.3g}"
        f" records ({how}); expected a number near that: it divides the noisy sum of every batch",
        hint=(f"set privacy.expected_batch_size: {max(1, round(size))}, or correct the sampling"),
    )


def require_tail(steps: Iterable[tuple[float, int]], delta: float) -> None:
    """Raises ConfigError if noise that ends at REACH standard deviations is not close enough to the Gaussian
    that is accounted.

    Args:
        steps: (noise multiplier z, how many steps have it). A record moves a sum by at most 1 / z deviations.
            If it moves one number by that distance, values in the last 1 / z deviations before the end reveal
            it, with the probability of a normal number beyond REACH - 1 / z. A thousandth of delta is allowed
            for that.
    """
    steps = [(multiplier, count) for multiplier, count in steps if multiplier > 0]
    if (
        math.fsum(
            count * math.erfc((REACH - 1 / multiplier) / math.sqrt(2)) / 2 for multiplier, count in steps
        )
        <= _SHARE_OF_DELTA * delta
    ):
        return
    least = min(multiplier for multiplier, _ in steps)
    raise ConfigError(
        f"the noise multiplier is {least:g}: a record may move the sum by {1 / least:.3g} standard"
        f" deviations of the noise; expected noise whose tail is as accounted at delta {delta:g}; the"
        f" noise ends at {REACH:.3g} deviations",
        hint="set a larger privacy.noise.multiplier",
    )


def _power_of_ten_below(value: float) -> str:
    exponent = -1
    while 10.0**exponent > value:
        exponent -= 1
    return f"1e{exponent}"
