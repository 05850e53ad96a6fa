"""Random numbers for sampling and noise.

The default is AES-256 in counter mode with a key from the operating system: a part of the stream says nothing
about the rest, which is what a privacy guarantee assumes. torch's Mersenne twister and Philox are fast and
can be predicted from their output; the ledger says if one of them was used.

A stream is never used twice. The counter only increases, a forked process changes the key, and a generator is
neither pickled nor copied. The key is never shown.
"""

from __future__ import annotations

import hashlib
import math
import os
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Literal, NoReturn, SupportsIndex

import numpy as np
import torch
from torch import Tensor

from psgrad.engine.privacy.box_muller import REACH, Use, normal_blocks, normals
from psgrad.errors import ConfigError

GeneratorKind = Literal["aes", "torch"]

_CIPHER_BLOCK = 16
_PIECE = 1 << 18  # bytes that are encrypted at a time: they stay in the cache
_ZEROS = memoryview(bytes(_PIECE))  # what is encrypted: the key stream by itself
# Normals that are drawn at a time where a generator has no blocks of its own, and that are handed on at a
# time.
_DRAWN, _HANDED = 1 << 20, 1 << 15
_SLACK = 15  # older versions of the library need memory for one more cipher block, less a byte


class Generator(ABC):
    """A stream of random bits, and numbers made of them.

    name: which generator it is, as in the ledger. secure: whether it is a cryptographic one with a secret
        key. reach: the largest normal number that it gives, in standard deviations.
    """

    name: str
    secure: bool
    reach: float

    @abstractmethod
    def uint64(self, n: int) -> np.ndarray:
        """[n]: the next n values, uniform on all of uint64."""

    @abstractmethod
    def normal(
        self, shape: Sequence[int], dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
    ) -> Tensor:
        """[*shape]: independent values of the standard normal distribution.

        Raises ConfigError for a dtype other than float32 and float64: noise in less is not normal.
        """

    def normal_blocks(self, total: int, deviation: float, use: Use) -> None:
        """Calls `use` with `total` float64 normals of this standard deviation, (place of the first, values
        [k]), block by block, on the CPU.

        A block is in the cache while `use` runs, and several threads may process several blocks at a time.
        """
        for start in range(0, total, _DRAWN):
            drawn = self.normal((min(_DRAWN, total - start),), torch.float64).mul_(deviation).numpy()
            for place in range(0, len(drawn), _HANDED):
                use(start + place, drawn[place : place + _HANDED])

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}>"

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        # Copies, pickles, and objects sent to a worker process.
        raise ConfigError(
            f"a random generator ({self.name}) was to be copied or pickled",
            expected="one generator in one process",
            cause=(
                "a copy would repeat the noise, and whoever sees two results with the same noise can"
                " subtract it"
            ),
            next_step="make a generator where it is needed, with make_generator",
        )


