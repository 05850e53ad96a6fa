"""Numerical tools of the kinds of terms: blocks of samples, sums in a safe precision, norms; and which
samples' norms may be wrong by rounding, so that they are computed again in a safer order or precision.

That choice depends on the data, and a program can't depend on data. So a program assumes that there are no
such samples (`Flags`). If there is one, the whole chunk is computed again without the program.

Axes: sample n, position t, row a, column b, group g.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence

import torch

from psgrad.engine.transforms.recorder import assumed

# Bytes of the intermediates of one block of samples: small enough for a processor's cache, large enough for a
# GPU's kernels.
BLOCK_BYTES = {"cpu": 4 << 20, "cuda": 256 << 20}

# A Gram sum under this share of its diagonal has lost about two digits: it is computed again without
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


class Workspace:
    """Named memory that is reused from block to block, because new memory costs more time than most writes
    into it.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._memory: dict[str, torch.Tensor] = {}

    def tensor(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A contiguous tensor. An earlier tensor of the same name shares its memory."""
        size, held = math.prod(shape), self._memory.get(name)
        if held is None or held.numel() < size or held.dtype != dtype:
            held = self._memory[name] = torch.empty(size, dtype=dtype, device=self.device)
        return held[:size].view(shape)


def accumulating_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which products of this dtype are summed: at least float32."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def accumulating(x: torch.Tensor) -> torch.Tensor:
    """The tensor in the precision in which it may be summed."""
    return x.to(accumulating_dtype(x.dtype))


def rows_of(x: torch.Tensor, samples: slice | torch.Tensor) -> torch.Tensor:
    """x[samples]; indices are copied by `index_select`, which takes a third of the time."""
    return (
        x.index_select(0, samples)
        if isinstance(samples, torch.Tensor) and samples.dtype == torch.int64
        else x[samples]
    )


def of_one_dtype(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """The tensors in the type that they promote to."""
    kind = tensors[0].dtype
    for tensor in tensors[1:]:
        kind = torch.promote_types(kind, tensor.dtype)
    return [tensor.to(kind) for tensor in tensors]


def sum_of_products(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """[n]: the sum over all other axes of x * y.

    Computed as a product and a sum, because PyTorch's sum is pairwise. A dot product of millions of float32
    numbers (bmm, einsum) adds them in sequence, and its error reaches 1e-4.
    """
    axes = list(range(1, x.dim()))
    if not axes:
        return x * y
    each = math.prod(x.shape[1:]) * x.element_size()
    parts = [(x[block] * y[block]).sum(axes) for block in blocks(x.shape[0], each, x.device)]
    return parts[0] if len(parts) == 1 else torch.cat(parts) if parts else x.new_zeros(0)


# Squares of smaller numbers have lost digits in float32, or are zero.
_SMALLEST_ROOT = 2.0**-60


def norms_at_least(x: torch.Tensor, axes: int | Sequence[int]) -> torch.Tensor:
    """Upper bounds of the norms along some axes, of the shape of x without them. They also hold if squares
    are too small for their type.
    """
    x = accumulating(x)
    count = math.prod(x.shape[axis] for axis in ([axes] if isinstance(axes, int) else axes))
    return torch.linalg.vector_norm(x, dim=axes) + _SMALLEST_ROOT * math.sqrt(count)


def square_norm(value: torch.Tensor) -> torch.Tensor:
    """[n]: the sum of the squares of each sample's value.

    Computed from the norms of short runs, which are squared and added pairwise. So the value is read once,
    and its squares are not stored. The norm of a whole value adds in sequence, and its error reaches 1e-4 for
    millions of float32 numbers.
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


# Squares added up in a row before the pairwise sum.
_RUN = 512


@functools.lru_cache(maxsize=4096)
def _runs(length: int) -> tuple[int, int]:
    """The number of runs of a value, and of remaining entries: none if a similar length of runs divides the
    value.
    """
    least = length // _RUN
    for runs in range(max(least, 1), least + 9):
        if least and length % runs == 0:
            return runs, 0
    return least, length - least * _RUN


def zero_where_lost(norms: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """[n]: the norms, with zero for samples whose squares are too small. A norm is a product of squares;
    left, right: the largest square in each factor, [n].

    Squares near the smallest number of a type have lost digits, which a large second factor would hide. The
    caller computes a norm of zero again in a wider type, which there is none of for float64. NaN (zero times
    infinity) is not changed.
    """
    if norms.dtype == torch.float64:
        return norms
    kind = torch.finfo(norms.dtype)
    return norms.masked_fill((torch.minimum(left, right) < kind.tiny / kind.eps) & ~norms.isnan(), 0)


def times_shared(factor: torch.Tensor, shared: torch.Tensor) -> torch.Tensor:
    """[n, g, t, b] times [g, b, c]: [n, g, t, c].

    One product for each group over all positions of all samples; `torch.matmul` would first repeat the shared
    tensor for each sample.
    """
    n, groups, positions, size = factor.shape
    if groups == 1:
        return (factor.reshape(n * positions, size) @ shared.squeeze(0)).reshape(
            n, 1, positions, shared.shape[2]
        )
    rows = factor.transpose(0, 1).reshape(groups, n * positions, size)
    return torch.bmm(rows, shared).reshape(groups, n, positions, shared.shape[2]).transpose(0, 1)


# The smallest squared norm that is safe in float32: squares leave its range long before gradients do.
TINY_SQUARE = 1e-30


class Flags:
    """The assumptions of a program: which samples it does not compute again."""

    def __init__(self) -> None:
        self._inaccurate: list[torch.Tensor] = []
        self._squares: dict[tuple[bool, torch.Size, int], list[list[torch.Tensor]]] = {}

    def add(self, inaccurate: torch.Tensor) -> None:
        """inaccurate: bool [n]."""
        self._inaccurate.append(inaccurate.any())

    def add_squares(self, norms: torch.Tensor, largest: list[torch.Tensor], *, exact: bool) -> None:
        """norms: [n], the squared norms of a term. largest: [n] for each of its factors, the largest size of
        a number in it. exact: whether it is float64.
        """
        if largest:
            key = (exact, norms.shape, len(largest))
            self._squares.setdefault(key, []).append([norms, *largest])

    def flag(self) -> torch.Tensor | None:
        """bool []: whether a sample must be computed again; None where none could be.

        A chunk that is flagged runs twice. So a norm of zero or infinity, or NaN, counts only where it comes
        from the range of the products: all factors are finite, and for the first two none is zero.
        """
        found = list(self._inaccurate)
        for (exact, _, _), terms in self._squares.items():  # all terms at once: kernels are what it costs
            norms = torch.stack([norms for norms, *_ in terms])  # [terms, n]
            sizes = torch.stack([size for _, *largest in terms for size in largest])
            sizes = sizes.view(len(terms), -1, *norms.shape[1:])
            wrong = norms.isnan()
            if not exact:
                wrong = wrong | ((norms == math.inf) | (norms < TINY_SQUARE)) & (sizes.amin(1) > 0)
            found.append((wrong & torch.isfinite(sizes.amax(1))).any())
        return torch.stack(found).any() if found else None


def samples_to_recompute(inaccurate: torch.Tensor) -> torch.Tensor:
    """The indices [k] of the samples in a mask [n]. While a program is recorded, none: it assumes so."""
    flags = assumed(Flags)
    if flags is None:
        return torch.nonzero(inaccurate).squeeze(1)
    flags.add(inaccurate)
    return torch.empty(0, dtype=torch.int64, device=inaccurate.device)
