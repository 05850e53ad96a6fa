"""An index that is asked: methods answer from its rows, and the training data are not touched."""

from __future__ import annotations

from collections.abc import Sequence

from psgrad.engine.examples import Examples
from psgrad.engine.influence.index.estimators import RowCosines, RowProducts
from psgrad.engine.influence.index.rows import RowSource
from psgrad.engine.influence.index.spec import Store
from psgrad.engine.influence.index.stored import StoredRows
from psgrad.engine.influence.method import Checkpoint, Fitted, Method, ScoreBlock, Scores
from psgrad.engine.influence.methods.gradient_cosine import GradientCosine
from psgrad.engine.influence.methods.gradient_dot import GradientDot, Products
from psgrad.engine.influence.methods.projected_influence import ProjectedInfluence
from psgrad.engine.influence.methods.tracin import TracIn
from psgrad.engine.influence.methods.trak import TRAK
from psgrad.errors import InfluenceError


def from_index(method: Method, store: Store) -> Method:
    """The same method, fitted to the rows of an index: `fit` asks nothing of the training examples that it is given.

    Its projection is the index's, whatever the method's own options say. Raises InfluenceError for a method that needs more than rows.
    """
    if not isinstance(method, _ANSWERED):
        raise InfluenceError(
            f"an index has no answer by {method.name}",
            expected=f"one of {', '.join(kind.name for kind in _ANSWERED)}",
            cause="it holds one row of numbers for each training example, and no curvature of the model",
            next_step="choose one of these, or leave influence.index out",
        )
    return _Indexed(method, store)


_ANSWERED = (GradientDot, GradientCosine, TracIn, ProjectedInfluence, TRAK)


class _Indexed(Method):
    def __init__(self, method: Method, store: Store) -> None:
        self.method, self.store = method, store
        # of an instance, though a class's elsewhere: it speaks for the method
        self.name, self.unit = method.name, method.unit  # type: ignore[misc]
        self.predicts_removal = method.predicts_removal  # type: ignore[misc]

    def fit(self, training: Examples, checkpoint: Checkpoint) -> Fitted:
        count = self.store.description["checkpoints"]
        if not 0 <= checkpoint.number < count:
            raise InfluenceError(
                f"checkpoint {checkpoint.number} (from 0) was asked of an index of {count}", next_step="build an index of all checkpoints"
            )
        return _fitted(self.method, StoredRows(self.store, checkpoint.number), training, checkpoint)

    def across(self, blocks: Sequence[ScoreBlock]) -> Scores:
        return self.method.across(blocks)


def _fitted(method: Method, source: RowSource, training: Examples, checkpoint: Checkpoint) -> Fitted:
    match method:
        case TRAK() | ProjectedInfluence():
            return method.fit_rows(source)
        case GradientCosine():
            return RowCosines(source)
        case _:
            fitted = method.fit(training, checkpoint)  # which only keeps what it is given
            assert isinstance(fitted, Products)
            return RowProducts(source, fitted.factor)
