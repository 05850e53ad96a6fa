"""`psgrad dp-step --plan`: what the planned steps would cost, without the data or the model."""

from __future__ import annotations

from collections.abc import Sequence

from psgrad.commands.private_setup import (
    clipping_without_model,
    noise_multiplier,
    require_privacy,
    sampling_of,
    step_event,
    terms_of,
)
from psgrad.config import Config
from psgrad.engine.privacy.accounting import epsilon_pld, epsilon_rdp
from psgrad.engine.privacy.noise import Noise
from psgrad.run.results.privacy import DPPlanResult, NoisePlan

# The multipliers beside the config's own, as multiples of it.
_AROUND = (0.5, 0.75, 1.5, 2.0)


def dp_plan(config: Config, multipliers: Sequence[float] | None = None) -> DPPlanResult:
    """What the config's planned steps would cost with its noise multiplier, and with others: the whole of
    `psgrad dp-step --plan`.

    Args:
        multipliers: those to compare with; None for some around the config's own.

    Raises ConfigError where the target can't be met.
    """
    privacy = require_privacy(config)
    own, sampling = noise_multiplier(privacy), sampling_of(privacy)
    sensitivity = clipping_without_model(privacy).sensitivity(privacy.relation)
    if multipliers is None:
        multipliers = [factor * own for factor in _AROUND] if own > 0 else [0.5, 1.0, 2.0]
    rows, why_not = [], {}
    for each in sorted({own, *multipliers}):
        events = [(step_event(privacy, each), privacy.steps)]
        rdp, pld = epsilon_rdp(events, privacy.delta), epsilon_pld(events, privacy.delta)
        deviation = Noise(each).standard_deviation(sensitivity)
        rows.append(NoisePlan(each, deviation, rdp.value, pld.value, configured=each == own))
        if each == own:
            why_not = {"epsilon_rdp": rdp.why_not, "epsilon_pld": pld.why_not}
    setting = {
        **terms_of(privacy),
        "scheme": sampling.scheme,
        "sample_rate": sampling.sample_rate,
        "sensitivity": sensitivity,
        "why_not": {key: reason for key, reason in why_not.items() if reason is not None},
    }
    return DPPlanResult(rows, setting)
