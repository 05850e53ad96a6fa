"""What samples say at several checkpoints of a training run, asked once for all measures that follow them through training."""

from psgrad.engine.measures.moments.history import History as History
from psgrad.engine.measures.moments.refusals import require_labels as require_labels
from psgrad.engine.measures.moments.refusals import require_moments as require_moments

__all__ = ["History", "require_labels", "require_moments"]
