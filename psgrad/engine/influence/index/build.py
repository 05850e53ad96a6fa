"""Builds an index: one pass over the training examples for each checkpoint, shard by shard. `from_index`
answers a method from the rows of an index, without the training data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch

from psgrad.engine.execution.examples import Examples
from psgrad.engine.execution.ranks import OneProcess, Processes, in_chunks
from psgrad.engine.influence.index.estimators import ProjectedCosines, ProjectedProducts, require_parameters
from psgrad.engine.influence.index.index_rows import RowPass, RowSource
from psgrad.engine.influence.index.stored_index import IndexStore, StoredRows, encoded, projector_of, spec_of
from psgrad.engine.influence.method import Checkpoint, Fitted, Method, ScoreBlock
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
    processes: Processes | None = None,
    digests: Callable[[int, int], np.ndarray] | None = None,
) -> None:
    """Compute and write what the store does not hold yet.

    Args:
        load: checkpoint number to the training examples as that checkpoint gets them, for this process alone.
            Called once for each checkpoint with shards to write, in order, so that one model is in memory at
            a time.
        say: called with the rows whose gradients are not finite.
        progress: called after each shard with (rows done, rows in all), over all checkpoints.
        processes: those that share the shards; None for this one alone. Where they are a part of a job array,
            no sums are written; see `write_sums`.
        digests: (start, stop) to what tells these examples from others, uint8 [b, 16], after they were read.
            It is kept with the first checkpoint's rows.

    A shard is computed by itself, from its first row on: its numbers do not depend on who computes it, nor on
    what was there before. Raises InfluenceError where a checkpoint has other parameters than
    the description says, and what `projected_rows` raises.
    """
    processes = OneProcess() if processes is None else processes
    spec, shards = spec_of(store.description), store.shards
    missing = processes.agreed("index.missing", lambda: _flat(store.unwritten()))
    todo = list(zip(missing[::2], missing[1::2], strict=True))
    own = {place for each in processes.my_rows("index", in_chunks([range(len(shards))], 1)) for place in each}
    wanted = {
        number: [shard for each, shard in todo if each == number and shard >= 0]
        for number in range(int(store.description["checkpoints"]))
    }
    total = len(wanted) * sum(len(shards[shard]) for shard in own)
    left = sum(len(shards[shard]) for every in wanted.values() for shard in own.intersection(every))
    progress(done := total - left, total)
    for number, every in wanted.items():
        if processes.parts is not None:
            every = sorted(own.intersection(every))
        if not every:
            continue
        examples, projector = load(number), projector_of(store.description, number)
        require_parameters(projector.flat, examples)
        going = RowPass(examples, projector, spec.features)
        _agree_on_chunk_size(going.source, processes, number)
        for shard in every[processes.rank :: processes.size]:
            rows = shards[shard]
            blocks = list(going.blocks(rows.start, rows.stop))
            nonfinite = rows.start + torch.cat([~block.finite for block in blocks]).nonzero().flatten()
            if bad := list(map(str, examples.numbers_of(nonfinite).tolist())):
                say(
                    f"{len(bad)} rows have a gradient that is not finite, and no score:"
                    f" {', '.join(bad[:8])}{' ...' * (len(bad) > 8)}"
                )
            arrays = encoded(blocks, spec.dtype, projector.spans)
            if number == 0 and digests is not None:
                arrays["digest"] = digests(rows.start, rows.stop)
            store.write(number, shard, arrays)
            progress(done := done + len(rows), total)
    if processes.parts is None:
        processes.meet("index")
        write_sums(store, [number for number, shard in todo if shard < 0], processes)


def _agree_on_chunk_size(examples: Examples, processes: Processes, number: int) -> None:
    """Let all processes take as many rows at a time as the first one does, so that numbers do not depend on
    who computes them.
    """
    if processes.size == 1:
        return

    def found() -> list[int]:
        examples.stream.choose_chunk_size(len(examples))
        return examples.stream.chunk_facts()

    examples.stream.fix_chunk_size(*processes.agreed(f"index.{number}.chunk", found))


def write_sums(store: IndexStore, checkpoints: Iterable[int], processes: Processes | None = None) -> None:
    """Write the sums over all rows of these checkpoints, which ends the index. Each process reads its share
    of the rows.
    """
    processes = OneProcess() if processes is None else processes
    for number in checkpoints:
        sums = StoredRows(store, number).sums(processes)
        if processes.leads:
            store.write(number, None, sums)
    processes.meet("index.sums")


def _flat(unwritten: Sequence[tuple[int, int | None]]) -> list[int]:
    """The pairs as a list of whole numbers, with -1 for None, which stands for sums."""
    return [place for number, shard in unwritten for place in (number, -1 if shard is None else shard)]


def from_index(method: Method, store: IndexStore) -> Method:
    """`method`, fitted to the rows of an index: `fit` does not use the training examples.

    Its projection is the index's, whatever the method's own options are. Raises InfluenceError for a method
    that needs more than rows.
    """
    if not isinstance(method, _ANSWERED):
        raise InfluenceError(
            f"an index has no answer by {method.name}; expected one of"
            f" {', '.join(kind.name for kind in _ANSWERED)}",
            hint="choose one of these, or leave influence.index out",
        )
    if isinstance(method, TracIn) and method.optimizer == "adam":
        raise InfluenceError(
            "an index holds projections, and tracin with optimizer: adam scales each number of a gradient",
            hint="leave optimizer out, or leave influence.index out",
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
                hint="build an index of all checkpoints",
            )
        return _fitted(self.method, StoredRows(self.store, checkpoint.number), training, checkpoint)

    @property
    def joins_by_own_rule(self) -> bool:
        return self.method.joins_by_own_rule

    def across(self, blocks: Sequence[ScoreBlock]) -> torch.Tensor:
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
