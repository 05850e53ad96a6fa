"""Normal random numbers from a stream of bits, in blocks that stay in the cache, on several threads.

Box and Muller (1958): with U uniform on (0, 1] and an angle V uniform on the circle, sqrt(-2 ln U) cos V and
sqrt(-2 ln U) sin V are independent standard normals. All is computed in float64. What is exact and what is
not:

- The radius takes 64 bits of the stream, read as a signed integer k: U = |k| 2^-63 + 2^-65, rounded to
  float64. Floating point has the same relative precision at all sizes. Where |k| < 2^46 (one pair in 2^17) U
  takes 8,192 further bits, which are set aside for each pair and made only there, so that U has steps of less
  than 2^-46 of itself wherever it lies, and the smallest is 2^-8257. No value is infinite, and none is beyond
  REACH = 107 standard deviations, where a normal variable is with probability 10^-2488.
- The angle takes 64 bits. The first 12 say which of 4,096 arcs it is in; a table has the cosine and the sine
  of each arc's middle. The other 52, read as a signed integer, say how far d it is from the middle, |d| <= pi
  / 4096. The cosine and the sine of d are taken for 1 - d^2/2 + d^4/24 and d - d^3/6, which are off by less
  than 2^-58. The pair is the product of these two complex numbers.
- A value is off by less than 2^-49 r + 2^-53 / r, r being its pair's radius: the logarithm is off by one unit
  in the last place; U, the root and each product by half of one; the table, the cosine and sine of d, and the
  sum of two products by 2^-53 r each.

The values are those of floating point; see rounding.py for what hides their gaps.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache, partial
from itertools import count

import numpy as np
import torch

# Pairs of a block, whose buffers fit the second-level cache.
PAIRS = 1 << 14
_CIPHER_BLOCK = 16
_SLACK = 15
_WIDTH = 16  # bytes of the stream a pair

# Bits of U that are set aside for each pair, beyond the first 64, and the |k| below which they are taken.
_FURTHER_BITS = 1 << 13
_FEW = 2.0**46
REACH = math.sqrt(2 * (65 + _FURTHER_BITS) * math.log(2))
"""The largest value there is, of either sign."""

# Bits of the angle that say its arc.
_ARC_BITS = 12

Take = Callable[[int], int]
"""(bytes) to the number of the first 16-byte block of a part of the stream that is not used elsewhere."""
Write = Callable[[int, int, np.ndarray], None]
"""(first 16-byte block, bytes, out): the stream from there on, to the beginning of out, which has room for 15
bytes more.
"""
Use = Callable[[int, np.ndarray], None]
"""(place of the first, values): what is done with the normals of one block, float64. They may be overwritten,
and not kept.
"""


def normal_blocks(total: int, deviation: float, take: Take, write: Write, use: Use) -> None:
    """Hand `total` normals of this standard deviation to `use`, block by block, in one of several threads
    each.

    Values 2p and 2p + 1 are the cosine and the sine of pair p; block b has the pairs from PAIRS * b on.
    """
    pairs = -(-total // 2)
    first = take(pairs * _WIDTH)
    further = take(pairs * (_FURTHER_BITS // 8))
    blocks = -(-pairs // PAIRS)
    numbers = count()

    def work() -> None:
        with _buffers() as buffers:
            while (block := next(numbers)) < blocks:
                before = block * PAIRS
                size = min(PAIRS, pairs - before) * _WIDTH
                write(first + before * _WIDTH // _CIPHER_BLOCK, size, buffers.raw)
                drawn = buffers.to_normals(
                    size // _WIDTH, deviation, partial(_further_bits, write, further, before)
                )
                use(2 * before, drawn[: total - 2 * before])

    helpers = min(torch.get_num_threads(), blocks // _BLOCKS_A_THREAD) - 1
    helping = [_pool().submit(work) for _ in range(helpers)]
    work()
    for done in helping:
        if not done.cancel():  # one that has not begun yet is not waited for: there is nothing left to do
            done.result()


# Fewer blocks than this for each thread, a quarter of a million numbers, are done before another thread has
# started: PyTorch's own keep the cores busy for a while after each of its operators.
_BLOCKS_A_THREAD = 8


@cache
def _pool() -> ThreadPoolExecutor:
    """The helper threads, kept from call to call: starting one takes longer than a small tensor's noise."""
    return ThreadPoolExecutor(max(1, torch.get_num_threads() - 1), thread_name_prefix="psgrad-noise")


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pool.cache_clear)  # a fork has none of its parent's threads


@cache
def _arcs() -> np.ndarray:
    """[4096] complex128: the cosine and the sine of each arc's middle, within 2^-53.

    From angles up to pi / 4, whose own rounding is least; the others are mirrored.
    """
    eighth = 1 << (_ARC_BITS - 3)
    angles = [math.pi / 4 * place / eighth for place in range(eighth + 1)]
    first = np.array([complex(math.cos(angle), math.sin(angle)) for angle in angles])
    quarter = np.concatenate([first, (first.imag + 1j * first.real)[-2:0:-1]])
    half = np.concatenate([quarter, -quarter.imag + 1j * quarter.real])
    return np.concatenate([half, -half])


