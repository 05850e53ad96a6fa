"""Random numbers by position: the entries of a projection matrix, the same on every machine, in whatever order they are asked for.

An entry is a pure function of the seed, the parameter's name, the entry's place in the parameter and its row of the matrix. Nothing is
drawn in turn, so that chunks, batches and devices can't change it, and a matrix that never exists as a whole can be asked for any part.
The generator is SplitMix64's finaliser over a counter (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014,
section 5), in int64 tensor arithmetic, which wraps around alike everywhere.
"""

from __future__ import annotations

import hashlib
import json
from functools import lru_cache
from typing import Literal

import torch

from psgrad.engine.gradients.projections.workspace import Workspace

Kind = Literal["rademacher", "gaussian"]
# Entries that one 64-bit word holds: a bit each, or 16 bits each.
PER_WORD: dict[str, int] = {"rademacher": 64, "gaussian": 4}
# Counts up whenever the same description would mean other numbers.
VERSION = 1


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word


_GAMMA = _signed(0x9E3779B97F4A7C15)
# (shift, multiplier) of the finaliser's rounds.
_ROUNDS = ((30, _signed(0xBF58476D1CE4E5B9)), (27, _signed(0x94D049BB133111EB)), (31, 1))
_SIGN_BIT, _ONE = -(1 << 31), 0x3F800000  # of a float32


def key_of(seed: int, *names: str) -> int:
    """A signed 64-bit key: the first bytes of SHA-256 over the seed and the names."""
    text = json.dumps([seed, *names])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little", signed=True)


def mixed(words: torch.Tensor, spare: torch.Tensor | None = None) -> torch.Tensor:
    """int64 words, each mixed in place: SplitMix64's finaliser, a bijection. spare: memory of the same shape to work in."""
    for shift, factor in _ROUNDS:
        shifted = torch.bitwise_right_shift(
            words, shift, out=spare
        )  # of signed numbers: the sign comes in from the left, and is masked off
        words ^= shifted.bitwise_and_((1 << (64 - shift)) - 1)
        if factor != 1:
            words *= factor
    return words


def streams(key: int, places: torch.Tensor) -> torch.Tensor:
    """int64 of the shape of `places`: where each place's own sequence of words begins."""
    return mixed(places * _GAMMA + key)


def words_at(stream: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
    """The words of these numbers (from zero) in these streams, which broadcast."""
    return mixed(stream + (number + 1) * _GAMMA)


def signs(some: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """int64 words [m, w] to float32 [m, 64 * w] of -1 and 1, a bit each.

    A bit is moved to where a float keeps its sign: three passes over 32-bit words, which no table of signs and no generator of PyTorch
    comes near. out: memory for them, int32 [m, 2 * w, 32].

    Sign number j of a word is its bit 31 - j for j < 32, its bit 95 - j for the others.
    """
    halves = some.contiguous().view(torch.int32).unsqueeze(-1)  # the low half first
    bits = torch.bitwise_left_shift(halves, torch.arange(32, dtype=torch.int32, device=some.device), out=out)
    return bits.bitwise_and_(_SIGN_BIT).bitwise_or_(_ONE).view(torch.float32).flatten(1)


def sign_at(some: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
    """float32 of the words' shape: of each word the sign of this number, 0 to 63."""
    bit = torch.where(number < 32, 31 - number, 95 - number)
    return 1.0 - 2.0 * ((some >> bit) & 1)


def normals(some: torch.Tensor, out: torch.Tensor | None = None, index: torch.Tensor | None = None) -> torch.Tensor:
    """int64 words [m, w] to float32 [m, 4 * w] normal numbers, 16 bits each, the lowest first: a look-up in 2^16 equally likely quantiles.

    out, index: memory for them and for int32 indices, flat.
    """
    quarters = some.contiguous().view(torch.int16)
    places = quarters.to(torch.int32) if index is None else index.view(quarters.shape).copy_(quarters)
    return torch.index_select(_quantiles(some.device), 0, places.add_(1 << 15).flatten(), out=out).view(quarters.shape)


@lru_cache(maxsize=8)
def _quantiles(device: torch.device) -> torch.Tensor:
    """float32 [65536]: the middle quantiles of the standard normal distribution, scaled to a variance of one."""
    middles = (torch.arange(1 << 16, dtype=torch.float64) + 0.5) / (1 << 16)
    values = torch.special.ndtri(middles)
    return (values / values.square().mean().sqrt()).float().to(device)


def below(some: torch.Tensor, bound: int) -> torch.Tensor:
    """Words to whole numbers in 0 .. bound - 1, uniform (to within bound / 2^31), from the upper 31 bits."""
    return (((some >> 33) & ((1 << 31) - 1)) * bound) >> 31


class Entries:
    """The entries of one parameter's matrix: float32, of mean zero and variance one.

    Large blocks are made in memory that is kept, as fresh memory costs more than the numbers: what a call returns holds until the next.

    Args:
        count: rows of the matrix. The first rows don't depend on it.
    """

    def __init__(self, kind: Kind, key: int, count: int, device: torch.device) -> None:
        self.kind, self.key, self.count = kind, key, count
        self._numbers = (torch.arange(-(-count // PER_WORD[kind]), device=device) + 1) * _GAMMA
        self._memory = Workspace(device)

    def at(self, places: torch.Tensor) -> torch.Tensor:
        """[m, count]: for each of the places [m] its column of the matrix."""
        m, each, words = len(places), PER_WORD[self.kind], len(self._numbers)
        some, spare = (self._memory.kept(name, (m, words), torch.int64) for name in ("words", "spare"))
        torch.add(streams(self.key, places).unsqueeze(1), self._numbers, out=some)
        mixed(some, spare)
        if self.kind == "rademacher":
            made = signs(some, self._memory.kept("bits", (m, 2 * words, 32), torch.int32))
        else:
            flat = (m * words * each,)
            made = normals(some, self._memory.kept("normals", flat, torch.float32), self._memory.kept("index", flat, torch.int32))
        return made[:, : self.count]
