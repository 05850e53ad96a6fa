"""Rows that differ in length: how a stream computes them, bucket by bucket (bucket_plan.py, ladder.py), and
whether a model ignores padding, which is checked on a few rows, each alone beside itself padded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from psgrad.engine.execution.bucket_plan import plan_buckets, positions_of
from psgrad.engine.execution.chunker import in_pieces
from psgrad.engine.execution.ladder import Bucket, buckets_of_few_shapes
from psgrad.engine.gradients.costs import Machine
from psgrad.engine.gradients.parts import in_order
from psgrad.engine.gradients.per_sample import per_sample_gradients
from psgrad.engine.gradients.queries import PerSampleGradients
from psgrad.engine.transforms.private_torch import tree_map
from psgrad.ragged import Block

# The Python of a pass, in operators for each of the model's tensors; bytes that a position moves beside its
# products, for each tensor and the root of its size. Measured on BERT and GPT-2 of 2 to 4 layers.
_OPERATORS_PER_TENSOR = 7
_BYTES_PER_POSITION = 80
_STREAM_BYTES = 1 << 22


@dataclass(frozen=True)
class ModelSize:
    """How large a model is, frozen parameters included; tables that are looked up count as tensors alone."""

    tensors: int
    numbers: int

    @classmethod
    def of(cls, model: nn.Module) -> ModelSize:
        """The size of a module. A weight that a table shares with another layer counts in that layer."""
        tables = (nn.Embedding, nn.EmbeddingBag)
        multiplied = {
            id(parameter): parameter.numel()
            for module in model.modules()
            if not isinstance(module, tables)
            for parameter in module.parameters(recurse=False)
        }
        return cls(sum(1 for _ in model.parameters()), sum(multiplied.values()))

    @classmethod
    def of_tensors(cls, params: Mapping[str, torch.Tensor]) -> ModelSize:
        return cls(len(params), sum(value.numel() for value in params.values()))

    def positions_of_a_pass(self, machine: Machine, dtype: torch.dtype) -> float:
        """How many positions take as long as what a pass takes whatever its size."""
        width = math.sqrt(self.numbers / max(self.tensors, 1))
        moved = _BYTES_PER_POSITION * self.tensors * width / machine.bandwidth(_STREAM_BYTES)
        position = 6 * self.numbers / machine.product_rate(dtype) + moved
        once = _OPERATORS_PER_TENSOR * self.tensors * machine.operator_seconds
        return once / max(position, 1e-12)


@dataclass(frozen=True)
class SumOverSamples:
    """What a way to compute chunks found that adds up over the samples: a pytree of tensors."""

    value: Any

    @classmethod
    def of_groups(cls, parts: Sequence[SumOverSamples], groups: Sequence[torch.Tensor]) -> SumOverSamples:
        return cls(tree_map(lambda *items: torch.stack(items).sum(0), *(part.value for part in parts)))


def joined_results(parts: list[Any], groups: list[torch.Tensor]) -> Any:
    """What was found of groups of samples, as of all together: by the kind's own `of_groups`, or, of tensors
    with a sample axis, in the samples' order.
    """
    join = getattr(type(parts[0]), "of_groups", None)
    return in_order(parts, groups) if join is None else join(parts, groups)


def first_rows(found: Any, count: int, of: int) -> Any:
    """What was found of the first `count` rows, of what was found of `of` rows: as many numbers of each."""

    if count == of:
        return found
    if hasattr(type(found), "at"):
        return found.at(slice(0, len(found) // of * count))
    return tree_map(lambda x: x[: len(x) // of * count], found)


# What a chunk has of the positions that are computed at once, where rows are as long as the longest, and its
# least number of rows; and what it has of them where the factors of all buckets are kept, or a bucket where
# none are.
_BUCKETS_OF_A_CHUNK, _LEAST_ROWS = 16, 64
_BUCKETS_OF_FACTORS = 2
# Positions of padding behind the longest row of a bucket. Models of the transformers library take another way
# for a row without padding; with one position each, the rows of a bucket agree, and it is one pass.
_SPARE = 1


class RaggedChunks:
    """The sizes of buckets now.

    Args:
        tokens: positions of a bucket at most, padded ones included; a single row may have more. None for no
            bound, or for one that is to be found.
        once: what a pass costs beside its positions, in positions.
        cut: whether chunks are cut where their factors would have too many positions.
        say: called with a sentence where memory runs out, and where padding is not ignored.

    Attributes:
        tokens: the bound in force.
        longest: the positions of the row that it was found by; None where it was not found here.
    """

    def __init__(self, tokens: int | None, once: float, cut: bool, say: Callable[[str], None]) -> None:
        self.tokens, self.once, self._cut, self._say = tokens, once, cut, say
        self.longest: int | None = None
        self._warned = False

    def computed(
        self,
        block: Block,
        run: Callable[[Block, int], Any],
        keeps_factors: bool,
        out_of_memory: Callable[[], None],
        filled: Callable[[Block, int], Any] | None = None,
    ) -> Any:
        """What `run` finds of each bucket, joined in the order of the rows. It gets the bucket's rows, and
        how many of the first ones count.

        A bucket that memory runs out on is halved, and the others stay done; where what was found of those
        fills the memory, the whole chunk fails. out_of_memory: called before the halves are tried. filled: as
        `run`, for buckets of few shapes, which are filled with copies of a row.
        """
        assert block.ragged is not None
        assert block.lengths is not None
        most = self.tokens
        if filled is None:
            planned = plan_buckets(block.lengths, block.ragged, once=self.once, most=most)
            buckets = [Bucket(places) for places in planned]
        else:
            buckets = buckets_of_few_shapes(block.lengths, block.ragged, once=self.once, most=most)
        parts: list[Any] = []
        groups: list[torch.Tensor] = []

        def rows_of(bucket: Bucket) -> Block:
            if bucket.rows is not None and bucket.lengths is not None:
                return block.filled(bucket.places, bucket.rows, bucket.lengths)
            return block.at(bucket.places, _SPARE) if len(bucket) < len(block) else block

        def found(bucket: Bucket) -> Any:
            compute = run if bucket.rows is None or filled is None else filled
            return compute(rows_of(bucket), len(bucket))

        def halves(bucket: Bucket) -> list[Bucket]:
            self._halve(rows_of(bucket))
            out_of_memory()
            return [Bucket(half) for half in bucket.places.tensor_split(2)]

        def final(bucket: Bucket) -> bool:
            return len(bucket) == 1 or (bool(parts) and keeps_factors)

        for bucket, part in in_pieces(buckets, found, halves, final=final):
            parts.append(part)
            groups.append(bucket.places)
        if len(parts) == 1 and bool((groups[0].diff() > 0).all()):
            return parts[0]
        return joined_results(parts, groups)

    def _halve(self, block: Block) -> None:
        """Buckets to come have no more positions than half of this one."""
        assert block.ragged is not None
        assert block.lengths is not None
        longest = block.lengths.amax(0, keepdim=True).numpy()
        self.tokens = max(1, len(block) * int(positions_of(longest, block.ragged)[0]) // 2)
        self._say(
            f"out of memory on {len(block)} rows of up to {longest.max()} positions; going on with"
            f" {self.tokens:,} positions at a time"
        )

    def rows_that_fit(self, block: Block) -> int:
        """How many of the first rows are a chunk whose factors are kept together."""
        if block.ragged is None or block.lengths is None or self.tokens is None or not self._cut:
            return len(block)
        positions = positions_of(block.lengths.numpy(), block.ragged).cumsum()
        return max(1, int((positions <= _BUCKETS_OF_FACTORS * self.tokens).sum()))

    def take(self, tokens: int, longest: int) -> int:
        """So many positions at a time from now on, or as many as were asked for. The number of rows of a
        chunk: enough to find rows of like length among them.
        """
        self.tokens = tokens if self.tokens is None else self.tokens
        self.longest = max(1, longest)
        return max(_BUCKETS_OF_A_CHUNK * self.tokens // self.longest, _LEAST_ROWS)

    def warn_of_padding(self, block: Block) -> None:
        """Say once that rows of unequal length are computed apart."""
        if self._warned or block.ragged is None or block.lengths is None or block.ragged.masked:
            return
        if bool((block.lengths != block.lengths[:1]).any()):
            self._warned = True
            self._say(
                "rows are computed together with rows of their own length only: the model does not ignore"
                " padding"
            )


# Rows that are compared, and by how much a loss and a gradient may differ, as kernels sum in another order. A
# model that reads padding is off by far more.
_ROWS = 2
_TOLERANCE = {torch.float64: (1e-10, 1e-9), torch.float32: (1e-5, 1e-4)}
_TOLERANCE_OF_HALVES = 2e-2, 5e-2


def padding_is_masked(
    loss: Callable[..., Any],
    params: Mapping[str, torch.Tensor],
    block: Block,
    *,
    halves: bool = False,
) -> bool:
    """Whether the shortest rows of a block have the same loss and gradient alone as padded to its longest.

    Args:
        loss: (params, inputs, target) of one sample to (loss, aux); see Objective.
        block: rows on the device; True where they are all as long.
        halves: whether products run in half precision.

    True also where a row fails alone: a pass over the rows reports it.
    """
    if block.ragged is None or block.lengths is None:
        return True
    positions = positions_of(block.lengths.cpu().numpy(), block.ragged)
    kind = next(iter(params.values())).dtype
    tolerances = _TOLERANCE_OF_HALVES if halves else _TOLERANCE.get(kind, _TOLERANCE_OF_HALVES)

    def of(inputs: tuple[torch.Tensor, ...], target: torch.Tensor | None) -> PerSampleGradients:
        dims = (0, None if target is None else 0)
        return per_sample_gradients(loss, params, inputs, target, in_dims=dims, has_aux=True)

    shorter = [row for row in positions.argsort(kind="stable").tolist() if positions[row] < positions.max()]
    for row in shorter[:_ROWS]:
        alone, some = block.at([row]), slice(row, row + 1)
        try:
            own = of(alone.inputs, alone.target)
        except Exception:
            return True
        try:
            padded = of(
                tuple(x[some] for x in block.inputs), None if block.target is None else block.target[some]
            )
        except Exception:
            return False
        if not _same(own, padded, *tolerances):
            return False
    return True


def _same(own: PerSampleGradients, padded: PerSampleGradients, of_loss: float, of_gradient: float) -> bool:
    """Whether losses and gradients of one sample agree, of which one parameter is materialised at a time."""
    losses = [float(each.losses[0]) for each in (own, padded)]
    if not all(map(math.isfinite, losses)):
        return losses[0] == losses[1] or all(map(math.isnan, losses))
    if abs(losses[0] - losses[1]) > of_loss * max(1.0, abs(losses[0])):
        return False
    apart = 0.0
    for name in own.shapes:
        values = [each.select(name).materialise()[name] for each in (own, padded)]
        apart += float((values[0].double() - values[1].double()).square().sum())
    return math.sqrt(apart) <= of_gradient * max(float(own.square_norms()[0].sqrt()), 1e-30)
