"""What a pass over a chunk of samples will take, in time and memory, before it runs; and the chunk that fits
a budget.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from psgrad.engine.execution.pass_costs import Like, PassCosts, trace_pass
from psgrad.engine.gradients.costs import Machine
from psgrad.engine.gradients.machine import machine
from psgrad.engine.gradients.queries import PerSampleGradients
from psgrad.engine.transforms.private_torch import tree_leaves, tree_map

# Samples in the chunk from which `chunk_for` begins.
_FIRST_CHUNK = 8
# The most traces of `chunk_for`: each costs as much as a small chunk.
_MOST_TRACES = 5


@dataclass(frozen=True)
class ChunkPlan:
    """What a chunk will take.

    Attributes:
        seconds: estimated.
        peak_bytes: the most memory that the pass has at a time beyond the parameters and the chunk's own
            inputs; its results are in it.
        input_bytes: of the chunk's inputs and targets.
        kernels: how many run.
    """

    seconds: float
    peak_bytes: int
    input_bytes: int
    kernels: int


def plan_chunk(
    function: Callable[..., Any],
    params: dict[str, torch.Tensor],
    inputs: tuple[torch.Tensor, ...],
    target: torch.Tensor | None,
    chunk: int | None = None,
    *,
    replayed: bool = False,
) -> ChunkPlan:
    """What `function(params, inputs, target)` will take, without running it.

    Args:
        function: of the parameters and a chunk of samples, for example per_sample_square_norms with its loss
            bound.
        inputs, target: rows on the device to compute on, [n, ...]; their values don't matter.
        chunk: how many rows to predict for, n where it is not said.
        replayed: for a chunk that is replayed by a program.

    Raises NotCapturable, or what the function raises on tensors without values, where its kernels depend on
    data.
    """
    costs, given = costs_of_pass(function, params, inputs, target, chunk, replayed=replayed)
    device = next(iter(params.values())).device
    return ChunkPlan(
        seconds_of(costs, machine(device), replayed=replayed), costs.peak_bytes, given, len(costs.kernels)
    )


def costs_of_pass(
    function: Callable[..., Any],
    params: Any,
    inputs: Any,
    target: Any,
    chunk: int | None = None,
    *,
    replayed: bool = False,
) -> tuple[PassCosts, int]:
    """(costs, bytes of the chunk itself) of a function of parameters and a chunk; arguments as for
    `plan_chunk`.
    """
    rows = tree_map(
        lambda x: x if chunk is None or not isinstance(x, torch.Tensor) else Like.rows(x, chunk),
        (inputs, target),
    )
    costs = trace_pass(function, params, *rows, replayed=replayed)
    return costs, sum(
        math.prod(x.shape) * x.dtype.itemsize
        for x in tree_leaves(rows)
        if isinstance(x, (torch.Tensor, Like))
    )


def seconds_of(costs: PassCosts, on: Machine, *, replayed: bool = False) -> float:
    """What a pass takes on a machine, from its costs. Where calls return before their kernels are done, the
    slower of Python and kernels counts.
    """
    kernels = sum(kernel.seconds(on) for kernel in costs.kernels)
    if replayed:
        return kernels
    python = costs.operators * on.operator_seconds + len(costs.kernels) * on.kernel_seconds
    return max(kernels, python) if on.asynchronous else kernels + python


@dataclass(frozen=True)
class Correction:
    """What a model's own Python takes a chunk, and how much slower than priced its kernels are, from two
    small chunks that were run.
    """

    python: float
    share: float

    def __call__(self, kernels: float) -> float:
        """Seconds of a chunk whose kernels are priced at `kernels` seconds."""
        return self.python + self.share * kernels


# A price is not off by more: beyond that, something else than kernels was timed.
_WORST_SHARE = 4.0


def correction(small: tuple[float, float], large: tuple[float, float]) -> Correction:
    """From (seconds priced, seconds taken) of two chunks, the second of more samples."""
    (priced, taken), (priced_more, taken_more) = small, large
    slope = (taken_more - taken) / (priced_more - priced) if priced_more > priced else 1.0
    share = min(max(slope, 1 / _WORST_SHARE), _WORST_SHARE)
    return Correction(max(0.0, min(taken - share * priced, taken_more - share * priced_more)), share)


def chunk_for(trace_at: Callable[[int], ChunkPlan], budget: int, most: int = 1024) -> int:
    """The largest chunk, 1 to `most` samples, whose pass and inputs fit a budget of bytes, as far as a few
    traces show.

    trace_at: from a number of samples to what a chunk of them will take. Memory grows along a line from some
    size on (small intermediates fill a block first), so each trace corrects the line through the last two.

    What is returned was traced and fits, or is 1.
    """
    fits, beyond = 0, most + 1
    found: dict[int, int] = {}
    size = min(_FIRST_CHUNK, most)
    while len(found) < _MOST_TRACES and size not in found:
        prediction = trace_at(size)
        found[size] = prediction.peak_bytes + prediction.input_bytes
        if found[size] <= budget:
            fits = max(fits, size)
        else:
            beyond = min(beyond, size)
        if fits + 1 >= beyond:
            break
        size = max(fits + 1, min(_on_the_line(found, budget), beyond - 1))
    return max(fits, 1)


# Without a prediction: what activations and intermediates take, as a multiple of the factors that are kept.
_ROOM_PER_FACTOR_BYTE = 4


def chunk_for_factors(gradients: PerSampleGradients, parts: int, budget: int, most: int) -> int:
    """The number of samples, or of positions, 1 to `most`, that fit a budget of bytes. It follows from the
    bytes of the factors of these gradients, which are of `parts` samples or positions.
    """
    each = factor_bytes(gradients) // max(parts, 1)
    return max(1, min(most, budget // (max(1, each) * _ROOM_PER_FACTOR_BYTE)))


def factor_bytes(gradients: PerSampleGradients) -> int:
    """The bytes of the factors of all these gradients."""
    factors = [factor for gradient in gradients.gradients.values() for factor in gradient.factors]
    return sum(factor.numel() * factor.element_size() for factor in factors)


def _on_the_line(found: dict[int, int], budget: int) -> int:
    """The size at which the line through the two largest sizes met reaches the budget."""
    (small, less), (large, more) = [(0, 0), *sorted(found.items())][-2:]
    slope = max(1.0, (more - less) / (large - small))
    return int(large + (budget - more) / slope)
