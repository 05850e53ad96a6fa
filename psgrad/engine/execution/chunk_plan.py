"""The memory that a pass over a chunk of samples will take, and the chunk that fits a budget."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from psgrad.engine.execution.pass_costs import Like, trace_pass
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
        peak_bytes: the most memory that the pass has at a time beyond the parameters and the chunk's own
            inputs; its results are in it.
        input_bytes: of the chunk's inputs and targets.
    """

    peak_bytes: int
    input_bytes: int


def plan_chunk(
    function: Callable[..., Any],
    params: dict[str, torch.Tensor],
    inputs: tuple[torch.Tensor, ...],
    target: torch.Tensor | None,
    chunk: int | None = None,
) -> ChunkPlan:
    """What `function(params, inputs, target)` will take, without running it.

    Args:
        function: of the parameters and a chunk of samples, for example per_sample_square_norms with its loss
            bound.
        inputs, target: rows on the device to compute on, [n, ...]; their values don't matter.
        chunk: how many rows to predict for, n where it is not said.

    Raises NotCapturable, or what the function raises on tensors without values, where its kernels depend on
    data.
    """
    rows = tree_map(
        lambda x: x if chunk is None or not isinstance(x, torch.Tensor) else Like.rows(x, chunk),
        (inputs, target),
    )
    costs = trace_pass(function, params, *rows)
    given = sum(
        math.prod(x.shape) * x.dtype.itemsize
        for x in tree_leaves(rows)
        if isinstance(x, (torch.Tensor, Like))
    )
    return ChunkPlan(costs.peak_bytes, given)


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
