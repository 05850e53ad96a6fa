"""The cost of a run of private steps: events, and the epsilon that they add up to."""

from __future__ import annotations

from psgrad.engine.privacy.accounting.composition import epsilon_pld, tightest_epsilon
from psgrad.engine.privacy.accounting.epsilon import Epsilon, epsilon_curve, epsilon_rdp
from psgrad.engine.privacy.accounting.events import MECHANISM, Events, StepEvent, event_of, merged
from psgrad.engine.privacy.accounting.noise_calibration import noise_multiplier_for

__all__ = [
    "MECHANISM",
    "Epsilon",
    "Events",
    "StepEvent",
    "epsilon_curve",
    "epsilon_pld",
    "epsilon_rdp",
    "event_of",
    "merged",
    "noise_multiplier_for",
    "tightest_epsilon",
]
