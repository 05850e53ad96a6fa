"""Audits of private steps: canaries that bound epsilon from below, the noise itself, and the same step on two
neighbouring datasets.
"""

from psgrad.engine.privacy.audit.bounds import METHODS, Bound, Verdict, judge
from psgrad.engine.privacy.audit.game import Canaries, Mechanism, Played, play, with_canaries
from psgrad.engine.privacy.audit.noise_check import FALSE_ALARM, NoiseCheck, NoiseLog
from psgrad.engine.privacy.audit.replay import DrawsDiffer, Replayed, Tape, record_replay

__all__ = [
    "FALSE_ALARM",
    "METHODS",
    "Bound",
    "Canaries",
    "DrawsDiffer",
    "Mechanism",
    "NoiseCheck",
    "NoiseLog",
    "Played",
    "Replayed",
    "Tape",
    "Verdict",
    "judge",
    "play",
    "record_replay",
    "with_canaries",
]
