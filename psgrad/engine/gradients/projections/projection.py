"""The base of random projections: their description, their columns, sums in a safe precision, and their
random numbers.

An entry of a projection matrix is a pure function of the seed, the parameter's name, the entry's place in the
parameter and its row of the matrix. So it does not depend on chunks, batches or devices, and any part of the
matrix can be computed separately. The generator is SplitMix64's finaliser of a counter (Steele, Lea and
Flood, "Fast splittable pseudorandom number generators", 2014, section 5), in int64 tensor arithmetic, whose
overflow is the same on all devices.
"""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from functools import lru_cache, wraps
from typing import Any, ClassVar, Literal

import torch

from psgrad.engine.gradients.deferred import DeferredGradient
from psgrad.engine.gradients.terms import Workspace, accumulating_dtype, block_bytes
from psgrad.engine.transforms.private_torch import without_modes
from psgrad.errors import TransformArgumentError

# Signs that one 64-bit word holds.
PER_WORD = 64
# Increased whenever the same description would give other numbers.
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
    """int64 words, each mixed in place by SplitMix64's finaliser, a bijection. spare: memory of the same
    shape for intermediates.
    """
    for shift, factor in _ROUNDS:
        shifted = torch.bitwise_right_shift(
            words, shift, out=spare
        )  # of signed numbers: the sign comes in from the left, and is masked off
        words ^= shifted.bitwise_and_((1 << (64 - shift)) - 1)
        if factor != 1:
            words *= factor
    return words


def streams(key: int, places: torch.Tensor) -> torch.Tensor:
    """int64 of the shape of `places`: the start of the sequence of words of each place."""
    return mixed(places * _GAMMA + key)


