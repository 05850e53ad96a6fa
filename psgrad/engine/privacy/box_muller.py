"""Normal random numbers from a stream of bits, in blocks that stay in the cache, on several threads.

Box and Muller (1958): with U uniform on (0, 1] and an angle V uniform on the circle, sqrt(-2 ln U) cos V and sqrt(-2 ln U) sin V are
independent standard normals. What is exact and what is not:

- The radius takes 64 bits of the stream, read as a signed integer k: U = |k| 2^-63 + 2^-65, rounded to the dtype. Floating point has the
  same relative precision at all sizes, so the tail is as fine as the middle, and no draw needs a second look. U is at least 2^-65 (k = 0)
  and at most 1, so no value is infinite, and none is beyond sqrt(130 ln 2) = 9.5, where a normal variable is once in 10^21 draws.
- The angle takes 32 bits for float32 and 64 for float64.
- In float32, U near 1 has steps of 2^-24, so that a pair whose radius is below about 0.001 (one of two million) has one of few radii; a
  value is off by 2.5e-4 at most there, and by a few units in its last place elsewhere.

The values are those of floating point, and the guarantee of continuous noise is stated for real numbers; see discrete.py for noise that is
exact.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import count

import numpy as np
import torch
from torch import Tensor

# Pairs of a block, whose buffers fit the second-level cache.
PAIRS = 1 << 15
_CIPHER_BLOCK = 16
_SLACK = 15

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
            buffers.to_normals(part)

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
    """A thread's memory for one block of pairs, and what happens in it. numpy's functions: each runs in the thread that calls it."""

    def __init__(self, pairs: int, width: int, dtype: np.dtype) -> None:
        self.pairs = pairs
        self.raw = np.empty(pairs * width + _SLACK, dtype=np.uint8)
        self.radius, self.angle = np.empty(pairs, dtype=dtype), np.empty(pairs, dtype=dtype)
        # Views of the raw bits, which are written anew for every block.
        self.for_radius = self.raw[: 8 * pairs].view(np.int64)
        self.for_angle = self.raw[8 * pairs : width * pairs].view(np.int32 if width == 12 else np.int64)
        self.turn = math.pi * 2.0 ** (1 - 8 * self.for_angle.itemsize)

    def to_normals(self, out: np.ndarray) -> None:
        """The raw bits as normals: [2 * pairs], or one less."""
        radius, angle = self.radius, self.angle
        np.copyto(radius, self.for_radius, casting="unsafe")
        np.abs(radius, out=radius)
        radius *= 2.0**-63
        radius += 2.0**-65
        np.log(radius, out=radius)
        radius *= -2.0
        np.sqrt(radius, out=radius)
        np.copyto(angle, self.for_angle, casting="unsafe")
        angle *= self.turn
        for function, part in ((np.cos, out[: self.pairs]), (np.sin, out[self.pairs :])):
            function(angle[: len(part)], out=part)
            part *= radius[: len(part)]
