"""A review by a stored index of the training gradients: the curvature is read from its rows, so that of the
training data only rows that change go through the model.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from psgrad.commands.influence_index import open_index
from psgrad.commands.influence_setup import InfluenceSetup
from psgrad.config import Config
from psgrad.data.reader import CheckedReader
from psgrad.engine.execution.examples import Examples
from psgrad.engine.influence.damping import Damping
from psgrad.engine.influence.index.index_rows import RowsInMemory
from psgrad.engine.influence.index.row_curvature import RowCurvature, curvature_of_rows
from psgrad.engine.influence.index.stored_index import StoredRows
from psgrad.engine.influence.method import Preconditioned
from psgrad.engine.influence.methods.projected import ProjectedInfluence
from psgrad.errors import ConfigError
from psgrad.run.gradient_index import GradientIndex

Array = npt.NDArray[np.int64]

# The losses that are minus the log of the probability of one label, without options.
_LOG_LOSSES = ("cross_entropy", "bce_with_logits")


def index_before(config: Config, setup: InfluenceSetup, before: CheckedReader) -> GradientIndex | None:
    """The index of the training data before the change; None where the config names none.

    Raises ConfigError for a method that does not read one, OutputError where it is not there, half built, or
    of another model, data or settings.
    """
    if config.influence.index is None:
        return None
    if not isinstance(setup.method, ProjectedInfluence):
        raise ConfigError(
            f"influence.index is set, and a review by {setup.method.name} does not read an index",
            hint="set influence.method: projected_influence, or leave influence.index out",
        )
    return open_index(replace(setup.common, samples=before.samples, reader=before))


@dataclass(frozen=True)
class IndexedCurvature:
    """The curvature of the changed data at one checkpoint, from an index of the data before.

    kept: [n] bool, the rows of the index that stay. summed: [k, k], over these and the rows that are added.
    count: rows of the changed data. log_loss: see `curvature_of_rows`.
    """

    rows: StoredRows
    kept: torch.Tensor
    summed: torch.Tensor
    count: int
    damping: Damping
    log_loss: bool

    @classmethod
    def of(
        cls, store: GradientIndex, setup: InfluenceSetup, number: int, removed: Array, added: Examples | None
    ) -> IndexedCurvature:
        """number: of the checkpoint. removed: rows of the index. added: the examples that are added."""
        rows, method, loss = StoredRows(store, number), setup.method, setup.common.criterion
        assert isinstance(method, ProjectedInfluence)  # see `index_before`
        log_loss = loss.name in _LOG_LOSSES and not setup.config.loss.options
        kept = torch.ones(len(rows), dtype=torch.bool)
        kept[torch.tensor(removed)] = False  # a copy: the table of changes is read-only
        summed, count = curvature_of_rows(rows, log_loss, kept), int(kept.sum())
        if added is not None:
            summed += curvature_of_rows(RowsInMemory(added, rows.projector, "loss"), log_loss)
            count += len(added)
        damping = Damping(method.damping, method.relative_damping)
        return cls(rows, kept, summed, count, damping, log_loss)

    def fit(self, examples: Examples) -> RowCurvature:
        """The curvature with its inverse. examples: any, with the model of the checkpoint."""
        return RowCurvature(examples, self.rows.projector, self.summed, self.count, self.damping)

    def parts(self, whole: RowCurvature, groups: int) -> Iterator[tuple[Preconditioned, float]]:
        """(the curvature without a group of the rows that stay, its share of the rows), for each group.
        whole: that of all rows, whose damping the others get.
        """
        stay = self.kept.nonzero().flatten()
        for group in range(groups if len(stay) >= 2 * groups else 0):
            out = torch.zeros_like(self.kept)
            out[stay[group::groups]] = True
            count = self.count - int(out.sum())
            summed = self.summed - curvature_of_rows(self.rows, self.log_loss, out)
            fitted = RowCurvature(whole.training, self.rows.projector, summed, count, Damping(whole.damping))
            yield fitted, count / self.count
