"""The public statement of a private run: its ledger's lines, and step.json. Nothing here depends on the data
except through noise.
"""

from __future__ import annotations

import hashlib
import json
import math
from importlib.metadata import version
from typing import Any

import torch
from torch import nn

from psgrad import __version__
from psgrad.commands.private_setup import PrivateSetup, planned_events, schedule_of, unit_in_words
from psgrad.engine.privacy.accounting import (
    MECHANISM,
    Epsilon,
    StepEvent,
    epsilon_pld,
    epsilon_rdp,
    event_of,
    merged,
)
from psgrad.engine.privacy.generators import Generator
from psgrad.engine.privacy.rounding import GRID_BITS, grid_of, residual_epsilon
from psgrad.engine.privacy.snapshot import tensors_of
from psgrad.engine.privacy.step import PrivateTraining
from psgrad.reports.privacy import guarantee
from psgrad.run.ledger import Ledger
from psgrad.run.results.privacy import StepStatement, assumptions_of

_STEP_FORMAT = 1
_LATER = "computed when a run of steps has ended"


def software() -> dict[str, str]:
    """The versions of what a step is computed and accounted with."""
    return {
        "psgrad": __version__,
        "torch": torch.__version__,
        "dp_accounting": version("dp-accounting"),
    }


def ledger_header(setup: PrivateSetup, base: float) -> dict[str, Any]:
    """What a run keeps to from its first step to its last; a resumed run must say the same."""
    privacy, run = setup.privacy, setup.run
    decisive = run.config.model.model_dump(mode="json")
    decisive.pop("checkpoint")  # known by its hash
    return {
        "command": "dp-step",
        "planned_steps": privacy.steps,
        "delta": privacy.delta,
        "target_epsilon": privacy.noise.target_epsilon,
        "noise_multiplier": base,
        "schedule": schedule_of(privacy).describe(),
        "mechanism": MECHANISM,
        "seed": privacy.noise.seed,
        "relation": privacy.relation,
        "unit": unit_in_words(privacy),
        "unit_config": None if privacy.unit is None else privacy.unit.model_dump(),
        "augmentation": None if privacy.augmentation is None else privacy.augmentation.model_dump(),
        "sampling": setup.sampling.describe(),
        "expected_batch_size": privacy.expected_batch_size,
        "clipping": setup.clipping.describe(),
        "adaptive": None if privacy.clipping.adaptive is None else privacy.clipping.adaptive.model_dump(),
        "optimizer": privacy.optimizer.model_dump(),
        # Only where it is not the default: ledgers of before have no such key.
        **({} if privacy.records == "together" else {"records": privacy.records}),
        "trainable": setup.trainable,
        "model": {
            **json.loads(json.dumps(decisive), parse_constant=str),  # NaN and infinities as text
            "checkpoint_sha256": run.loaded.sha256,
            "architecture_sha256": architecture_hash(run.model),
        },
        "loss": run.config.loss.model_dump(mode="json"),
        "dtype": run.config.engine.dtype,
    }


def why_no_number(epsilon: Epsilon) -> str | None:
    """Why a file has no number for this epsilon; None where it has one. JSON has no infinity."""
    return "infinite, as a step had no noise" if epsilon.value == math.inf else epsilon.why_not


def architecture_hash(model: nn.Module) -> str:
    """The SHA-256 of the names, types and shapes of all parameters and buffers."""
    shapes = {name: [str(tensor.dtype), list(tensor.shape)] for name, tensor in tensors_of(model).items()}
    return hashlib.sha256(json.dumps(shapes, sort_keys=True).encode()).hexdigest()


def _grid_of(deviation: float) -> float | None:
    return grid_of(deviation) if deviation else None


