"""Builds an index: one pass over the training examples for each checkpoint, shard by shard. `from_index`
answers a method from the rows of an index, without the training data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from psgrad.engine.execution.examples import Examples
from psgrad.engine.gradients.projections.projector import Projector
from psgrad.engine.influence.index.estimators import ProjectedCosines, ProjectedProducts, require_parameters
from psgrad.engine.influence.index.rows import Differentiated, RowBlock, RowSource, projected_rows
from psgrad.engine.influence.index.stored import IndexStore, StoredRows, encoded, projector_of, spec_of
from psgrad.engine.influence.method import Checkpoint, Fitted, Method, ScoreBlock, Scores
from psgrad.engine.influence.methods.gradient_products import (
    GradientCosine,
    GradientDot,
    GradientProducts,
    TracIn,
)
from psgrad.engine.influence.methods.projected import TRAK, Projected, ProjectedInfluence
from psgrad.errors import InfluenceError


def build_index(
    store: IndexStore,
    load: Callable[[int], Examples],
    *,
    say: Callable[[str], None] = lambda _: None,
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> None:
    """Compute and write what the store does not hold yet.

    Args:
        load: checkpoint number to the training examples as that checkpoint sees them. Called once for each
            checkpoint with shards to write, in order, so that one model is in memory at a time.
        say: called with the rows whose gradients are not finite.
        progress: called after each shard with (rows done, rows in all), over all checkpoints.

    Raises InfluenceError where a checkpoint has other parameters than the description says, and what
    `projected_rows` raises.
    """
    spec, shards = spec_of(store.description), store.shards
    missing = store.unwritten()
    total = int(store.description["checkpoints"]) * int(store.description["rows"])
    done = total - sum(len(shards[shard]) for _, shard in missing if shard is not None)
    progress(done, total)
    for number in sorted({number for number, _ in missing}):
        wanted = [shard for checkpoint, shard in missing if checkpoint == number and shard is not None]
        if wanted:
            examples = load(number)
            projector = projector_of(store.description, number)
            require_parameters(projector.flat, examples)
            for shard, blocks in _by_shard(examples, projector, spec.features, shards, wanted):
                bad = [str(block.start + int(row)) for block in blocks for row in (~block.finite).nonzero()]
                if bad:
                    say(
                        f"{len(bad)} rows have a gradient that is not finite, and no score:"
                        f" {', '.join(bad[:8])}{' ...' * (len(bad) > 8)}"
                    )
                store.write(number, shard, encoded(blocks, spec.dtype))
                done += len(shards[shard])
                progress(done, total)
        store.write(number, None, StoredRows(store, number).sums())


def _by_shard(
    examples: Examples,
    projector: Projector,
    of: Differentiated,
    shards: Sequence[range],
    wanted: Sequence[int],
) -> Iterator[tuple[int, list[RowBlock]]]:
    """Each missing shard's rows, in one pass from the first to the last of them: after a kill they are
    neighbours.
    """
    held: list[RowBlock] = []
    shard = wanted[0]
    for rows in projected_rows(examples, projector, of, shards[shard].start):
        block: RowBlock | None = rows
        while block is not None:
            here, block = block.cut(shards[shard].stop)
            held.append(here)
            if here.stop == shards[shard].stop:
                if shard in wanted:
                    yield shard, held
                if shard == wanted[-1]:
                    return
                held, shard = [], shard + 1


def from_index(method: Method, store: IndexStore) -> Method:
    """The same method, fitted to the rows of an index: `fit` does not use the training examples.

    Its projection is the index's, whatever the method's own options are. Raises InfluenceError for a method
    that needs more than rows.
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
    def __init__(self, method: Method, store: IndexStore) -> None:
        self.method, self.store = method, store
        # Here these class attributes are those of the method.
        self.name, self.unit = method.name, method.unit  # type: ignore[misc]
        self.predicts_removal = method.predicts_removal  # type: ignore[misc]

    def fit(self, training: Examples, checkpoint: Checkpoint) -> Fitted:
        count = self.store.description["checkpoints"]
        if not 0 <= checkpoint.number < count:
            raise InfluenceError(
                f"checkpoint {checkpoint.number} (from 0) is not in the index, which has {count}",
                next_step="build an index of all checkpoints",
            )
        return _fitted(self.method, StoredRows(self.store, checkpoint.number), training, checkpoint)

    def across(self, blocks: Sequence[ScoreBlock]) -> Scores:
        return self.method.across(blocks)


def _fitted(method: Method, source: RowSource, training: Examples, checkpoint: Checkpoint) -> Fitted:
    match method:
        case Projected():
            return method.fit_rows(source)
        case GradientCosine():
            return ProjectedCosines(source)
        case _:
            fitted = method.fit(training, checkpoint)  # which only stores its arguments
            assert isinstance(fitted, GradientProducts)
            return ProjectedProducts(source, fitted.factor)
