"""Random generators: the cipher's published stream, no bit used twice, and normals beside the formula in
float64 and their distribution.
"""

from __future__ import annotations

import copy
import math
import os
import pickle
import threading
import warnings
from collections.abc import Iterator
from fractions import Fraction

import mpmath
import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from scipy import stats

from psgrad.engine.privacy.box_muller import PAIRS, REACH
from psgrad.engine.privacy.generators import Generator, make_generator
from psgrad.errors import ConfigError
from tests.engine.privacy.planted import PlantedStream, normals

# The error of the first kind of every test of a distribution here. The streams have seeds, so a test passes
# always or never.
ALPHA = 1e-4


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


# -- the cipher ----------------------------------------------------------------------------------------------


def test_generator_equals_aes_counter_mode() -> None:
    """NIST SP 800-38A, F.5.5 (CTR-AES256.Encrypt): the output blocks of the first two counters."""
    generator = Generator(bytes.fromhex("603deb1015ca71be2b73aef0857d77811f352c073b6108d72d9810a30914dff4"))
    generator._nonce, generator.drawn = bytes.fromhex("f0f1f2f3f4f5f6f7"), 0xF8F9FAFBFCFDFEFF
    expected = bytes.fromhex("0bdf7df1591716335e9a8b15c860c502" + "5a6e699d536119065433863c8f657b94")
    assert generator.uint64(4).tobytes() == expected