def words_at(stream: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
    """The words of these numbers (from zero) in these streams, which broadcast."""
    return mixed(stream + (number + 1) * _GAMMA)


def signs(some: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """int64 words [m, w] to float32 [m, 64 * w] of -1 and 1, a bit each.

    A bit is moved to the sign bit of a float: three passes over 32-bit words, much faster than a table of
    signs or a generator of PyTorch. out: memory for them, int32 [m, 2 * w, 32].

    Sign number j of a word is its bit 31 - j for j < 32, its bit 95 - j for the others.
    """
    halves = some.contiguous().view(torch.int32).unsqueeze(-1)  # the low half first
    bits = torch.bitwise_left_shift(halves, torch.arange(32, dtype=torch.int32, device=some.device), out=out)
    return bits.bitwise_and_(_SIGN_BIT).bitwise_or_(_ONE).view(torch.float32).flatten(1)


def sign_at(some: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
    """float32 of the words' shape: of each word the sign of this number, 0 to 63."""
    bit = torch.where(number < 32, 31 - number, 95 - number)
    return 1.0 - 2.0 * ((some >> bit) & 1)


def cached(count: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A decorator: the last results, up to `count`, are not computed again. They are computed outside of
    modes: a recorder would take their tensors for those of one program.
    """

    def decorator(function: Callable[..., Any]) -> Callable[..., Any]:
        @lru_cache(maxsize=count)
        def computed(*args: Any) -> Any:
            with without_modes():
                return function(*args)

        return wraps(function)(computed)

    return decorator


def normals(some: torch.Tensor) -> torch.Tensor:
    """int64 words [m, w] to float32 [m, 4 * w] normal numbers, 16 bits each, the lowest first: a look-up in
    2^16 equally likely quantiles.
    """
    places = some.contiguous().view(torch.int16).to(torch.int32).add_(1 << 15)
    return torch.index_select(_quantiles(some.device), 0, places.flatten()).view(places.shape)


@cached(8)
def _quantiles(device: torch.device) -> torch.Tensor:
    """float32 [65536]: the middle quantiles of the standard normal distribution, scaled to a variance
    of one.
    """
    middles = (torch.arange(1 << 16, dtype=torch.float64) + 0.5) / (1 << 16)
    values = torch.special.ndtri(middles)
    return (values / values.square().mean().sqrt()).float().to(device)


def below(some: torch.Tensor, bound: int) -> torch.Tensor:
    """Words to whole numbers in 0 .. bound - 1, uniform (to within bound / 2^31), from the upper 31 bits."""
    return (((some >> 33) & ((1 << 31) - 1)) * bound) >> 31


class MatrixEntries:
    """The entries of one parameter's matrix: random signs, float32.

    Large blocks are made in memory that is reused, because new memory costs more time than the numbers. A
    returned tensor is valid until the next call.

    Args:
        count: rows of the matrix. The first rows don't depend on it.
    """

    def __init__(self, key: int, count: int, device: torch.device) -> None:
        self.key, self.count = key, count
        self._numbers = (torch.arange(-(-count // PER_WORD), device=device) + 1) * _GAMMA
        self._memory = Workspace(device)

    def at(self, places: torch.Tensor) -> torch.Tensor:
        """[m, count]: for each of the places [m] its column of the matrix."""
        m, words = len(places), len(self._numbers)
        some, spare = (self._memory.tensor(name, (m, words), torch.int64) for name in ("words", "spare"))
        torch.add(streams(self.key, places).unsqueeze(1), self._numbers, out=some)
        mixed(some, spare)
        made = signs(some, self._memory.tensor("bits", (m, 2 * words, 32), torch.int32))
        return made[:, : self.count]


Per = Literal["total", "parameter"]


class Projection(ABC):
    """A random linear map P of gradients to few numbers, with E[<Px, Py>] = <x, y> over the seeds. Its kinds
    are frozen dataclasses.

    The map is a function of its description and of the parameters' names and shapes only. It is the same for
    every sample, chunk, device and machine, so gradients projected in different runs can be compared.

    With per='total' all parameters are projected to the same k columns, each by another map, and the results
    are summed: [n, k]. Inner products of rows estimate those of whole gradients. With per='parameter' each
    parameter has its own k columns, in the order of the names (`columns`). Inner products within a block
    estimate those of one parameter, and inner products of rows estimate their sum. This has less noise than
    'total' with the same k, because entries of different parameters are never added.
    """

    kind: ClassVar[str]
    seed: int
    per: Per
    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    @abstractmethod
    def width(self) -> int:
        """The number of columns: in all, or with per='parameter' of each parameter."""

    @abstractmethod
    def add(self, sums: torch.Tensor, name: str, gradient: DeferredGradient, dtype: torch.dtype) -> None:
        """Add a parameter's projected gradients, without `scale`, to sums [n, width] float64. dtype: of the
        products.
        """

    @abstractmethod
    def transposed(self, rows: torch.Tensor, name: str, shape: torch.Size) -> torch.Tensor:
        """[n, *shape] float64: the part of a parameter of this shape in P' times rows [n, width] float64."""

    @property
    @abstractmethod
    def scale(self) -> float:
        """The factor of the sums at the end."""

    @torch.no_grad()
    def apply(
        self, gradients: Mapping[str, DeferredGradient], samples: int, device: torch.device
    ) -> torch.Tensor:
        """[n, width], or [n, parameters * width]: the result of `PerSampleGradients.project`."""
        rows = ProjectedRows(self, {name: each.dtype for name, each in gradients.items()}, samples, device)
        for name, gradient in gradients.items():
            rows.add(name, gradient)
        return rows.joined()

    def columns(self, names: Iterable[str]) -> dict[str, slice]:
        """name -> its columns in the projection of gradients of these parameters; with per='total' all of
        them for every name.
        """
        start = 0 if self.per == "total" else self.width
        return {name: slice(place * start, place * start + self.width) for place, name in enumerate(names)}

    def describe(self) -> dict[str, Any]:
        """Plain values for a manifest: projections with the same description may be compared."""
        return {"kind": self.kind, **asdict(self), "version": VERSION}

    def _check(self, **sizes: int) -> None:
        """Refuse sizes that are not positive whole numbers, an unknown `per`, a seed that is not a whole
        number.
        """
        title = type(self).__name__
        for name, size in sizes.items():
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise TransformArgumentError(f"{title}: {name}={size!r}; expected a whole number, at least 1")
        if self.per not in ("total", "parameter"):
            raise TransformArgumentError(f"{title}: per={self.per!r}; expected 'total' or 'parameter'")
        if not isinstance(self.seed, int) or isinstance(self.seed, bool):
            raise TransformArgumentError(
                f"{title}: seed={self.seed!r}; expected a whole number",
                hint="a float would seed by its rounding",
            )


class ProjectedRows:
    """Collects the projected gradients of each parameter, in any order of the parameters. The sum over them
    is in their own order, so that its bits do not depend on which gradient came first.

    Args:
        dtypes: name -> dtype of the gradient, of all parameters in order.
    """

    def __init__(
        self, projection: Projection, dtypes: Mapping[str, torch.dtype], samples: int, device: torch.device
    ) -> None:
        self.projection, self.samples, self.device = projection, samples, device
        types = [accumulating_dtype(dtype) for dtype in dtypes.values()]
        self.dtype = torch.float64 if torch.float64 in types else torch.float32
        self._names = list(dtypes)
        self._found: dict[str, torch.Tensor] = {}
        self._total: torch.Tensor | None = None
        self._next = 0  # of the names: the first one that is not in the total

    @torch.no_grad()
    def add(self, name: str, gradient: DeferredGradient) -> None:
        """Project a parameter's gradient."""
        shape = self.samples, self.projection.width
        sums = self._found[name] = torch.zeros(shape, dtype=torch.float64, device=self.device)
        if gradient.shape.numel():
            self.projection.add(sums, name, gradient, self.dtype)
        while self.projection.per == "total" and self._next < len(self._names):
            found = self._found.pop(self._names[self._next], None)
            if found is None:
                break
            self._total = found if self._total is None else self._total.add_(found)
            self._next += 1

    def joined(self) -> torch.Tensor:
        """[n, width], or [n, parameters * width], once each parameter was added."""
        if self.projection.per == "total":
            parts = [] if self._total is None else [self._total]
        else:
            parts = [self._found[name] for name in self._names]
        rows = [(each * self.projection.scale).to(self.dtype) for each in parts]
        return (
            torch.cat(rows, 1) if rows else torch.zeros(self.samples, 0, dtype=self.dtype, device=self.device)
        )


def element_limit(device: torch.device, dtype: torch.dtype) -> int:
    """The largest number of elements of an intermediate."""
    return block_bytes(device) // dtype.itemsize