class SecureGenerator(Generator):
    """AES-256 in counter mode.

    Every call takes the next stretch of the counter, so its numbers depend only on the key, the calls before
    and its own size: not on the number of threads.

    Args:
        key: 32 bytes; None for a fresh one from the operating system, which alone is secure.
        name: its name in the ledger.
    """

    reach = REACH

    def __init__(self, key: bytes | None = None, name: str = "aes-256-ctr") -> None:
        self.name, self.secure = name, key is None
        self._lock = threading.Lock()
        self._counter = 0
        self._key = os.urandom(32) if key is None else key
        self._nonce = os.urandom(8) if key is None else bytes(8)
        self._ready = threading.local()
        _streams.add(self)

    def uint64(self, n: int) -> np.ndarray:
        start = self._take(8 * n)
        raw = np.empty(8 * n + _SLACK, dtype=np.uint8)
        self._write(start, 8 * n, raw)
        return raw[: 8 * n].view(np.uint64)

    def normal(
        self, shape: Sequence[int], dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
    ) -> Tensor:
        _check_dtype(dtype)
        return normals(shape, dtype, self._take, self._write).to(device)

    def normal_blocks(self, total: int, deviation: float, use: Use) -> None:
        normal_blocks(total, deviation, self._take, self._write, use)

    def _take(self, size: int) -> int:
        """Set aside `size` bytes of the stream: the number of their first cipher block. No other call gets
        these.
        """
        with self._lock:
            start = self._counter
            self._counter += -(-size // _CIPHER_BLOCK)
        return start

    def _write(self, start: int, size: int, out: np.ndarray) -> None:
        """The stream's bytes from cipher block `start` on, `size` of them, to the beginning of out: uint8
        [size + 15 or more].
        """
        encryptor = self._encryptor_at(start)
        into = out.data
        for at in range(0, size, _PIECE):
            encryptor.update_into(_ZEROS[: size - at], into[at:])
        if size % _CIPHER_BLOCK == 0:
            self._ready.at = self._key, self._nonce, start + size // _CIPHER_BLOCK, encryptor

    def _encryptor_at(self, start: int) -> Any:
        """The cipher, from block `start` on: the one that this thread used last if it is there already,
        because a new one takes as long as a hundred numbers.
        """
        from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

        key, nonce, at, encryptor = self._ready.__dict__.pop("at", (None, None, None, None))
        if key is self._key and nonce is self._nonce and at == start:
            return encryptor
        place = self._nonce + start.to_bytes(8, "big")
        return Cipher(algorithms.AES(self._key), modes.CTR(place)).encryptor()

    def _in_a_fork(self) -> None:
        """Leave the stream that the parent process goes on with."""
        self._lock = threading.Lock()  # a thread of the parent may have held the old one
        if self.secure:
            self._key, self._nonce = os.urandom(32), os.urandom(8)
        else:
            self._key = hashlib.sha256(b"psgrad, forked" + self._key).digest()


class TorchGenerator(Generator):
    """torch's own generators, one a device: fast where they run on a GPU, and predictable from enough of the
    noise.

    Args:
        seed: None for one from the operating system.
        name: its name in the ledger.
    """

    reach = math.sqrt(106 * math.log(2))  # torch.randn is Box and Muller's, with uniforms of 53 bits

    def __init__(self, seed: int | None = None, name: str = "torch") -> None:
        self.name, self.secure = name, False
        self._seed = seed
        self._generators: dict[torch.device, torch.Generator] = {}
        _streams.add(self)

    def uint64(self, n: int) -> np.ndarray:
        cpu = torch.device("cpu")
        return (
            torch.empty(n, dtype=torch.int64, device=cpu)
            .random_(-(2**63), None, generator=self._on(cpu))
            .numpy()
            .view(np.uint64)
        )

    def normal(
        self, shape: Sequence[int], dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
    ) -> Tensor:
        _check_dtype(dtype)
        place = torch.empty(0, device=device).device  # with its index
        return torch.randn(tuple(shape), dtype=dtype, device=place, generator=self._on(place))

    def _on(self, device: torch.device) -> torch.Generator:
        """The device's generator, with a seed of its own."""
        if device not in self._generators:
            drawn = (
                os.urandom(8)
                if self._seed is None
                else hashlib.sha256(f"{self._seed} {device}".encode()).digest()[:8]
            )
            self._generators[device] = torch.Generator(device).manual_seed(
                int.from_bytes(drawn, "big", signed=True)
            )
        return self._generators[device]

    def _in_a_fork(self) -> None:
        """Leave the streams that the parent process goes on with."""
        self._generators = {}
        if self._seed is not None:
            self._seed = int.from_bytes(
                hashlib.sha256(f"psgrad, forked {self._seed}".encode()).digest()[:8], "big"
            )


def make_generator(kind: GeneratorKind, *, seed: int | None = None, position: int = 0) -> Generator:
    """A generator by name.

    Args:
        kind: 'aes' or 'torch'.
        seed: the noise can be repeated by anyone who knows it, so that nothing is private: for tests alone.
            The generator's name says so.
        position: with a seed: how many steps were taken before, so that a run that goes on does not repeat
            their noise.

    Raises ConfigError for another kind.
    """
    if kind not in ("aes", "torch"):
        raise ConfigError(
            f"the random generator is {kind!r}",
            expected="aes (cryptographic, the default) or torch (faster on a GPU, predictable)",
            next_step="leave `generator` out of the config",
        )
    if seed is None:
        return SecureGenerator() if kind == "aes" else TorchGenerator()
    key = hashlib.sha256(f"psgrad {kind} seed {seed} position {position}".encode()).digest()
    if kind == "aes":
        return SecureGenerator(key, f"aes-256-ctr, insecure: seed {seed}")
    return TorchGenerator(int.from_bytes(key[:8], "big"), f"torch, insecure: seed {seed}")


def _check_dtype(dtype: torch.dtype) -> None:
    if dtype not in (torch.float32, torch.float64):
        raise ConfigError(
            f"noise in {dtype} was asked for",
            expected="torch.float32 or torch.float64",
            cause=(
                "the noise was to have the dtype of the parameters; in half precision it has gaps that tell"
                " noise from signal"
            ),
            next_step="add noise to sums in float32 and convert the result",
        )


# The generators that hold a stream of their own, which a forked process must not repeat.
_streams: weakref.WeakSet[SecureGenerator | TorchGenerator] = weakref.WeakSet()


def _leave_streams() -> None:
    for generator in list(_streams):
        generator._in_a_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_streams)
