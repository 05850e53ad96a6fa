"""Building an index: the training examples stream past once for each checkpoint, and their rows go to the disk shard by shard."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from psgrad.engine.examples import Examples
from psgrad.engine.influence.index.estimators import require_parameters
from psgrad.engine.influence.index.projector import Projector
from psgrad.engine.influence.index.rows import Of, RowBlock, projected_rows
from psgrad.engine.influence.index.spec import Store, projector_of, spec_of
from psgrad.engine.influence.index.stored import StoredRows, encoded


def build_index(
    store: Store,
    load: Callable[[int], Examples],
    *,
    say: Callable[[str], None] = lambda _: None,
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> None:
    """Compute and write what the store does not hold yet.

    Args:
        load: checkpoint number to the training examples as that checkpoint sees them. Called once for each checkpoint with shards to
            write, in order, so that one model is in memory at a time.
        say: told which rows have gradients that are not finite.
        progress: told how many rows are done of how many, over all checkpoints, after each shard.

    Raises InfluenceError where a checkpoint has other parameters than the description says, and what `projected_rows` raises.
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
                    say(f"{len(bad)} rows have a gradient that is not finite, and no score: {', '.join(bad[:8])}{' ...' * (len(bad) > 8)}")
                store.write(number, shard, encoded(blocks, spec.dtype))
                done += len(shards[shard])
                progress(done, total)
        store.write(number, None, StoredRows(store, number).sums())


def _by_shard(
    examples: Examples, projector: Projector, of: Of, shards: Sequence[range], wanted: Sequence[int]
) -> Iterator[tuple[int, list[RowBlock]]]:
    """Each wanted shard's rows, in one pass from the first to the last of them: where a run was killed all the rest is missing."""
    held: list[RowBlock] = []
    shard = wanted[0]
    for found in projected_rows(examples, projector, of, shards[shard].start):
        block: RowBlock | None = found
        while block is not None:
            here, block = block.cut(shards[shard].stop)
            held.append(here)
            if here.stop == shards[shard].stop:
                if shard in wanted:
                    yield shard, held
                if shard == wanted[-1]:
                    return
                held, shard = [], shard + 1
