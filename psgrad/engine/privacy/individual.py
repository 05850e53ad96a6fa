"""What each record's own norms cost it: individual accounting of private training (Yu et al. 2022,
"Individual Privacy Accounting for Differentially Private Stochastic Gradient Descent", arXiv 2206.02617).

A step moves with a record by at most the norm of its clipped gradient, which is mostly less than the bound;
to that record the step's noise is larger. Its moments (RDP) at each step, under the step's sampling, add up
to an epsilon of its own. The norm is that at the weights of the step, for every record, drawn or not. Where
it is known of some steps only, the others count with the last norm before them, and the result is an
estimate; steps before the first one, and steps that were lost, count with the bound.

The number says how much the released weights could differ if the record had not been there, along the way
that training went. It is no guarantee that was given in advance, as norms follow from the data; and it is
data.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from psgrad.engine.privacy.accounting.epsilon import ORDERS, assert_delta, step_moments
from psgrad.engine.privacy.accounting.events import StepEvent
from psgrad.engine.privacy.clipped_sums import RecordColumns
from psgrad.engine.privacy.clipping import Clipping

Array = np.ndarray

_LEVELS = (
    100  # norms are rounded up to this part of the bound, as in the paper: each level has its own moments
)


class IndividualAccount:
    """The moments of each record's steps.

    Args:
        records: how many there are.

    Attributes:
        moments: [records, orders] float64, of the steps before the last `measure`.
        steps: how many were counted.
    """

    def __init__(self, records: int) -> None:
        self.moments = np.zeros((records, len(ORDERS)))
        self.steps = 0
        self._levels = np.full(records, _LEVELS)
        self._waiting: dict[StepEvent, int] = {}  # since the last measure

    def measure(self, shares: Array) -> None:
        """Take the norms for the steps that follow. shares: [records], the norm of each clipped gradient as a
        share of the bound.
        """
        self._enter()
        self._levels = np.ceil(np.clip(shares, 0.0, 1.0) * _LEVELS * (1 - 1e-12)).astype(np.int64)

    def count(self, event: StepEvent, steps: int = 1) -> None:
        """Count steps with the norms that were measured last."""
        self._waiting[event] = self._waiting.get(event, 0) + steps
        self.steps += steps

    def epsilons(self, delta: float) -> Array:
        """[records] float64: the epsilon of each record at delta, of all steps; converted as dp-accounting
        converts moments.
        """
        assert_delta(delta)
        self._enter()
        best = np.full(len(self.moments), math.inf)
        for place, order in enumerate(ORDERS.tolist()):
            rates = self.moments[:, place]
            epsilon = rates + math.log1p(-1 / order) - math.log(delta * order) / (order - 1)
            best = np.minimum(best, np.where(delta**2 + np.expm1(-rates) > 0, 0.0, epsilon))
        return np.maximum(best, 0.0)

    def _enter(self) -> None:
        for event, steps in self._waiting.items():
            levels, places = np.unique(self._levels, return_inverse=True)
            table = np.stack([self._moments(event, level / _LEVELS) for level in levels.tolist()])
            self.moments += steps * table[places]
        self._waiting.clear()

    def _moments(self, event: StepEvent, share: float) -> Array:
        """[orders] float64: of a step for a record whose norm is this share of the bound."""
        if event.noise_multiplier == 0:
            return np.full(len(ORDERS), math.inf if share else 0.0)
        # Where records are replaced, the other one may have the whole bound; noise and multiplier are of 2 C.
        moved = (share + 1) / 2 if event.relation == "replace_one" else share
        if not moved:
            return np.zeros(len(ORDERS))
        return step_moments(replace(event, noise_multiplier=event.noise_multiplier / moved))


def shares_of(records: RecordColumns, clipping: Clipping) -> Array:
    """[n] float64: the norm of each record's clipped gradient as a share of the bound; of several clipping
    groups an upper bound of it. 0 for a record that was left out.
    """
    largest = records.factors.double().max(1).values if len(records.norms) else records.norms
    clipped = (records.norms.double() * largest).nan_to_num(nan=0.0, posinf=0.0)
    found: Array = (clipped / clipping.sensitivity("add_or_remove_one")).clamp(0, 1).numpy()
    return found


def restored(state: Mapping[str, Array], account: IndividualAccount) -> IndividualAccount:
    """The account with the moments of an earlier process."""
    if state["moments"].shape == account.moments.shape:
        account.moments, account.steps = np.array(state["moments"]), int(state["steps"])
    return account