class Statement:
    """A run's words, from its config and its ledger."""

    def __init__(self, setup: PrivateSetup, base: float, generator: Generator) -> None:
        self.setup, self.base, self.generator = setup, base, generator
        self.planned = planned_events(setup.privacy, base)

    def ledger_line(self, event: StepEvent, training: PrivateTraining) -> dict[str, Any]:
        """One step's line: all that epsilon can be computed from again, and what was done."""
        privacy = self.setup.privacy
        clipping, noise = training.mechanism()
        sensitivity = clipping.sensitivity(privacy.relation)
        line = {
            "step": training.taken + 1,
            **event.line(),
            "delta": privacy.delta,
            "unit": unit_in_words(privacy),
            "sensitivity": sensitivity,
            "noise_std": noise.standard_deviation(sensitivity),
            "noise_grid": _grid_of(noise.standard_deviation(sensitivity)),
            "expected_batch_size": privacy.expected_batch_size,
            "clipping_sha256": clipping.hash(),
            "generator": self.generator.name,
            "secure": self.generator.secure,
            "versions": software(),
        }
        if training.adaptive is not None:
            line["bound"] = training.adaptive.bound
            line["sum_noise_multiplier"] = noise.multiplier
            line["count_noise_multiplier"] = training.adaptive.count_multiplier
        return line

    def step(self, ledger: Ledger, *, final: bool, model_sha256: str | None = None) -> dict[str, Any]:
        """The content of public/step.json, of all that the ledger has. Without `final` the slow
        accountant is left out.

        model_sha256: of the weights that go with it, public/model.safetensors.
        """
        privacy, lines = self.setup.privacy, ledger.steps
        spent = tuple(merged((event_of(line), 1) for line in lines).items())
        rdp = epsilon_rdp(spent, privacy.delta)
        pld = epsilon_pld(spent, privacy.delta) if final else Epsilon(None, _LATER)
        planned_rdp = epsilon_rdp(self.planned, privacy.delta)
        planned_pld = (
            pld
            if final and len(lines) == privacy.steps
            else epsilon_pld(self.planned, privacy.delta)
            if final
            else pld
        )
        latest = lines[-1] if lines else self._before_any_step()
        why_not = {"epsilon_rdp": why_no_number(rdp), "epsilon_pld": why_no_number(pld)}
        step = StepStatement(
            format=_STEP_FORMAT,
            versions=software(),
            guarantee=None,  # said below, of the rest
            steps=len(lines),
            planned_steps=privacy.steps,
            epsilon_rdp=rdp.value,
            epsilon_pld=pld.value,
            delta=privacy.delta,
            relation=privacy.relation,
            unit=unit_in_words(privacy),
            scheme=self.setup.sampling.scheme,
            sample_rate=self.setup.sampling.sample_rate,
            noise_multiplier=latest["noise_multiplier"],
            sensitivity=latest["sensitivity"],
            noise_std=latest["noise_std"],
            expected_batch_size=privacy.expected_batch_size,
            mechanism=MECHANISM,
            rounding=self._rounding(lines),
            generator=self.generator.name,
            insecure_deterministic=privacy.noise.seed is not None,
            clipping=ledger.header["clipping"],
            adaptive=ledger.header["adaptive"],
            sampling=self.setup.sampling.describe(),
            schedule=schedule_of(privacy).describe(),
            optimizer=privacy.optimizer.model_dump(),
            trainable=self.setup.trainable,
            target_epsilon=privacy.noise.target_epsilon,
            planned_epsilon_rdp=planned_rdp.value,
            planned_epsilon_pld=planned_pld.value,
            rdp_order=rdp.order,
            why_not={key: reason for key, reason in why_not.items() if reason is not None},
            accounting_notes={
                key: found.note
                for key, found in (("epsilon_rdp", rdp), ("epsilon_pld", pld))
                if found.note is not None
            },
            budget=ledger.header.get("budget"),
            assumptions=assumptions_of(
                {
                    "scheme": self.setup.sampling.scheme,
                    "records": privacy.records,
                    "preflight": self.setup.preflight,
                    "budget": privacy.budget,
                }
            ),
            ledger=ledger.mark(),
            model_sha256=model_sha256,
        )
        return {**step.content(), "guarantee": guarantee(step.content())}

    def _rounding(self, lines: list[dict[str, Any]]) -> dict[str, Any]:
        """The grid of the latest step's released numbers and how it follows, and what floating point may add
        to epsilon; None for none.
        """
        latest = lines[-1] if lines else self._before_any_step()
        noised = sum(line["noise_multiplier"] > 0 for line in lines)
        released = self.setup.trainable["parameters"] + (self.setup.adaptive is not None)
        return {
            "grid": _grid_of(latest["noise_std"]),
            "formula": f"2^(floor(log2(noise_std)) - {GRID_BITS})",
            "residual_epsilon": residual_epsilon(released * noised, self.setup.privacy.delta),
        }

    def _before_any_step(self) -> dict[str, float]:
        privacy = self.setup.privacy
        sensitivity = self.setup.clipping.sensitivity(privacy.relation)
        noise = self.setup.noise(self.base)(0)
        deviation = noise.standard_deviation(sensitivity)
        return {"noise_multiplier": noise.multiplier, "sensitivity": sensitivity, "noise_std": deviation}