def test_generator_stream_continues_across_pieces() -> None:
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

    generator = Generator(bytes(range(32)))
    count = 100_001
    counters = b"".join(block.to_bytes(16, "big") for block in range(count // 2 + 1))
    expected = Cipher(algorithms.AES(bytes(range(32))), modes.ECB()).encryptor().update(counters)[: 8 * count]
    assert generator.uint64(count).tobytes() == expected


class Watched(Generator):
    """Notes which cipher blocks are used."""

    def __init__(self) -> None:
        super().__init__()
        self.used: list[int] = []

    def _write(self, start: int, size: int, out: np.ndarray) -> None:
        super()._write(start, size, out)
        self.used.extend(range(start, start + -(-size // 16)))


@given(
    st.lists(
        st.tuples(st.sampled_from(["uint64", "normals"]), st.integers(0, 40)),
        max_size=8,
    )
)
def test_generator_cipher_blocks_used_once(calls: list[tuple[str, int]]) -> None:
    generator = Watched()
    for what, n in [*calls, ("normals", 4 * PAIRS + 3)]:
        if what == "uint64":
            generator.uint64(n)
        else:
            normals(generator, n)
    assert len(generator.used) == len(set(generator.used)) <= generator.drawn


def test_generator_shared_by_threads() -> None:
    generator = make_generator()
    result: list[int] = []
    workers = [
        threading.Thread(target=lambda: result.extend(generator.uint64(50).tolist())) for _ in range(8)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(set(result)) == 400


# -- whose stream it is --------------------------------------------------------------------------------------


def test_generator_new_instances_differ() -> None:
    words = [tuple(make_generator().uint64(2).tolist()) for _ in range(20)]  # type: ignore[arg-type]
    assert len(set(words)) == 20


@pytest.mark.parametrize("seed", [None, 5])
def test_generator_fork(seed: int | None) -> None:
    generator = make_generator(seed=seed)
    generator.uint64(3)
    receive, send = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks where there are threads
        child = os.fork()
    if child == 0:
        os.write(send, generator.uint64(8).tobytes())
        os._exit(0)
    os.waitpid(child, 0)
    theirs = np.frombuffer(os.read(receive, 64), dtype=np.uint64)
    os.close(receive)
    os.close(send)
    assert len(theirs) == 8
    assert not set(theirs.tolist()) & set(generator.uint64(8).tolist())


@pytest.mark.parametrize("way", [pickle.dumps, copy.copy, copy.deepcopy])
def test_generator_copy_refused(way: object) -> None:
    with pytest.raises(ConfigError) as caught:
        way(make_generator())  # type: ignore[operator]
    assert "to be copied or pickled" in caught.value.message
    assert "a copy would repeat the noise" in caught.value.message


def test_generator_key_hidden() -> None:
    generator = Generator()
    shown = f"{generator!r} {generator} {generator.name}"
    assert generator._key.hex() not in shown
    assert repr(generator._key) not in shown
    assert repr(generator) == "<Generator aes-256-ctr>"


def test_generator_seed_and_position() -> None:
    def words(seed: int, position: int) -> list[int]:
        return make_generator(seed=seed, position=position).uint64(4).tolist()

    assert words(1, 0) == words(1, 0)
    # (1, 10) and (11, 0) are written with the same digits.
    assert len({tuple(words(*of)) for of in [(1, 0), (1, 1), (2, 0), (1, 10), (11, 0), (-1, 0)]}) == 6


def test_generator_name() -> None:
    assert (make_generator().name, make_generator().secure) == ("aes-256-ctr", True)
    seeded = make_generator(seed=7, position=3)
    assert not seeded.secure
    assert seeded.name.endswith("insecure: seed 7")


# -- normals -------------------------------------------------------------------------------------------------


def angle_of(word: int) -> Fraction:
    """The angle that 64 bits (a signed integer) stand for, as a share of the circle: the middle of an arc,
    and how far from it.
    """
    arc, within = (word >> 52) & 0xFFF, word & (2**52 - 1)
    return Fraction(arc, 2**12) + Fraction(within - 2**52 if within >= 2**51 else within, 2**64)


def by_formula(generator: Generator, total: int) -> np.ndarray:
    """Box-Muller on the same bits by NumPy's functions, one block after another."""
    raw = np.empty(-(-total // 2) * 16 + 15, dtype=np.uint8)
    generator._write(0, len(raw) - 15, raw)
    blocks = []
    for start in range(0, -(-total // 2), PAIRS):
        pairs = min(PAIRS, -(-total // 2) - start)
        block = raw[start * 16 : (start + pairs) * 16].tobytes()
        size = np.frombuffer(block[: 8 * pairs], dtype=np.int64).astype(np.float64)
        turn = (
            np.array(
                [float(angle_of(word)) for word in np.frombuffer(block[8 * pairs :], dtype=np.int64).tolist()]
            )
            * 2
            * math.pi
        )
        radius = np.sqrt(-2 * np.log(np.minimum(np.abs(size) * 2.0**-63 + 2.0**-65, 1.0)))
        blocks.append(np.stack([radius * np.cos(turn), radius * np.sin(turn)], 1).reshape(-1))
    return np.concatenate(blocks)[:total] if blocks else np.empty(0)


@pytest.mark.parametrize(
    "shape", [(), (0,), (1,), (2,), (5, 7), (2 * PAIRS,), (2 * PAIRS + 1,), (3, 2 * PAIRS + 5)]
)
def test_generator_normals_equal_formula(shape: tuple[int, ...]) -> None:
    key = b"k" * 32
    result = normals(Generator(key), *shape)
    expected = torch.from_numpy(by_formula(Generator(key), math.prod(shape))).reshape(shape)
    torch.testing.assert_close(result, expected, rtol=0.0, atol=1e-14)
    error = (result - expected).abs()
    assert error.numel() == 0 or error.median() < 1e-15


def test_generator_normal_blocks(threads: None) -> None:
    """Each number once, at its place, whatever the threads; and what is done with a block may draw, too."""
    total = 9 * PAIRS + 5
    expected = normals(make_generator(seed=6), total) * 3.0
    other = make_generator(seed=7)
    for number in (1, 3):
        torch.set_num_threads(number)
        found = torch.full((total,), math.nan, dtype=torch.float64)

        def use(start: int, drawn: np.ndarray, found: torch.Tensor = found) -> None:
            before = drawn.copy()
            normals(other, 10)
            assert (drawn == before).all()
            found[start : start + len(drawn)] = torch.from_numpy(drawn)

        make_generator(seed=6).normal_blocks(total, 3.0, use)
        torch.testing.assert_close(found, expected, rtol=1e-15, atol=0)


def test_generator_independent_of_threads(threads: None) -> None:
    result = []
    for number in (1, 2, 5):
        torch.set_num_threads(number)
        result.append(normals(Generator(b"t" * 32), 7 * PAIRS + 11))
    assert all(torch.equal(result[0], other) for other in result[1:])


def test_generator_normals_in_inference_mode_and_under_another_default_device(threads: None) -> None:
    torch.set_num_threads(2)
    expected = normals(Generator(b"i" * 32), 6 * PAIRS)
    with torch.inference_mode():
        assert torch.equal(normals(Generator(b"i" * 32), 6 * PAIRS), expected)
    with torch.device("meta"):
        assert torch.equal(normals(Generator(b"i" * 32), 6 * PAIRS), expected)


def test_generator_normals_reach_all_zero_bits() -> None:
    """The largest value is that of bits that are all zero, and no normal variable of any run is beyond it."""
    largest = normals(PlantedStream(bytes(16)), 2)[0].item()
    assert largest == pytest.approx(REACH, rel=1e-15)
    assert stats.norm.logsf(largest) < 10**3 * math.log(1e-2)
    # What a sum that a record moved by 1/z deviations can't show: for z = .3 and delta = 1e-12, and for much
    # less noise.
    assert stats.norm.sf(largest - 1 / 0.3) == 0
    assert stats.norm.sf(largest - 50) == 0
    assert stats.norm.sf(math.sqrt(130 * math.log(2)) - 1 / 0.3) > 1e-12  # where U has 64 bits and no more


def test_generator_normals_further_bits() -> None:
    """A small U, in any pair of any block, takes its bits from a stretch of the stream that nothing else
    takes.
    """

    class Rarely(Watched):
        def _write(self, start: int, size: int, out: np.ndarray) -> None:
            super()._write(start, size, out)
            if size != 1024:  # the first bits of a block of pairs: every hundredth radius becomes tiny
                out[: size - size % 8].view(np.int64)[::100] = 5

    generator = Rarely()
    values = normals(generator, 3 * PAIRS)
    assert len(generator.used) == len(set(generator.used)) <= generator.drawn
    pairs = values.double().reshape(-1, 2)
    far = torch.cat([pairs[:PAIRS:100], pairs[PAIRS::100]]).norm(dim=1)
    assert far.min() > 8.9
    assert len(set(far.tolist())) > 240  # and not the one radius that 64 bits of 5 give


WORDS = st.integers(-(2**63), 2**63 - 1) | st.integers(0, 2**63 - 1).map(
    lambda k: 2**63 - 1 - (k >> (k % 64))
)  # and radii near 0


EXTREME = (0, 1, -1, 2, 1000, -(2**40), 2**46 - 1, 2**46, 2**47, 2**62, 2**63 - 1, -(2**63))
ANGLES = (0, -(2**63), 2**63 - 1, -1, 0x0001010101010101)  # 0, and the ends of the range


@example([(word, 0, angle) for word in EXTREME for angle in ANGLES])
@given(
    st.lists(st.tuples(WORDS, st.integers(0, 52), st.integers(-(2**63), 2**63 - 1)), min_size=1, max_size=50)
)
def test_generator_normals_float64_error(words: list[tuple[int, int, int]]) -> None:
    """2^-49 r + 2^-53 / r for a radius r: what `residual_epsilon` states of floating point rests on it."""
    with mpmath.workprec(200):
        for word, shift, angle in words:
            k = word >> shift
            bits = k.to_bytes(8, "little", signed=True) + angle.to_bytes(8, "little", signed=True)
            pair = normals(PlantedStream(bits), 2).tolist()
            whole = Fraction(2 * int.from_bytes(bits * 64, "little") + 1, 2**8193)
            uniform = (
                abs(k) + Fraction(1, 4)
                if abs(k) >= 2**46
                else whole / 2
                if k == 0
                else abs(k) - Fraction(1, 2) + whole
            )
            uniform = min(uniform / 2**63, Fraction(1))
            radius = mpmath.sqrt(
                -2 * mpmath.log(mpmath.mpf(uniform.numerator) / mpmath.mpf(uniform.denominator))
            )
            assert angle or pair[1] == 0
            if radius == 0:
                assert max(map(abs, pair)) <= 1e-9
                continue
            turn = 2 * mpmath.pi * angle_of(angle).numerator / angle_of(angle).denominator
            for result, expected in zip(
                pair, (radius * mpmath.cos(turn), radius * mpmath.sin(turn)), strict=True
            ):
                assert abs(result - expected) < 2.0**-49 * radius + 2.0**-53 / radius


def test_generator_normals_distribution() -> None:
    n = 400_000
    values = normals(make_generator(seed=3), n).numpy()
    assert stats.kstest(values, "norm").pvalue > ALPHA
    for limit in (2.0, 3.0, 4.0):
        expected = 2 * stats.norm.sf(limit)
        assert stats.binomtest(int((np.abs(values) > limit).sum()), n, expected).pvalue > ALPHA
    # Cosines and sines, neighbours, and the sizes of both are uncorrelated.
    for one, other in [
        (values[::2], values[1::2]),
        (values[:-1], values[1:]),
        (values[:-PAIRS], values[PAIRS:]),
    ]:
        for way in (np.asarray, np.abs, np.square):
            correlation = np.corrcoef(way(one), way(other))[0, 1]
            assert abs(correlation) * math.sqrt(len(one)) < stats.norm.isf(ALPHA / 2)
