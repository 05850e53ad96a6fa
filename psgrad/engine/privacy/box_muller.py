"""Normal random numbers from a stream of bits, in blocks that stay in the cache, on several threads.

Box and Muller (1958): with U uniform on (0, 1] and an angle V uniform on the circle, sqrt(-2 ln U) cos V and sqrt(-2 ln U) sin V are
independent standard normals. What is exact and what is not:

- The radius takes 64 bits of the stream, read as a signed integer k: U = |k| 2^-63 + 2^-65, rounded to the dtype. Floating point has the
  same relative precision at all sizes. Where |k| < 2^46 (one pair in 2^17) U takes 8,192 further bits, which are set aside for each pair
  and made only there, so that U has steps of less than 2^-46 of itself wherever it lies, and the smallest is 2^-8257. No value is
  infinite, and none is beyond REACH = 107 standard deviations, where a normal variable is with probability 10^-2488.
- The angle takes 32 bits for float32 and 64 for float64.
- In float64 a value is off by less than 2^-49 r + 2^-53 / r, r being its pair's radius: the logarithm and the cosine are off by one unit in
  the last place, U, the angle, the root and the products by half of one each.
- In float32, U near 1 has steps of 2^-24, so that a pair whose radius is below about 0.001 (one of two million) has one of few radii; a
  value is off by 2.5e-4 at most there, and by a few units in its last place elsewhere. Private noise is drawn in float64.

The values are those of floating point; see rounding.py for what hides their gaps, and discrete.py for noise that is exact.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from itertools import count

import numpy as np
import torch
from torch import Tensor

# Pairs of a block, whose buffers fit the second-level cache.
PAIRS = 1 << 15
_CIPHER_BLOCK = 16
_SLACK = 15

# Bits of U that are set aside for each pair, beyond the first 64, and the |k| below which they are taken.
_FURTHER_BITS = 1 << 13
_FEW = 2.0**46
REACH = math.sqrt(2 * (65 + _FURTHER_BITS) * math.log(2))
"""The largest value there is, of either sign."""

Take = Callable[[int], int]
"""(bytes) to the number of the first 16-byte block of a stretch of the stream that is nobody else's."""
Write = Callable[[int, int, np.ndarray], None]
"""(first 16-byte block, bytes, out): the stream from there on, to the beginning of out, which has room for 15 bytes more."""


