"""Audits of private steps: canaries that bound epsilon from below, the noise itself, and the same step on two
neighbouring datasets.
"""

from psgrad.engine.privacy.audit.bounds import AuditVerdict, judge
from psgrad.engine.privacy.audit.canaries import Canaries, with_canaries
from psgrad.engine.privacy.audit.game import AuditedRun, Played, play
from psgrad.engine.privacy.audit.neighbour_step import Replayed, compare_neighbours
from psgrad.engine.privacy.audit.noise_check import FALSE_ALARM, NoiseCheck, NoiseLog

__all__ = [
    "FALSE_ALARM",
    "AuditVerdict",
    "AuditedRun",
    "Canaries",
    "NoiseCheck",
    "NoiseLog",
    "Played",
    "Replayed",
    "compare_neighbours",
    "judge",
    "play",
    "with_canaries",
]
