"""Random numbers for sampling and noise.

They come from AES-256 in counter mode with a key from the operating system: a part of the stream says nothing
about the rest, which is what a privacy guarantee assumes.

A stream is never used twice. The counter only increases, a forked process changes the key, and a generator is
neither pickled nor copied. The key is never shown.
"""

from __future__ import annotations

import hashlib
import os
import threading
import weakref
from typing import Any, NoReturn, SupportsIndex

import numpy as np

from psgrad.engine.privacy.box_muller import Use, normal_blocks
from psgrad.errors import ConfigError

_CIPHER_BLOCK = 16
_PIECE = 1 << 18  # bytes that are encrypted at a time: they stay in the cache
_ZEROS = memoryview(bytes(_PIECE))  # what is encrypted: the key stream by itself
_SLACK = 15  # older versions of the library need memory for one more cipher block, less a byte


class Generator:
    """A stream of random bits of AES-256 in counter mode, and numbers made of them.

    Every call takes the next stretch of the counter, so its numbers depend only on the key, the calls before
    and its own size: not on the number of threads.

    Args:
        key: 32 bytes; None for a fresh one from the operating system, which alone is secure.
        name: its name in the ledger.

    Attributes:
        secure: whether the key is secret.
        drawn: how many blocks of 16 bytes were taken.
    """

    def __init__(self, key: bytes | None = None, name: str = "aes-256-ctr") -> None:
        self.name, self.secure = name, key is None
        self._lock = threading.Lock()
        self.drawn = 0
        self._key = os.urandom(32) if key is None else key
        self._nonce = os.urandom(8) if key is None else bytes(8)
        self._ready = threading.local()
        _streams.add(self)

    def uint64(self, n: int) -> np.ndarray:
        """[n]: the next n values, uniform on all of uint64."""
        start = self._take(8 * n)
        raw = np.empty(8 * n + _SLACK, dtype=np.uint8)
        self._write(start, 8 * n, raw)
        return raw[: 8 * n].view(np.uint64)

    def normal_blocks(self, total: int, deviation: float, use: Use) -> None:
        """Calls `use` with `total` float64 normals of this standard deviation, (place of the first, values
        [k]), block by block.

        A block is in the cache while `use` runs, and several threads may process several blocks at a time.
        """
        normal_blocks(total, deviation, self._take, self._write, use)

    def _take(self, size: int) -> int:
        """Set aside `size` bytes of the stream: the number of their first cipher block. No other call gets
        these.
        """
        with self._lock:
            start = self.drawn
            self.drawn += -(-size // _CIPHER_BLOCK)
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

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}>"

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        # Copies, pickles, and objects sent to a worker process.
        raise ConfigError(
            f"a random generator ({self.name}) was to be copied or pickled: a copy would repeat the noise",
            hint="make a generator where it is needed, with make_generator",
        )

    def _in_a_fork(self) -> None:
        """Leave the stream that the parent process goes on with."""
        self._lock = threading.Lock()  # a thread of the parent may have held the old one
        if self.secure:
            self._key, self._nonce = os.urandom(32), os.urandom(8)
        else:
            self._key = hashlib.sha256(b"psgrad, forked" + self._key).digest()


def make_generator(*, seed: int | None = None, position: int = 0) -> Generator:
    """A generator with a secret key.

    Args:
        seed: the noise can be repeated by anyone who knows it, so that nothing is private: for tests alone.
            The generator's name says so.
        position: with a seed: how many steps were taken before, so that a run that goes on does not repeat
            their noise.
    """
    if seed is None:
        return Generator()
    key = hashlib.sha256(f"psgrad aes seed {seed} position {position}".encode()).digest()
    return Generator(key, f"aes-256-ctr, insecure: seed {seed}")


# The generators that hold a stream of their own, which a forked process must not repeat.
_streams: weakref.WeakSet[Generator] = weakref.WeakSet()


def _leave_streams() -> None:
    for generator in list(_streams):
        generator._in_a_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_streams)
