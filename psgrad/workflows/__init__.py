"""Each command's whole way, from a config to a run folder. The command line and the Python API both call these."""

from psgrad.workflows.analysis import analyze
from psgrad.workflows.auditing import dp_audit
from psgrad.workflows.foretelling import plan
from psgrad.workflows.influence_evaluation import evaluate_influence
from psgrad.workflows.influence_index import influence_index
from psgrad.workflows.influence_run import influence
from psgrad.workflows.private_planning import dp_plan
from psgrad.workflows.private_training import dp_step

__all__ = ["analyze", "dp_audit", "dp_plan", "dp_step", "evaluate_influence", "influence", "influence_index", "plan"]
