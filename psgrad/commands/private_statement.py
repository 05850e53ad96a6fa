"""The public statement of a private run: its ledger's lines, and step.json. Nothing here depends on the data
except through noise.
"""

from __future__ import annotations

import json
import math
from importlib.metadata import version
from typing import Any

import torch

from psgrad import __version__
from psgrad.commands.private_setup import PrivateSetup, step_event, terms_of, unit_in_words
from psgrad.engine.privacy.accounting import Epsilon, epsilon_pld, epsilon_rdp, event_of, merged
from psgrad.engine.privacy.generators import Generator
from psgrad.engine.privacy.noise import Noise
from psgrad.engine.privacy.rounding import GRID_BITS, grid_of, residual_epsilon
from psgrad.engine.privacy.snapshot import tensors_of
from psgrad.reports.privacy import guarantee
from psgrad.run.identity import digest
from psgrad.run.ledger import Ledger
from psgrad.run.results.privacy import StepStatement, assumptions_of

_STEP_FORMAT = 1


def software() -> dict[str, str]:
    """The versions of what a step is computed and accounted with."""
    return {
        "psgrad": __version__,
        "torch": torch.__version__,
        "dp_accounting": version("dp-accounting"),
    }


def ledger_header(setup: PrivateSetup, multiplier: float) -> dict[str, Any]:
    """What a run keeps to from its first step to its last; a resumed run must say the same."""
    privacy, common = setup.privacy, setup.common
    decisive = common.config.model.model_dump(mode="json", exclude={"checkpoint"})  # known by its hash
    shapes = {name: [str(each.dtype), list(each.shape)] for name, each in tensors_of(common.model).items()}
    return {
        "command": "dp-step",
        **terms_of(privacy),
        "noise_multiplier": multiplier,
        "seed": privacy.noise.seed,
        "unit_config": None if privacy.unit is None else privacy.unit.model_dump(),
        "clipping": setup.clipping.describe(),
        "optimizer": privacy.optimizer.model_dump(),
        "records": privacy.records,
        "trainable": setup.trainable,
        "model": {
            **json.loads(json.dumps(decisive), parse_constant=str),  # NaN and infinities as text
            "checkpoint_sha256": common.loaded.sha256,
            "architecture_sha256": digest(shapes),
        },
        "loss": common.config.loss.model_dump(mode="json"),
        "dtype": common.config.engine.dtype,
    }


def ledger_line(setup: PrivateSetup, multiplier: float, generator: Generator, step: int) -> dict[str, Any]:
    """The line of a step, counted from 1: all that epsilon can be computed from again, and what was done."""
    privacy = setup.privacy
    return {
        "step": step,
        **step_event(privacy, multiplier).line(),
        "delta": privacy.delta,
        "unit": unit_in_words(privacy),
        **_noise_of(setup, multiplier),
        "expected_batch_size": privacy.expected_batch_size,
        "clipping_sha256": setup.clipping.hash(),
        "generator": generator.name,
        "secure": generator.secure,
        "versions": software(),
    }


def step_statement(
    setup: PrivateSetup,
    multiplier: float,
    ledger: Ledger,
    generator: Generator,
    *,
    model_sha256: str | None = None,
) -> dict[str, Any]:
    """The content of public/step.json, of all that the ledger has.

    model_sha256: of the weights that go with it, public/model.safetensors; None while steps are taken, where
    the slow accountant is left out.
    """
    privacy, lines, noise = setup.privacy, ledger.steps, _noise_of(setup, multiplier)
    spent = list(merged((event_of(line), 1) for line in lines).items())
    planned = [(step_event(privacy, multiplier), privacy.steps)]
    later = Epsilon(None, "computed when a run of steps has ended")
    rdp, pld, planned_pld = epsilon_rdp(spent, privacy.delta), later, later
    if model_sha256 is not None:
        pld, planned_pld = (epsilon_pld(events, privacy.delta) for events in (spent, planned))
    each = {"epsilon_rdp": rdp, "epsilon_pld": pld}
    # JSON has no infinity.
    why_not = {
        key: "infinite, as a step had no noise" if found.value == math.inf else found.why_not
        for key, found in each.items()
    }
    noised = sum(line["noise_multiplier"] > 0 for line in lines)
    step = StepStatement(
        format=_STEP_FORMAT,
        versions=software(),
        guarantee=None,  # said below, of the rest
        steps=len(lines),
        **terms_of(privacy),
        epsilon_rdp=rdp.value,
        epsilon_pld=pld.value,
        scheme=setup.sampling.scheme,
        sample_rate=setup.sampling.sample_rate,
        noise_multiplier=multiplier,
        sensitivity=noise["sensitivity"],
        noise_std=noise["noise_std"],
        rounding={
            "grid": noise["noise_grid"],
            "formula": f"2^(floor(log2(noise_std)) - {GRID_BITS})",
            "residual_epsilon": residual_epsilon(setup.trainable["parameters"] * noised, privacy.delta),
        },
        generator=generator.name,
        insecure_deterministic=privacy.noise.seed is not None,
        clipping=ledger.header["clipping"],
        optimizer=privacy.optimizer.model_dump(),
        trainable=setup.trainable,
        planned_epsilon_rdp=epsilon_rdp(planned, privacy.delta).value,
        planned_epsilon_pld=planned_pld.value,
        rdp_order=rdp.order,
        why_not={key: reason for key, reason in why_not.items() if reason is not None},
        accounting_notes={key: found.note for key, found in each.items() if found.note is not None},
        budget=ledger.header.get("budget"),
        assumptions=assumptions_of(
            {
                "scheme": setup.sampling.scheme,
                "records": privacy.records,
                "preflight": setup.preflight,
                "budget": privacy.budget,
            }
        ),
        ledger=ledger.mark(),
        model_sha256=model_sha256,
    ).content()
    return {**step, "guarantee": guarantee(step)}


def _noise_of(setup: PrivateSetup, multiplier: float) -> dict[str, Any]:
    """The sensitivity of the sum, the noise's standard deviation and its public grid; None without noise."""
    sensitivity = setup.clipping.sensitivity(setup.privacy.relation)
    deviation = Noise(multiplier).standard_deviation(sensitivity)
    return {
        "sensitivity": sensitivity,
        "noise_std": deviation,
        "noise_grid": grid_of(deviation) if deviation else None,
    }
