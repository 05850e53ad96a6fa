"""`psgrad dp-step --plan`: what the planned steps would cost, without the data or the model."""

from __future__ import annotations

from collections.abc import Sequence

from psgrad.commands.private_setup import (
    clipping_without_model,
    noise_multiplier,
    require_privacy,
    sampling_of,
    step_event,
    unit_in_words,
)
from psgrad.config import Config, PrivacyConfig
from psgrad.engine.privacy.accounting import (
    MECHANISM,
    curve_accountant,
    epsilon_curve,
    epsilon_pld,
    epsilon_rdp,
)
from psgrad.engine.privacy.noise import Noise
from psgrad.reports.privacy_plots import epsilon_by_multiplier
from psgrad.run import RunFolder
from psgrad.run.results.privacy import DPPlanResult, NoisePlan

# The multipliers beside the config's own, as multiples of it.
_AROUND = (0.5, 0.75, 1.5, 2.0)


def dp_plan(config: Config, multipliers: Sequence[float] | None = None) -> DPPlanResult:
    """What the config's planned steps would cost with its noise multiplier, and with others: the whole of
    `psgrad dp-step --plan`.

    Args:
        multipliers: those to compare with; None for some around the config's own.

    Writes the figure beside the output folder, as <output>-plan.png. Raises ConfigError where the target
    can't be met.
    """
    privacy = require_privacy(config)
    own = noise_multiplier(privacy)
    compared = (
        multipliers
        if multipliers is not None
        else [factor * own for factor in _AROUND]
        if own > 0
        else [0.5, 1.0, 2.0]
    )
    rows = [noise_plan(privacy, each, configured=each == own) for each in sorted({own, *compared})]
    event = step_event(privacy, own)
    events = [(event, privacy.steps)]
    why_not = {
        "epsilon_rdp": epsilon_rdp(events, privacy.delta).why_not,
        "epsilon_pld": epsilon_pld(events, privacy.delta).why_not,
    }
    sampling = sampling_of(privacy)
    setting = {
        "planned_steps": privacy.steps,
        "delta": privacy.delta,
        "relation": privacy.relation,
        "unit": unit_in_words(privacy),
        "scheme": sampling.scheme,
        "sampling": sampling.describe(),
        "sample_rate": sampling.sample_rate,
        "sensitivity": clipping_without_model(privacy).sensitivity(privacy.relation),
        "expected_batch_size": privacy.expected_batch_size,
        "mechanism": MECHANISM,
        "target_epsilon": privacy.noise.target_epsilon,
        "why_not": {key: reason for key, reason in why_not.items() if reason is not None},
    }
    plot = config.output.with_name(f"{config.output.name}-plan.png")  # the run folder is for a run
    result = DPPlanResult(rows, setting, curve_accountant(event), plot)
    RunFolder(plot.parent).write_bytes(plot.name, epsilon_by_multiplier(result).png())
    return result


def noise_plan(privacy: PrivacyConfig, multiplier: float, *, configured: bool) -> NoisePlan:
    """What the planned steps cost with this noise multiplier."""
    event = step_event(privacy, multiplier)
    events = [(event, privacy.steps)]
    sensitivity = clipping_without_model(privacy).sensitivity(privacy.relation)
    return NoisePlan(
        noise_multiplier=multiplier,
        noise_std=Noise(multiplier).standard_deviation(sensitivity),
        epsilon_rdp=epsilon_rdp(events, privacy.delta).value,
        epsilon_pld=epsilon_pld(events, privacy.delta).value,
        curve=epsilon_curve(event, privacy.steps, privacy.delta),
        configured=configured,
    )