class _Buffers:
    """A thread's memory for one block of pairs, and the functions that use it. Each function runs in the
    thread that calls it.

    Memory is reused inside a block, so that all of it fits the cache: the memory of the radii's bits later
    holds the arcs' numbers, and that of squares and sums the middles of the arcs.
    """

    def __init__(self) -> None:
        self.raw = np.empty(PAIRS * _WIDTH + _SLACK, dtype=np.uint8)
        self._radius, self._angle, self._scratch = np.empty(PAIRS), np.empty(PAIRS), np.empty(2 * PAIRS)
        self._turned = np.empty(PAIRS, dtype=np.complex128)

    def to_normals(self, pairs: int, deviation: float, further_bits: Callable[[int], int]) -> np.ndarray:
        """[2 * pairs] float64: normals of this deviation, from the raw bits.

        further_bits: a pair's number in this block to its further bits.
        """
        of_radii, of_angles = (
            self.raw[: 8 * pairs].view(np.int64),
            self.raw[8 * pairs : _WIDTH * pairs].view(np.int64),
        )
        self._radii(pairs, of_radii, further_bits)
        if deviation != 1:
            self._radius[:pairs] *= deviation
        arcs = of_radii
        np.right_shift(of_angles.view(np.uint64), np.uint64(64 - _ARC_BITS), out=arcs.view(np.uint64))
        of_angles <<= _ARC_BITS
        self._inside_arcs(pairs, of_angles)
        turned, middle = self._turned[:pairs], self._scratch[: 2 * pairs].view(np.complex128)
        np.take(_arcs(), arcs, out=middle, mode="clip")  # the default mode copies first
        turned *= middle
        return turned.view(np.float64)

    def _radii(self, pairs: int, bits: np.ndarray, further_bits: Callable[[int], int]) -> None:
        """sqrt(-2 ln U)"""
        radius = self._radius[:pairs]
        np.copyto(radius, bits, casting="unsafe")
        np.abs(radius, out=radius)
        small = np.flatnonzero(radius < _FEW) if radius.min() < _FEW else ()
        radius *= 2.0**-63
        radius += 2.0**-65
        np.log(radius, out=radius)
        radius *= -2.0
        np.sqrt(radius, out=radius)
        for pair in small:
            radius[pair] = _far_radius(abs(int(bits[pair])), further_bits(int(pair)))

    def _inside_arcs(self, pairs: int, places: np.ndarray) -> None:
        """The radii, turned by the angles d from the arcs' middles, which are places * 2 pi / 2^(64 +
        _ARC_BITS).
        """
        radius, angle, turned = self._radius[:pairs], self._angle[:pairs], self._turned[:pairs]
        square, part = self._scratch[:pairs], self._scratch[pairs : 2 * pairs]
        np.copyto(angle, places, casting="unsafe")
        angle *= math.pi * 2.0 ** (1 - 64 - _ARC_BITS)
        np.multiply(angle, angle, out=square)
        np.multiply(square, 1 / 24, out=part)
        part -= 0.5
        part *= square
        part += 1.0
        np.multiply(part, radius, out=turned.real)
        np.multiply(square, -1 / 6, out=part)
        part += 1.0
        part *= angle
        np.multiply(part, radius, out=turned.imag)


_kept = threading.local()


@contextmanager
def _buffers() -> Iterator[_Buffers]:
    """This thread's buffers, which are kept: new memory takes as long as the noise itself. A nested use gets
    new ones.
    """
    buffers: _Buffers = _kept.__dict__.pop("buffers", None) or _Buffers()
    try:
        yield buffers
    finally:
        _kept.buffers = buffers


def _further_bits(write: Write, further: int, before: int, pair: int) -> int:
    """The _FURTHER_BITS bits that are set aside for a pair: of the stretch that begins at block `further`,
    behind `before` pairs'.
    """
    size = _FURTHER_BITS // 8
    raw = np.empty(size + _SLACK, dtype=np.uint8)
    write(further + (before + pair) * size // _CIPHER_BLOCK, size, raw)
    return int.from_bytes(raw[:size].tobytes(), "little")


def _far_radius(k: int, bits: int) -> float:
    """sqrt(-2 ln U) of a U whose first 64 bits gave k = |k|, and whose further ones are `bits`.

    U is uniform on [k - 1/2, k + 1/2) 2^-63, as two signs stand for each |k|, and for 0, which has one sign,
    on half of that.
    """
    numerator = 2 * bits + 1 if k == 0 else ((2 * k - 1) << _FURTHER_BITS) + 2 * bits + 1
    exponent = 63 + _FURTHER_BITS + (2 if k == 0 else 1)  # U = numerator 2^-exponent
    length = numerator.bit_length()
    mantissa = (numerator >> max(length - 64, 0)) / 2.0 ** min(length, 64)  # from 1/2 to 1
    return math.sqrt(2 * ((exponent - length) * math.log(2) - math.log(mantissa)))
