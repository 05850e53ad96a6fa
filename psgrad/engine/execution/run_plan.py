"""What a run over a dataset will do and take: the order of contraction of each parameter, the chunk, the time
and the memory.

The time is that of two chunks of different sizes, which are run: what a chunk takes whatever its size, and
what each row takes. The memory is that of a chunk that is followed on tensors without values.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from psgrad.engine.execution.chunk_plan import (
    ChunkPlan,
    chunk_for,
    chunk_for_factors,
    plan_chunk,
)
from psgrad.engine.execution.chunk_replay import NOT_REPLAYED, PAYS_FROM
from psgrad.engine.execution.ladder import why_without_programs
from psgrad.engine.execution.memory import chunk_budget
from psgrad.engine.execution.pass_costs import NotCapturable, observe_pass
from psgrad.engine.execution.streaming import LARGEST_AUTO_CHUNK, PREDICTED_FROM, Stream
from psgrad.engine.gradients.deferred import DeferredGradient
from psgrad.engine.gradients.per_sample import BatchPass, per_sample_gradients, per_sample_square_norms
from psgrad.ragged import Block

# Rows that are read. They are repeated for larger chunks.
_READ = 8
# How often a chunk is timed, and the seconds after which it is not timed again, or not made larger.
_TIMES, _LONG = 5, 0.5


@dataclass(frozen=True)
class ParameterCosts:
    """How the norms of one parameter's gradients will be computed.

    Attributes:
        kinds: of the terms that the gradient is a sum of.
        order: the chosen order of contraction, as the manifest and the tables name it.
        bytes: for each sample: its factors, and the largest intermediate of the chosen order.
        factored: whether no value of the parameter's size is held for each sample.
    """

    name: str
    shape: tuple[int, ...]
    kinds: str
    order: str
    bytes: int
    factored: bool


@dataclass(frozen=True)
class RunPlan:
    """What a run will take.

    Attributes:
        parameters: in the model's order.
        rows: of the dataset.
        chunk_size: rows at a time.
        seconds: of all passes, without reading the data where it takes longer than they do.
        chunk_seconds: of one.
        peak_bytes: what a chunk's pass has at its highest beyond parameters and inputs.
        input_bytes: of a chunk.
        parameter_bytes: of the model's parameters that are followed.
        replayed: whether chunks will be replayed by a program.
        why: in words.
        obstacle: why the pass could not be followed without running it; None where it could.
    """

    parameters: tuple[ParameterCosts, ...]
    rows: int
    chunk_size: int
    seconds: float
    chunk_seconds: float
    peak_bytes: int
    input_bytes: int
    parameter_bytes: int
    replayed: bool
    why: str
    obstacle: str | None


def plan_run(stream: Stream, rows: int) -> RunPlan:
    """What the stream's run over `rows` rows for norms will take. Reads and runs the first few rows, and no
    more. Of rows that differ in length, sizes are for rows as long as the longest of these, and times for
    rows of their lengths.

    Raises PsgradError, with the row, where the model or the loss fails on them.
    """
    stream.gradients_at([0])  # a model that fails says so, in a person's words
    block = stream.load_block(0, min(_READ, rows))
    inputs, target = block.inputs, block.target
    at, obstacle = _costs_at(stream, inputs, target)
    size = _chunk_size(stream, rows, at, inputs, target)
    chunk, chunks = at(size), -(-rows // size)
    why = _why_not_replayed(stream, rows // size, block)
    fixed, each = _measured_seconds(partial(_seconds, stream, block, replayed=why is None), len(block), size)
    if why is None and not stream.counts.replayed:
        why = "; ".join(stream.counts.reasons) or "programs of these rows would take longer"
    sizes = "of one size" if block.ragged is None else "of rows padded to few lengths"
    return RunPlan(
        parameters=_parameters(stream, inputs, target),
        rows=rows,
        chunk_size=size,
        seconds=chunks * fixed + rows * each,
        chunk_seconds=fixed + size * each,
        peak_bytes=chunk.peak_bytes,
        input_bytes=chunk.input_bytes,
        parameter_bytes=sum(p.numel() * p.element_size() for p in stream.params.values()),
        replayed=why is None,
        why=why or f"{chunks:,} chunks {sizes} are worth a program",
        obstacle=obstacle,
    )


def _measured_seconds(seconds: Callable[[int], float], read: int, size: int) -> tuple[float, float]:
    """(what a chunk takes whatever its size, what each of its rows takes): by two chunks, of the rows that
    were read, and of as many as are run quickly, or fewer.

    seconds: from a number of rows to what a chunk of them takes. read: how many rows there are. size: of the
    run's chunks.
    """
    rows = min(read, size)
    taken = seconds(rows)
    other = min(size, int(rows * _LONG / max(taken, 1e-9)))
    if other < 2 * rows:
        other = max(1, rows // 4)
    (few, short), (many, long) = sorted([(rows, taken), (other, seconds(other))])
    each = (long - short) / (many - few) if many > few else 0.0
    each = min(max(each, 0.0), long / many)  # neither part is negative, whatever else the machine did
    return long - many * each, each


def _seconds(stream: Stream, block: Block, rows: int, *, replayed: bool) -> float:
    """The time of a chunk of the block's rows, spread and repeated: a median of few, without the first. Each
    chunk begins at another row, as values that a model reads differ from chunk to chunk.
    """
    spread = max(1, len(block) // rows)
    chunks = (
        block.at([(first + row * spread) % len(block) for row in range(rows)]) for first in itertools.count()
    )

    def run() -> Any:
        some = next(chunks)
        if replayed:
            return stream.found(per_sample_square_norms, some, PAYS_FROM)
        return stream.computed(per_sample_square_norms, some)

    for _ in range(NOT_REPLAYED if replayed else 0):
        run()
    times, began = list[float](), time.perf_counter()
    while len(times) <= _TIMES and (len(times) < 1 or time.perf_counter() - began < _LONG):
        start = time.perf_counter()
        run()
        if stream.device.type == "cuda":
            torch.cuda.synchronize(stream.device)
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:] or times)


def _costs_at(stream: Stream, inputs: Any, target: Any) -> tuple[Callable[[int], ChunkPlan], str | None]:
    """(the plan of a chunk of a number of rows, why a chunk had to run for it).

    Where the kernels depend on values, they are observed while the first rows run, and their costs grow with
    the number of rows.
    """
    norms, known = stream.pass_of(per_sample_square_norms), dict[int, ChunkPlan]()

    def traced_at(rows: int) -> ChunkPlan:
        if rows not in known:
            known[rows] = plan_chunk(norms, stream.params, inputs, target, rows)
        return known[rows]

    try:
        traced_at(1)
    except Exception as error:
        given = sum(x.numel() * x.element_size() for x in (*inputs, target) if x is not None)
        whole, count = observe_pass(norms, stream.params, inputs, target), len(inputs[0])
        why = str(error) if isinstance(error, NotCapturable) else f"{type(error).__name__}: {error}"

        def scaled(rows: int) -> ChunkPlan:
            return ChunkPlan(whole.peak_bytes * rows // count, given * rows // count)

        return scaled, why.partition("\n")[0]
    return traced_at, None


def _chunk_size(stream: Stream, rows: int, at: Callable[[int], ChunkPlan], inputs: Any, target: Any) -> int:
    """The chunk size that the stream itself would choose."""
    if not stream.automatic:
        return min(stream.chunk_size, rows)
    if stream.memory is None and rows < PREDICTED_FROM:  # there a small chunk's factors are measured
        gradients = stream.pass_of(partial(per_sample_gradients, settle=False))(stream.params, inputs, target)
        budget = chunk_budget(stream.device, stream.memory)
        return min(chunk_for_factors(gradients, len(gradients), budget, LARGEST_AUTO_CHUNK), rows)

    return chunk_for(at, chunk_budget(stream.device, stream.memory), min(LARGEST_AUTO_CHUNK, rows))


def _why_not_replayed(stream: Stream, chunks: int, block: Block) -> str | None:
    """Why chunks will run as they are, None where programs are tried. block: the first rows."""
    if not stream.replays:
        return "; ".join(stream.counts.reasons)
    if block.ragged is not None and (why := why_without_programs(block.ragged)) is not None:
        return why
    # The first chunk comes before the recorded one.
    return (
        f"{chunks:,} whole {'chunk' if chunks == 1 else 'chunks'}, and a program pays from {PAYS_FROM + 1:,}"
        if chunks <= PAYS_FROM
        else None
    )


def _parameters(stream: Stream, inputs: Any, target: Any) -> tuple[ParameterCosts, ...]:
    """The terms of each parameter's gradient and how their norms are taken, of the first row: one row agrees
    with itself on every branch.
    """
    found: dict[str, ParameterCosts] = {}

    def note(name: str, gradient: DeferredGradient) -> None:
        terms = [placed.term for placed in gradient.terms]
        costs = [
            term.order_costs().get(term.describe())
            or min(term.order_costs().values(), key=lambda cost: cost.seconds)
            for term in terms
        ]
        kept = sum(factor[:1].numel() * factor.element_size() for term in terms for factor in term.factors)
        found[name] = ParameterCosts(
            name,
            tuple(gradient.shape),
            " + ".join(type(term).__name__ for term in terms) or "none",
            gradient.describe(),
            kept + max((cost.bytes for cost in costs), default=0),
            not gradient.lost_at,
        )

    one = tuple(x[:1] for x in inputs), None if target is None else target[:1]
    in_dims = (0, None if target is None else 0)
    BatchPass(stream.loss, stream.params, one, in_dims, True, stream.randomness).run(note)
    return tuple(found[name] for name in stream.params)
