"""The data flow of each command, from a config to a run folder. The command line and the Python API both call these.

A command's module is imported when it is used, so that no command waits for the libraries of the others.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from psgrad.workflows.analysis import analyze
    from psgrad.workflows.auditing import dp_audit
    from psgrad.workflows.checking import check, save_baseline
    from psgrad.workflows.comparing import diff
    from psgrad.workflows.foretelling import plan
    from psgrad.workflows.influence_evaluation import evaluate_influence
    from psgrad.workflows.influence_indexing import influence_index
    from psgrad.workflows.influence_run import influence
    from psgrad.workflows.private_planning import dp_plan
    from psgrad.workflows.private_training import dp_step
    from psgrad.workflows.reporting import report

__all__ = [
    "analyze",
    "check",
    "diff",
    "dp_audit",
    "dp_plan",
    "dp_step",
    "evaluate_influence",
    "influence",
    "influence_index",
    "plan",
    "report",
    "save_baseline",
]

_MODULES = {
    "analyze": "analysis",
    "check": "checking",
    "diff": "comparing",
    "dp_audit": "auditing",
    "dp_plan": "private_planning",
    "dp_step": "private_training",
    "evaluate_influence": "influence_evaluation",
    "influence": "influence_run",
    "influence_index": "influence_indexing",
    "plan": "foretelling",
    "report": "reporting",
    "save_baseline": "checking",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = found
    return found
