"""Made-up private runs: the records that the reports draw and print."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from psgrad.run.results.privacy import STEP_COLUMNS, DPPlanResult, DPStepResult, NoisePlan


def step(**changes: Any) -> dict[str, Any]:
    """The content of a step.json."""
    return {
        "steps": 120,
        "planned_steps": 300,
        "epsilon_rdp": 1.23456,
        "epsilon_pld": 1.1004,
        "delta": 1e-5,
        "relation": "add_or_remove_one",
        "unit": "one row",
        "scheme": "poisson",
        "sample_rate": 0.0712,
        "noise_multiplier": 1.1,
        "sensitivity": 2.0,
        "noise_std": 2.2,
        "expected_batch_size": 128,
        "mechanism": "gaussian",
        "rounding": {
            "grid": 2.0**-11,
            "formula": "2^(floor(log2(noise_std)) - 12)",
            "residual_epsilon": 2e-6,
        },
        "generator": "AES-256-CTR, keyed by the operating system",
        "insecure_deterministic": False,
        "clipping": {"groups": [{"name": "all", "parameters": ["a", "b"], "bound": 2.0}], "rule": "clip"},
        "sampling": {"scheme": "poisson", "sample_rate": 0.0712},
        "optimizer": {"name": "SGD", "kwargs": {"lr": 0.5}},
        "trainable": {"parameters": 490, "tensors": 2, "of_parameters": 30000},
        "target_epsilon": None,
        "planned_epsilon_rdp": 1.952,
        "planned_epsilon_pld": 1.8,
        "why_not": {},
        "accounting_notes": {},
        "budget": None,
        **changes,
    }


def curve(last: float, steps: int = 300) -> list[tuple[int, float]]:
    """Epsilon as the square root of the steps, up to the last."""
    return [(count, last * math.sqrt(count / steps)) for count in range(1, steps + 1)]


def steps_frame(steps: int) -> pd.DataFrame:
    random = np.random.default_rng(0)
    values = {
        "step": np.arange(1, steps + 1),
        "batch_size": random.binomial(1797, 0.0712, steps),
        "clip_fraction": np.clip(0.9 - 0.3 * np.arange(steps) / steps + random.normal(0, 0.03, steps), 0, 1),
        "mean_loss": 2.3 * np.exp(-3 * np.arange(steps) / steps) + random.normal(0, 0.05, steps) ** 2,
        "median_norm": random.gamma(4, 0.5, steps),
        "max_norm": random.gamma(40, 0.5, steps),
        "nonfinite": np.zeros(steps, dtype=np.int64),
        "bound": np.full(steps, 2.0),
    }
    return pd.DataFrame(values, columns=list(STEP_COLUMNS))


def result(steps: int = 120, **changes: Any) -> DPStepResult:
    taken = step(steps=steps, **changes)
    planned = curve(1.23456 * math.sqrt(300 / 120))  # as step.json has it after 120
    return DPStepResult(taken, Path("runs/private"), planned, steps_frame(steps), ["a note"])


def plan(**changes: Any) -> DPPlanResult:
    setting = {
        key: value
        for key, value in step(**changes).items()
        if not key.endswith("_rdp") and not key.endswith("_pld")
    }
    for key in ("steps", "noise_multiplier", "noise_std"):
        del setting[key]
    rows = [NoisePlan(z, 2 * z, 3 / z, 2.7 / z, configured=z == 1.1) for z in (0.55, 0.8, 1.1, 1.5, 2.2)]
    return DPPlanResult(rows, setting)
