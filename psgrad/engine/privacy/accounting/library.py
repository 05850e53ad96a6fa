"""dp-accounting, which computes every epsilon here. It is imported where it is needed: that takes a second."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from psgrad.engine.privacy.accounting.events import StepEvent
from psgrad.errors import ConfigError


def dp_accounting() -> Any:
    """The module. Raises ConfigError where it is not installed."""
    try:
        import dp_accounting
    except ImportError as error:
        raise ConfigError(
            f"epsilon was asked for, and dp-accounting can't be imported: {error}",
            expected="the package dp-accounting, 0.6 or later, which psgrad depends on",
            cause="an installation without dependencies",
            next_step="pip install 'dp-accounting>=0.6'",
        ) from error
    return dp_accounting


def rdp_rates(event: StepEvent, orders: np.ndarray) -> np.ndarray:
    """[orders] float64: what dp_accounting.rdp.RdpAccountant notes of one step, infinite where it knows nothing.

    The event has moments (see `why_not_rdp`). Sensitivities are part of its multiplier, so that the accountant's relation is its default.
    """
    accountant = dp_accounting().rdp.RdpAccountant(orders)
    with _quiet():
        accountant.compose(_event(event, event.rdp_multiplier))
    return np.array(accountant._rdp, dtype=np.float64)  # which only leaves it as an epsilon otherwise


def rdp_epsilon(orders: np.ndarray, rates: np.ndarray, delta: float) -> tuple[float, float]:
    """(epsilon, the order that gave it) of rates that were added up over steps, as RdpAccountant converts them."""
    epsilon, order = dp_accounting().rdp.rdp_privacy_accountant.compute_epsilon(orders, rates, delta)
    return max(0.0, float(epsilon)), float(order)


def pld_epsilon(counts: Mapping[StepEvent, int], delta: float, interval: float) -> float:
    """What dp_accounting.pld.PLDAccountant says of these steps, all under one relation and with continuous noise.

    interval: between two losses of its grid, on which it rounds so that no epsilon comes out too small.
    """
    library = dp_accounting()
    relations = library.NeighboringRelation
    relation = {
        "add_or_remove_one": relations.ADD_OR_REMOVE_ONE,
        "replace_one": relations.REPLACE_ONE,
        "zero_out": relations.REPLACE_SPECIAL,
    }[next(iter(counts)).relation]
    accountant = library.pld.PLDAccountant(relation, value_discretization_interval=interval)
    try:
        for event, steps in counts.items():
            accountant.compose(_event(event, event.pld_multiplier), steps)
        epsilon = float(accountant.get_epsilon(delta))
    except OverflowError:  # losses beyond e^700: no figure, and no bound that anybody would sign
        return math.inf
    if math.isnan(epsilon):
        raise ConfigError(
            f"dp-accounting finds no epsilon for {sum(counts.values())} steps at delta {delta:g}",
            cause="noise multipliers or sampling rates beyond what floating point can tell apart",
        )
    return max(0.0, epsilon)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without a line on stderr for each order whose series does not converge: such an order is left out, and others serve."""
    logger = logging.getLogger("absl")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def _event(event: StepEvent, noise: float) -> Any:
    """The step in dp-accounting's words, with the noise as the accountant at hand takes it."""
    library = dp_accounting()
    if event.sampling.scheme == "truncated_poisson":
        drawing = event.sampling
        return library.TruncatedSubsampledGaussianDpEvent(drawing.dataset_size, event.sample_rate, drawing.max_batch_size, noise)
    plain = library.GaussianDpEvent(noise)
    # A fixed batch is accounted as one that has every record: no amplification.
    return plain if event.sample_rate == 1 else library.PoissonSampledDpEvent(event.sample_rate, plain)
