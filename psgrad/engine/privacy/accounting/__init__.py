"""What a run of private steps costs: events, and the epsilon that they add up to."""

from __future__ import annotations

from psgrad.engine.privacy.accounting.adaptive import adaptive_multiplier
from psgrad.engine.privacy.accounting.events import Events, Mechanism, StepEvent, event_of, merged

__all__ = ["Events", "Mechanism", "StepEvent", "adaptive_multiplier", "event_of", "merged"]
