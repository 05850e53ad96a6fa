"""What a run of private steps costs: events, and the epsilon that they add up to."""

from __future__ import annotations

from psgrad.engine.privacy.accounting.adaptive import adaptive_multiplier
from psgrad.engine.privacy.accounting.calibration import noise_multiplier_for
from psgrad.engine.privacy.accounting.composed import coarse_epsilon_pld, epsilon_pld
from psgrad.engine.privacy.accounting.curve import curve_accountant, epsilon_curve, pld_curve
from psgrad.engine.privacy.accounting.epsilon import Epsilon
from psgrad.engine.privacy.accounting.events import Events, Mechanism, StepEvent, event_of, merged
from psgrad.engine.privacy.accounting.moments import epsilon_rdp

__all__ = [
    "Epsilon",
    "Events",
    "Mechanism",
    "StepEvent",
    "adaptive_multiplier",
    "coarse_epsilon_pld",
    "curve_accountant",
    "epsilon_curve",
    "epsilon_pld",
    "epsilon_rdp",
    "event_of",
    "merged",
    "noise_multiplier_for",
    "pld_curve",
]
