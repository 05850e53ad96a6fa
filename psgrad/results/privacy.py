"""What `psgrad dp-step` and its `--plan` yield: what may be published apart from what may not."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from psgrad.results.short_repr import ShortRepr

STEP_COLUMNS = (
    "step",
    "batch_size",
    "clip_fraction",
    "mean_loss",
    "median_norm",
    "max_norm",
    "nonfinite",
    "bound",
)
"""The columns of the private table of steps. A fraction, mean, median or largest of an empty batch is NaN."""

STEP_KEYS = (
    "format",
    "versions",
    "guarantee",
    "steps",
    "planned_steps",
    "epsilon_rdp",
    "epsilon_pld",
    "delta",
    "relation",
    "unit",
    "scheme",
    "sample_rate",
    "noise_multiplier",
    "sensitivity",
    "noise_std",
    "expected_batch_size",
    "mechanism",
    "rounding",
    "generator",
    "insecure_deterministic",
    "clipping",
    "adaptive",
    "sampling",
    "schedule",
    "optimizer",
    "trainable",
    "target_epsilon",
    "planned_epsilon_rdp",
    "planned_epsilon_pld",
    "rdp_order",
    "why_not",
    "accounting_notes",
    "moved",
    "ledger",
    "model_sha256",
)
"""What public/step.json holds, in this order. Each follows from the config, the model's shapes, the ledger or the noisy sums alone."""


@dataclass(frozen=True, repr=False)
class DPStepResult(ShortRepr):
    """What `psgrad dp-step` did.

    Public: `step`, the content of public/step.json (STEP_KEYS); `curve`, epsilon after so many steps, as (steps, epsilon), for all
    planned steps, by the accountant `curve_accountant` ("RDP" or "PLD"); `curve_pld`, the same by PLD at a few places, empty where it
    has no answer; `notes`, lines for people that tell nothing of the data.

    NOT PRIVATE: `steps`, one row a step of this run (STEP_COLUMNS: `batch_size` the records drawn, `clip_fraction` the share of them
    whose norm was above its bound, `nonfinite` the records left out); `norms` [n], the gradient norms of the records of the latest
    steps, before clipping, and `bound`, what they were clipped to (of one group; None where there are several).

    In `step`, `guarantee` says in a sentence what is promised. Epsilons are floats, or None where there is none to state; `why_not` then
    has the reason under the same key, and `accounting_notes` what makes one larger than it need be. `noise_multiplier` is what the latest
    step is accounted with; `noise_std`, its noise's standard deviation on the sum, is this times `sensitivity`, and more where the bound
    adapts. `rounding` has the `grid` that the latest step's released numbers are multiples of (None without noise), the `formula` that it
    follows from, `residual_epsilon`, what floating point may add to epsilon, and `unrounded_steps`, how many noisy steps psgrad 0.1 took
    without a grid. `unit` is a part of a sentence: "one row". `trainable` counts {"parameters", "tensors", "of_parameters"}. `moved` counts
    how often the run folder was moved, by its owner's word.
    """

    step: dict[str, Any]
    folder: Path
    curve: list[tuple[int, float]]
    steps: pd.DataFrame
    norms: np.ndarray[Any, Any]
    bound: float | None = None
    curve_accountant: str = "RDP"
    notes: list[str] = field(default_factory=list)
    curve_pld: list[tuple[int, float]] = field(default_factory=list)


@dataclass(frozen=True, repr=False)
class NoisePlan(ShortRepr):
    """What one noise multiplier would cost over all planned steps; None where an accountant has no answer.

    `noise_std` is the standard deviation on the sum, of the first step. `curve_pld` is as in DPStepResult.
    `configured` marks the one that the config asks for, or that its target epsilon leads to.
    """

    noise_multiplier: float
    noise_std: float
    epsilon_rdp: float | None
    epsilon_pld: float | None
    curve: list[tuple[int, float]]
    configured: bool = False
    curve_pld: list[tuple[int, float]] = field(default_factory=list)


@dataclass(frozen=True, repr=False)
class DPPlanResult(ShortRepr):
    """What `psgrad dp-step --plan` foretells, without the data: one NoisePlan a multiplier, smallest multiplier first.

    `setting` holds the keys of STEP_KEYS that are known before a run: planned_steps, delta, relation, unit, scheme, sampling,
    sample_rate, sensitivity, expected_batch_size, mechanism, schedule, target_epsilon, why_not. `plot` is where the figure was written.
    """

    rows: list[NoisePlan]
    setting: dict[str, Any]
    curve_accountant: str = "RDP"
    plot: Path | None = None
    notes: list[str] = field(default_factory=list)
