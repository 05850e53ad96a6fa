"""psgrad: look at a PyTorch model one training example at a time.

The functions here are what the command line calls; docs/reference/api.md shows them. They are loaded when
they are asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from psgrad.api import (
        analyze,
        check,
        diff,
        dp_audit,
        dp_plan,
        dp_step,
        evaluate_influence,
        influence,
        influence_index,
        load_config,
        load_run,
        plan,
        report,
        save_baseline,
        validate,
    )
    from psgrad.config import Config
    from psgrad.errors import PsgradError

__version__ = "0.2.0.dev0"

__all__ = [
    "Config",
    "PsgradError",
    "__version__",
    "analyze",
    "check",
    "diff",
    "dp_audit",
    "dp_plan",
    "dp_step",
    "evaluate_influence",
    "influence",
    "influence_index",
    "load_config",
    "load_run",
    "plan",
    "report",
    "save_baseline",
    "validate",
]

_ELSEWHERE = {"Config": "psgrad.config", "PsgradError": "psgrad.errors"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(importlib.import_module(_ELSEWHERE.get(name, "psgrad.api")), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
