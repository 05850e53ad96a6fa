"""dp-accounting, imported where it is needed: that takes a second, and moments do without it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from psgrad.engine.privacy.accounting.events import StepEvent
from psgrad.errors import ConfigError


def dp_accounting() -> Any:
    """The module. Raises ConfigError where it is not installed."""
    try:
        import dp_accounting
    except ImportError as error:
        raise ConfigError(
            f"epsilon was asked for by privacy loss distributions, and dp-accounting can't be imported: {error}",
            expected="the package dp-accounting, 0.6 or later, which psgrad depends on",
            cause="an installation without dependencies",
            next_step="pip install 'dp-accounting>=0.6'; epsilon by moments (RDP) needs no such package",
        ) from error
    return dp_accounting


def pld_epsilon(counts: Mapping[StepEvent, int], delta: float, interval: float) -> float:
    """What dp_accounting.pld.PLDAccountant says of these steps, all under one relation and with continuous noise."""
    library = dp_accounting()
    relations = library.NeighboringRelation
    relation = {
        "add_or_remove_one": relations.ADD_OR_REMOVE_ONE,
        "replace_one": relations.REPLACE_ONE,
        "zero_out": relations.REPLACE_SPECIAL,
    }[next(iter(counts)).relation]
    accountant = library.pld.PLDAccountant(relation, value_discretization_interval=interval)
    for event, steps in counts.items():
        accountant.compose(_event(library, event), steps)
    epsilon = float(accountant.get_epsilon(delta))
    if math.isnan(epsilon):
        raise ConfigError(
            f"dp-accounting finds no epsilon for {sum(counts.values())} steps at delta {delta:g}",
            cause="noise multipliers or sampling rates beyond what floating point can tell apart",
        )
    return max(0.0, epsilon)


def _event(library: Any, event: StepEvent) -> Any:
    noise = event.pld_multiplier
    if event.sampling.scheme == "truncated_poisson":
        drawing = event.sampling
        return library.TruncatedSubsampledGaussianDpEvent(drawing.dataset_size, event.sample_rate, drawing.max_batch_size, noise)
    plain = library.GaussianDpEvent(noise)
    # A fixed batch is accounted as one that has every record: no amplification.
    return plain if event.sample_rate == 1 else library.PoissonSampledDpEvent(event.sample_rate, plain)
