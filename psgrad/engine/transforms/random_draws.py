"""Draws by label, for samples of a mapped function whose draws must not depend on other samples.

A sample's label is a whole number, one of the arguments of the batch. `draw_by_label` attaches it to the
level that maps it. From then on a random operator there is a function of (source, label, number of earlier
random operators in this run), and no generator is used. So draws do not depend on the sample's position in
the batch, on the other samples, or on the number of runs of the function. The operators are in
rules/labelled_draws.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from psgrad.engine.transforms import diagnostics
from psgrad.engine.transforms.operators import Op, aten, facts
from psgrad.engine.transforms.private_torch import FakeTensor, schema_of
from psgrad.engine.transforms.rules.registry import decompose, decomposition_of
from psgrad.engine.transforms.state import state
from psgrad.engine.transforms.tracer import Tracer
from psgrad.errors import TransformError

Bytes = npt.NDArray[np.uint8]


class Bits(Protocol):
    """Random bytes by label and number: equal for equal labels and numbers, independent otherwise."""

    def __call__(self, labels: npt.NDArray[np.uint64], number: int, size: int) -> Bytes:
        """[n, size] bytes for the labels [n]."""


class DrawingLevel(Protocol):
    """The interface of a level whose samples draw by label (see batch_values.py)."""

    def lift(self, physical: Any) -> torch.Tensor:
        """The tracer of a physical value [n, *shape]."""


# The random bits of a number in [0, 1) by type, as torch.rand draws it.
_DIGITS = {torch.float16: 11, torch.bfloat16: 8, torch.float32: 24, torch.float64: 53}


def draw_by_label(bits: Bits, label: torch.Tensor) -> None:
    """Make the levels that map `label` (int64 []) draw by it from now on. Without a mapped axis this has no
    effect.
    """
    levels: list[Any] = []
    while isinstance(label, Tracer):
        if label.carries_samples:
            levels.append(label.level)
        label = label.below()
    if levels:
        levels[0].drawer = Drawer(bits, label, levels)


def drawing_by_label() -> bool:
    """Whether any active level draws by label."""
    return any(getattr(level, "drawer", None) is not None for level in state.stack)


class Drawer:
    """Standard draws of one level, by its samples' labels, in the order of one run.

    Args:
        labels: int64 [*samples], one axis for each of `levels`, the outermost first.
        levels: those that map the labels, the innermost first.

    Attributes:
        number: the number of draws in this run. A caller that runs a part of the function again sets it back.

    Standard draws are computed on the CPU, whatever the device, and are the same on each: tensors of the
    level, of the shape of one sample.
    """

    def __init__(self, bits: Bits, labels: torch.Tensor, levels: Sequence[DrawingLevel]) -> None:
        self.number = 0
        self._bits, self._labels, self._levels = bits, labels, levels
        self._known: npt.NDArray[np.uint64] | None = None

    def run(self, op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of a random operator on these arguments, none of which has a level above this one."""
        given = _by_name(op, args, kwargs)
        if given.get("generator") is not None:
            raise TransformError(
                f"{op.name()} draws from a generator of its own{diagnostics.where()}",
                expected="draws without `generator`, which are independent for each record",
                cause=(
                    "the draws of a generator depend on the number of records that are computed together, and"
                    " on the number of runs"
                ),
                next_step=(
                    "leave out `generator`; draw a number that must be the same in each call once, where the"
                    " model is built"
                ),
            )
        program = programs.get(op)
        if program is None:
            if decomposition_of(op) is None:
                raise TransformError(
                    f"the random operator {op.name()} can't draw for each record"
                    f" separately{diagnostics.where()}",
                    expected=(
                        "random numbers of other distributions, such as torch.rand, randn, bernoulli,"
                        " multinomial and dropout"
                    ),
                    next_step="write it with these, or draw it outside the model",
                )
            return decompose(op, args, kwargs)
        drawn = program(self, given)
        mutated = facts(op).mutated
        return aten.copy_.default(args[mutated[0]], drawn) if mutated else drawn

    # -- standard draws --------------------------------------------------------------------------------------

    def below(self, p: float, shape: Sequence[int], device: Any) -> torch.Tensor:
        """Bool of this shape: true with probability p, with an error of at most 2^-32."""
        limit = min(max(p, 0.0), 1.0) * 2**32 - 0.5
        return self._lifted(
            self._physical(shape, torch.bool, 4, lambda raw: raw.view(np.uint32) <= limit).to(device)
        )

    def rand(self, shape: Sequence[int], dtype: torch.dtype, device: Any) -> torch.Tensor:
        """Uniform on [0, 1), multiples of 2^-24 in float32 and of 2^-53 in float64, as torch.rand has
        them.
        """
        digits = _DIGITS[_real(dtype)]
        wide, scale = digits > 32, np.float32(2.0**-digits)
        if wide:
            uniform = self._physical(
                _parts(shape, dtype), torch.float64, 8, lambda raw: (raw.view(np.uint64) >> 11) * 2.0**-53
            )
        else:
            uniform = self._physical(
                _parts(shape, dtype),
                torch.float32,
                4,
                lambda raw: (raw.view(np.uint32) >> (32 - digits)).astype(np.float32) * scale,
            )
        return self._lifted(_joined(uniform, dtype).to(device))

    def inside(self, shape: Sequence[int], dtype: torch.dtype, device: Any) -> torch.Tensor:
        """float64, uniform on (0, 1), neither end included: of 52 bits for float64 results, else of 32."""
        return self._lifted(self._inside(shape, dtype).to(device))

    def normal(self, shape: Sequence[int], dtype: torch.dtype, device: Any) -> torch.Tensor:
        """Standard normal, by Box and Muller's method; the parts of a complex number have a variance of 1 /
        2.
        """
        parts = _parts(shape, dtype)
        count = math.prod(parts)
        uniform = self._inside((2, (count + 1) // 2), _real(dtype))
        radius, angle = (-2 * uniform[..., 0, :].log()).sqrt(), 2 * math.pi * uniform[..., 1, :]
        normal = torch.cat([radius * angle.cos(), radius * angle.sin()], -1)[..., :count].reshape(
            *self._labels.shape, *parts
        )
        return self._lifted(
            _joined(normal * math.sqrt(0.5) if dtype.is_complex else normal, dtype).to(device)
        )

    def integers(
        self, low: int, high: int, shape: Sequence[int], dtype: torch.dtype, device: Any
    ) -> torch.Tensor:
        """Uniform on low, ..., high - 1, from 64 bits each: the probabilities of two values differ by at most
        (high - low) / 2^64 in relative terms.
        """
        count = np.uint64(min(high - low, 2**64 - 1))

        def whole(raw: Bytes) -> npt.NDArray[np.int64]:
            return (raw.view(np.uint64) % count).view(np.int64) + np.int64(low)

        return self._lifted(self._physical(shape, torch.int64, 8, whole).to(device, dtype))

    def permutation(self, n: int, dtype: torch.dtype, device: Any) -> torch.Tensor:
        """0, ..., n - 1 in random order."""
        return self._lifted(self._inside((n,), torch.float64).argsort(-1).to(device, dtype))

    def _inside(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        if dtype == torch.float64:
            return self._physical(
                shape, torch.float64, 8, lambda raw: ((raw.view(np.uint64) >> 12) + 0.5) * 2.0**-52
            )
        return self._physical(shape, torch.float64, 4, lambda raw: (raw.view(np.uint32) + 0.5) * 2.0**-32)

    def _physical(
        self, shape: Sequence[int], dtype: torch.dtype, size: int, make: Callable[[Bytes], Any]
    ) -> torch.Tensor:
        """[*samples, *shape] of this dtype on the CPU: the elementwise function `make` of `size` random bytes
        for each number.
        """
        number, self.number = self.number, self.number + 1
        whole = (*self._labels.shape, *shape)
        if isinstance(self._labels, FakeTensor):  # a pass that is planned without values
            return self._labels.new_empty(whole, dtype=dtype, device="cpu")
        if self._known is None:
            self._known = self._labels.reshape(-1).cpu().numpy().view(np.uint64)
        return torch.from_numpy(make(self._bits(self._known, number, size * math.prod(shape)))).reshape(whole)

    def _lifted(self, physical: torch.Tensor) -> torch.Tensor:
        for level in reversed(self._levels):
            physical = level.lift(physical)
        return physical


def _real(dtype: torch.dtype) -> torch.dtype:
    real = dtype.to_real() if dtype.is_complex else dtype
    if real not in _DIGITS:
        raise TransformError(
            f"random numbers of dtype {dtype}{diagnostics.where()}", expected="a floating-point dtype"
        )
    return real


def _parts(shape: Sequence[int], dtype: torch.dtype) -> tuple[int, ...]:
    return (*shape, 2) if dtype.is_complex else tuple(shape)


def _joined(parts: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.view_as_complex(parts.to(_real(dtype))) if dtype.is_complex else parts.to(dtype)


def _by_name(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """All arguments of a call by their names, with defaults for omitted ones; None for a dtype, whose default
    is a code.
    """
    schema = schema_of(op).arguments
    given = {argument.name: value for argument, value in zip(schema, args, strict=False)} | kwargs
    return {
        argument.name: given.get(argument.name, None if argument.name == "dtype" else argument.default_value)
        for argument in schema
    }


Program = Callable[[Drawer, dict[str, Any]], Any]
"""A random operator as a function of a drawer and of the operator's arguments by name."""

programs: dict[Op, Program] = {}
