"""How the noise of one step is shared out between its sum of gradients and the count that an adaptive bound follows."""

from __future__ import annotations

from psgrad.errors import ConfigError


def adaptive_multiplier(multiplier: float, count_multiplier: float) -> float:
    """The noise multiplier of the sum, where a count is released beside it and both together cost what `multiplier` says.

    Sum and count, each divided by its noise's standard deviation, are one Gaussian release whose sensitivity is the root of
    multiplier_of_sum^-2 + multiplier_of_count^-2; that is to be multiplier^-1 (Andrew et al., "Differentially Private Learning with
    Adaptive Clipping", arXiv 1905.03871, theorem 1).

    Args:
        multiplier: z, which is what is accounted.
        count_multiplier: sigma_b. The recentred count moves by 1/2, so that its multiplier is 2 * sigma_b: its noise must have the
            standard deviation 2 * sigma_b * (how far the recentred count moves under the relation).

    Raises ConfigError where the count alone costs as much as both may.
    """
    if multiplier == 0:
        return 0.0
    if not 0 < multiplier < 2 * count_multiplier:
        raise ConfigError(
            f"the noise multiplier is {multiplier!r}, and the count's is {count_multiplier!r}",
            expected="a count_noise_multiplier above half of the noise multiplier",
            cause="the count's noise is part of what the noise multiplier pays for, and leaves nothing to the sum",
            next_step=f"raise count_noise_multiplier, for example to {max(10.0, 5 * abs(multiplier)):g}",
        )
    return (multiplier**-2 - (2 * count_multiplier) ** -2) ** -0.5