def normals(shape: Sequence[int], dtype: torch.dtype, take: Take, write: Write) -> Tensor:
    """Standard normals on the CPU, float32 or float64; the same for any number of threads.

    Values 2P b, ..., 2P b + P - 1 (P = PAIRS) are the cosines of block b and the next P its sines; the last block has fewer pairs.
    """
    total = math.prod(shape)
    result = torch.empty(total, dtype=dtype, device="cpu")
    out = result.numpy()
    width = 8 + (4 if dtype == torch.float32 else 8)  # bytes of the stream a pair
    first = take(-(-total // 2) * width)
    further = take(-(-total // 2) * (_FURTHER_BITS // 8))
    blocks = -(-total // (2 * PAIRS))
    numbers = count()

    def work() -> None:
        buffers: _Buffers | None = None
        while (block := next(numbers)) < blocks:
            part = out[2 * PAIRS * block : 2 * PAIRS * (block + 1)]
            pairs = -(-len(part) // 2)
            if buffers is None or buffers.pairs != pairs:
                buffers = _Buffers(pairs, width, out.dtype)
            write(first + block * PAIRS * width // _CIPHER_BLOCK, pairs * width, buffers.raw)
            buffers.to_normals(part, partial(_further_bits, write, further, block * PAIRS))

    helpers = min(torch.get_num_threads(), blocks // _BLOCKS_A_THREAD) - 1
    helping = [_pool().submit(work) for _ in range(helpers)]
    work()
    for done in helping:
        if not done.cancel():  # one that has not begun yet is not waited for: there is nothing left to do
            done.result()
    return result.reshape(tuple(shape))


# Fewer blocks than this for each thread, a quarter of a million numbers, are done before another thread has woken up: PyTorch's own still
# hold the cores for a while after each of its operators.
_BLOCKS_A_THREAD = 4


@cache
def _pool() -> ThreadPoolExecutor:
    """The threads that help, kept from call to call: to start one takes longer than a small tensor's noise."""
    return ThreadPoolExecutor(max(1, torch.get_num_threads() - 1), thread_name_prefix="psgrad-noise")


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pool.cache_clear)  # a fork has none of its parent's threads


class _Buffers:
    """A thread's memory for one block of pairs, and what happens in it. Each function runs in the thread that calls it: numpy's do, and
    PyTorch's do for as few numbers as a block has.
    """

    def __init__(self, pairs: int, width: int, dtype: np.dtype) -> None:
        self.pairs = pairs
        self.raw = np.empty(pairs * width + _SLACK, dtype=np.uint8)
        self.radius, self.angle = np.empty(pairs, dtype=dtype), np.empty(pairs, dtype=dtype)
        # Views of the raw bits, which are written anew for every block.
        self.for_radius = self.raw[: 8 * pairs].view(np.int64)
        self.for_angle = self.raw[8 * pairs : width * pairs].view(np.int32 if width == 12 else np.int64)
        self.turn = math.pi * 2.0 ** (1 - 8 * self.for_angle.itemsize)

    def to_normals(self, out: np.ndarray, further_bits: Callable[[int], int]) -> None:
        """The raw bits as normals: [2 * pairs], or one less. further_bits: a pair's number in this block to its further bits."""
        radius, angle = self.radius, self.angle
        np.copyto(radius, self.for_radius, casting="unsafe")
        np.abs(radius, out=radius)
        small = np.flatnonzero(radius < _FEW) if radius.min() < _FEW else ()
        radius *= 2.0**-63
        radius += 2.0**-65
        np.log(radius, out=radius)
        radius *= -2.0
        np.sqrt(radius, out=radius)
        for pair in small:
            radius[pair] = _far_radius(abs(int(self.for_radius[pair])), further_bits(int(pair)))
        np.copyto(angle, self.for_angle, casting="unsafe")
        angle *= self.turn
        for function, part in ((torch.cos, out[: self.pairs]), (torch.sin, out[self.pairs :])):
            function(torch.from_numpy(angle[: len(part)]), out=torch.from_numpy(part))  # numpy's take four times as long in float64
            part *= radius[: len(part)]


def _further_bits(write: Write, further: int, before: int, pair: int) -> int:
    """The _FURTHER_BITS bits that are set aside for a pair: of the stretch that begins at block `further`, behind `before` pairs'."""
    size = _FURTHER_BITS // 8
    raw = np.empty(size + _SLACK, dtype=np.uint8)
    write(further + (before + pair) * size // _CIPHER_BLOCK, size, raw)
    return int.from_bytes(raw[:size].tobytes(), "little")


def _far_radius(k: int, bits: int) -> float:
    """sqrt(-2 ln U) of a U whose first 64 bits gave k = |k|, and whose further ones are `bits`.

    U is uniform on [k - 1/2, k + 1/2) 2^-63, as two signs stand for each |k|, and for 0, which has one sign, on half of that.
    """
    numerator = 2 * bits + 1 if k == 0 else ((2 * k - 1) << _FURTHER_BITS) + 2 * bits + 1
    exponent = 63 + _FURTHER_BITS + (2 if k == 0 else 1)  # U = numerator 2^-exponent
    length = numerator.bit_length()
    mantissa = (numerator >> max(length - 64, 0)) / 2.0 ** min(length, 64)  # from 1/2 to 1
    return math.sqrt(2 * ((exponent - length) * math.log(2) - math.log(mantissa)))
