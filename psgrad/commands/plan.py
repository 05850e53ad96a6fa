"""`psgrad plan`: what a run would do, and what it would take.

The time is that of two chunks of different sizes, which are run: what a chunk takes whatever its size, and
what each row takes. So is the memory.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from psgrad.commands.completion import completed_for_analyze
from psgrad.commands.setup import set_up
from psgrad.config import Config
from psgrad.engine.execution.chunk_replay import NOT_REPLAYED, PAYS_FROM
from psgrad.engine.execution.ladder import why_without_programs
from psgrad.engine.execution.memory import chunk_budget
from psgrad.engine.execution.streaming import LARGEST_AUTO_CHUNK, Stream
from psgrad.engine.gradients.batch_pass import BatchPass
from psgrad.engine.gradients.deferred import DeferredGradient
from psgrad.engine.gradients.per_sample import per_sample_square_norms
from psgrad.ragged import Block
from psgrad.run.results.plan import ParameterPlan, PlanResult
from psgrad.user_code import with_code_beside

# Rows that are read. They are repeated for larger chunks.
_READ = 8
# How often a chunk is timed, and the seconds after which it is not timed again, or not made larger.
_TIMES, _LONG = 5, 0.5


@with_code_beside
def plan(config: Config, *, say: Callable[[str], None] = lambda _: None) -> PlanResult:
    """What `analyze` would do with the config, and what it would take: the whole of `psgrad plan`.

    Runs the first few rows, and no more. Raises PsgradError as `analyze` does.
    """
    setup = set_up(completed_for_analyze(config))
    stream = setup.stream(say)
    found = replace(
        plan_run(stream, len(setup.samples)),
        parameters_live=setup.placement.where,
        parameters_reason=setup.placement.why,
        recomputed=setup.recompute.modules if setup.recompute is not None and setup.recompute.on else [],
    )
    if setup.supply is None:
        return found
    return replace(found, parameter_bytes=min(found.parameter_bytes, setup.supply.budget))


def plan_run(stream: Stream, rows: int) -> PlanResult:
    """What the stream's run over `rows` rows for norms will take. Reads and runs the first few rows, and no
    more. Of rows that differ in length, sizes are for rows as long as the longest of these, and times for
    rows of their lengths.

    Raises PsgradError, with the row, where the model or the loss fails on them.
    """
    stream.gradients([0])  # a model that fails says so, in a person's words
    block = stream.load_block(range(min(_READ, rows)))
    inputs, target = block.inputs, block.target
    budget = chunk_budget(stream.device, stream.memory)
    memory = stream.memory_of_chunks(per_sample_square_norms, block, budget, rows)
    size = memory.rows_within(budget, LARGEST_AUTO_CHUNK) if stream.automatic else stream.chunk_size
    size = min(size, rows)
    chunks = -(-rows // size)
    of_inputs = size * sum(x[0].nbytes for x in (*inputs, target) if x is not None)
    why = _why_not_replayed(stream, rows // size, block)
    fixed, each = _measured_seconds(partial(_seconds, stream, block, replayed=why is None), len(block), size)
    if why is None and not stream.counts.replayed:
        why = "; ".join(stream.counts.reasons) or "programs of these rows would take longer"
    sizes = "of one size" if block.ragged is None else "of rows padded to few lengths"
    return PlanResult(
        parameters=_parameters(stream, inputs, target),
        rows=rows,
        chunk_size=size,
        seconds=chunks * fixed + rows * each,
        chunk_seconds=fixed + size * each,
        peak_bytes=max(0, memory.of(size) - of_inputs),
        input_bytes=of_inputs,
        parameter_bytes=sum(p.numel() * p.element_size() for p in stream.params.values()),
        replayed=why is None,
        replay_reason=why or f"{chunks:,} chunks {sizes} are worth a program",
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


def _parameters(stream: Stream, inputs: Any, target: Any) -> list[ParameterPlan]:
    """The terms of each parameter's gradient and how their norms are taken, of the first row: one row agrees
    with itself on every branch.
    """
    found: dict[str, ParameterPlan] = {}

    def note(name: str, gradient: DeferredGradient) -> None:
        terms = [placed.term for placed in gradient.terms]
        kept = sum(factor[:1].numel() * factor.element_size() for term in terms for factor in term.factors)
        found[name] = ParameterPlan(
            name,
            "x".join(map(str, gradient.shape)) or "scalar",
            " + ".join(type(term).__name__ for term in terms) or "none",
            gradient.describe(),
            kept,
            not gradient.lost_at,
        )

    one = tuple(x[:1] for x in inputs), None if target is None else target[:1]
    in_dims = (0, None if target is None else 0)
    BatchPass(stream.loss, stream.params, one, in_dims, True, stream.randomness).run(note)
    return [found[name] for name in stream.params]
