"""An epsilon, or the reason why there is none."""

from __future__ import annotations

from dataclasses import dataclass

from psgrad.errors import ConfigError


@dataclass(frozen=True)
class Epsilon:
    """What an accountant says. An upper bound on the true epsilon, always.

    Attributes:
        value: epsilon, at least 0; infinite where a step had no noise. None where this accountant does not cover the steps.
        why_not: the reason for None.
        order: of the moments that gave it (RDP).
        interval: between the losses that the distribution was rounded to (PLD).
        note: what makes the value larger than it need be, where something does.
    """

    value: float | None
    why_not: str | None = None
    order: float | None = None
    interval: float | None = None
    note: str | None = None


def assert_delta(delta: float) -> None:
    """Raises ConfigError for a delta that is not between 0 and 1."""
    if isinstance(delta, bool) or not isinstance(delta, int | float) or not 0 < delta < 1:
        raise ConfigError(
            f"delta is {delta!r}",
            expected="a number above 0 and below 1; below one over the number of records, to promise anything",
        )
