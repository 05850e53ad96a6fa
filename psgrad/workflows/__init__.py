"""Each command's whole way, from a config to a run folder. The command line and the Python API both call these."""

from psgrad.workflows.analysis import analyze
from psgrad.workflows.foretelling import plan

__all__ = ["analyze", "plan"]
