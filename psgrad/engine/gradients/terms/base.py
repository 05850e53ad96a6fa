"""Terms: per-sample gradients that are sums over positions of products, kept as their factors until a query
contracts them.

Axes: sample n, position t (s), row a, column b, group g; a term's canonical value has the shape `shape`, per
sample. Every query of a term is exact; which order of contraction is cheaper is decided from the sizes, and
big intermediates are made for a few samples at a time.

Products of every sample's factor with what all samples share.
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from typing import Any

import torch

from psgrad.engine.gradients.costs import Cost, cheapest
from psgrad.engine.gradients.machine import machine
from psgrad.engine.gradients.precision_guard import samples_where

# Bytes of the intermediates of one block of samples: small enough for a processor's cache, large enough for a
# GPU's kernels.
BLOCK_BYTES = {"cpu": 4 << 20, "cuda": 256 << 20}

# A Gram sum under this share of its diagonal has lost about two digits: it is taken again without
# cancellation.
CANCELLATION = 0.05


def block_bytes(device: torch.device) -> int:
    """Bytes of the intermediates of one block of samples on this device."""
    return BLOCK_BYTES.get(device.type, BLOCK_BYTES["cuda"])


def blocks(n: int, bytes_per_sample: int, device: torch.device) -> Iterator[slice]:
    """The samples, as slices whose intermediates fit the block size."""
    step = max(1, min(n, block_bytes(device) // max(bytes_per_sample, 1)))
    for start in range(0, n, step):
        yield slice(start, min(start + step, n))


def accumulating_dtype(dtype: torch.dtype) -> torch.dtype:
    """At least float32: sums of products of halves are not taken in halves."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def accumulating(x: torch.Tensor) -> torch.Tensor:
    """The tensor in the precision in which it may be summed."""
    return x.to(accumulating_dtype(x.dtype))


def rows_of(x: torch.Tensor, samples: slice | torch.Tensor) -> torch.Tensor:
    """x[samples]; for places, whose copy takes a third of the time so, with a kernel of its own."""
    return (
        x.index_select(0, samples)
        if isinstance(samples, torch.Tensor) and samples.dtype == torch.int64
        else x[samples]
    )


def sum_of_products(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """[n]: the sum over all other axes of x * y.

    Written as a product and a sum, because PyTorch sums pairwise there: a dot product of millions of float32
    (bmm, einsum) adds them up in a row, and its error reaches 1e-4.
    """
    axes = list(range(1, x.dim()))
    if not axes:
        return x * y
    each = math.prod(x.shape[1:]) * x.element_size()
    parts = [(x[block] * y[block]).sum(axes) for block in blocks(x.shape[0], each, x.device)]
    return parts[0] if len(parts) == 1 else torch.cat(parts) if parts else x.new_zeros(0)


def joined(parts: list[torch.Tensor], term: Term, shape: tuple[int, ...] = ()) -> torch.Tensor:
    """[n, *shape] from the blocks of a term's samples; a single block is not copied, and there may be
    none.
    """
    if len(parts) == 1:
        return parts[0]
    return torch.cat(parts) if parts else torch.zeros(0, *shape, dtype=term.dtype, device=term.device)


class Term(ABC):
    """One summand of a per-sample gradient."""

    shape: tuple[int, ...]  # canonical, per sample

    @property
    @abstractmethod
    def factors(self) -> tuple[torch.Tensor, ...]:
        """The tensors that it keeps, sample axis first."""

    @property
    def samples(self) -> int:
        return self.factors[0].shape[0]

    @property
    def device(self) -> torch.device:
        return self.factors[0].device

    @property
    def dtype(self) -> torch.dtype:
        return self.factors[0].dtype

    @abstractmethod
    def at(self, samples: slice | torch.Tensor, dtype: torch.dtype | None = None) -> Term:
        """The same for some of the samples, in another precision if asked."""

    def among(self, places: torch.Tensor, count: int) -> Term:
        """The same among `count` samples: this term's stand at `places` [n], the others have zero."""
        rows = torch.full((count,), self.samples, device=self.device).index_copy(
            0, places, torch.arange(self.samples, device=self.device)
        )
        padded = {
            field.name: torch.cat([factor, factor.new_zeros(1, *factor.shape[1:])])
            for field in fields(self)  # type: ignore[arg-type]
            if isinstance(factor := getattr(self, field.name), torch.Tensor)
        }
        return replace(self, **padded).at(rows)  # type: ignore[type-var, return-value]

    @abstractmethod
    def square_norms(self) -> torch.Tensor:
        """[n]"""

    @property
    @abstractmethod
    def summands(self) -> int:
        """The most products that are added up for one element of a sample's value."""

    @abstractmethod
    def absolute_sums(self) -> torch.Tensor:
        """[n]: at least the sum, over all that is added up, of the norms of the summands. It is what the
        rounding of the value is proportional to: the value's own norm is smaller, by any factor where
        summands cancel. Not finite where a product overflows.
        """

    @abstractmethod
    def materialise(self) -> torch.Tensor:
        """[n, *shape]"""

    @abstractmethod
    def weighted_sum(self, weights: torch.Tensor) -> torch.Tensor:
        """[*shape]: the sum over samples, each times its weight [n]."""

    @abstractmethod
    def dot(self, vector: torch.Tensor) -> torch.Tensor:
        """[n]: the inner product of each sample's value with one vector [*shape]."""

    @abstractmethod
    def scaled(self, factor: float) -> Term:
        """The term times a number."""

    @abstractmethod
    def kin(self) -> tuple[Any, ...]:
        """What terms have in common that add up to one term."""

    @abstractmethod
    def plus(self, others: Sequence[Any]) -> Term:
        """The sum of this and others of its kin, as one term: of products, one with the positions of all."""

    @property
    def multiplications(self) -> int:
        """Those that the sum over samples takes for each sample."""
        return self.summands * math.prod(self.shape)

    def materialised_square_norms(self) -> torch.Tensor:
        """[n]: the norm of the written-out value, a block of samples at a time. Free of cancellation between
        positions.
        """
        kind = accumulating_dtype(self.dtype)
        size = math.prod(self.shape) * kind.itemsize
        parts = [
            square_norm(self.at(block, kind).materialise())
            for block in blocks(self.samples, size, self.device)
        ]
        return joined(parts, self)

    def ways(self) -> dict[str, Cost]:
        """The ways to the squared norms, each with its estimated cost a sample. By default the value is
        written out and passed over.
        """
        size = math.prod(self.shape) * accumulating_dtype(self.dtype).itemsize
        return {"materialise": Cost(machine(self.device).stream_seconds(3 * size, size), size)}

    def way(self) -> str:
        """The cheapest way that leaves room in a block."""
        return cheapest(self.ways(), block_bytes(self.device))

    def describe(self) -> str:
        """How the norm is computed, in a word or two."""
        return self.way()


# Squares of smaller numbers have lost digits in float32, or are zero.
_SMALLEST_ROOT = 2.0**-60


def norms_at_least(x: torch.Tensor, axes: int | Sequence[int]) -> torch.Tensor:
    """Norms along some axes, and somewhat more, so that squares too small for their type don't make a norm
    too small.
    """
    x = accumulating(x)
    count = math.prod(x.shape[axis] for axis in ([axes] if isinstance(axes, int) else axes))
    return torch.linalg.vector_norm(x, dim=axes) + _SMALLEST_ROOT * math.sqrt(count)


def square_norm(value: torch.Tensor) -> torch.Tensor:
    """[n]: the sum of the squares of each sample's value.

    Read once and not written: the norms of short runs, which are squared and added up pairwise. The norm of a
    whole value adds up in a row, and with millions of float32 its error reaches 1e-4.
    """
    value = accumulating(value)
    n, length = value.shape[0], value.shape[1:].numel()
    runs, rest = _runs(length)
    if not runs:
        return (value * value).flatten(1).sum(1) if value.dim() > 1 else value * value
    if not rest:
        return torch.linalg.vector_norm(value.reshape(n, runs, -1), dim=2).square().sum(1)
    value = value.flatten(1)
    whole = value[:, : length - rest].reshape(n, runs, -1)
    return torch.linalg.vector_norm(whole, dim=2).square().sum(1) + value[:, length - rest :].square().sum(1)


# Squares added up in a row before the pairwise sum takes over.
_RUN = 512


@functools.lru_cache(maxsize=4096)
def _runs(length: int) -> tuple[int, int]:
    """How many runs a value is cut into, and how many entries are left over: none, if runs of nearly that
    length leave none.
    """
    least = length // _RUN
    for runs in range(max(least, 1), least + 9):
        if least and length % runs == 0:
            return runs, 0
    return least, length - least * _RUN


def sums_of_grams(term: Term, left: torch.Tensor, right: torch.Tensor, groups: int) -> torch.Tensor:
    """[n]: squared norms of a term from the Gram matrices [n * groups, t, t] of its factors (the first is
    overwritten).

    Where the positions' contributions cancel, rounding would show: those samples are written out instead. The
    diagonal, each position by itself, says how large the numbers were that met in the sum.
    """
    largest = [
        gram.diagonal(dim1=1, dim2=2).reshape(-1, groups * gram.shape[1]).amax(1) for gram in (left, right)
    ]
    products = left.mul_(right)
    alone = products.diagonal(dim1=1, dim2=2).sum(1).reshape(-1, groups).sum(1)
    total = products.flatten(1).sum(1).reshape(-1, groups).sum(1)
    cancelled = samples_where(total < CANCELLATION * alone)
    if len(cancelled):
        total[cancelled] = term.at(cancelled, total.dtype).materialised_square_norms()
    return zero_where_lost(total, *largest)


def zero_where_lost(norms: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """[n] norms that are products of squares, of which the largest in each factor are given, [n].

    Squares near the smallest number of a type have lost their digits, and a large second factor would hide
    it. Zero says so: whoever asked takes it again in a wider type. What is no number (nothing times infinity)
    stays that.
    """
    kind = torch.finfo(norms.dtype)
    return norms.masked_fill((torch.minimum(left, right) < kind.tiny / kind.eps) & ~norms.isnan(), 0)


def times_shared(factor: torch.Tensor, shared: torch.Tensor) -> torch.Tensor:
    """[n, g, t, b] times [g, b, c]: [n, g, t, c].

    As one product for each group over all positions of all samples; `torch.matmul` would first repeat what is
    shared for each sample.
    """
    n, groups, positions, size = factor.shape
    if groups == 1:
        return (factor.reshape(n * positions, size) @ shared.squeeze(0)).reshape(
            n, 1, positions, shared.shape[2]
        )
    rows = factor.transpose(0, 1).reshape(groups, n * positions, size)
    return torch.bmm(rows, shared).reshape(groups, n, positions, shared.shape[2]).transpose(0, 1)
