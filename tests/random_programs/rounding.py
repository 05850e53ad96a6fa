"""Moves values by one unit in the last place at random: what the loop makes of that says how far rounding may
lead.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.random_programs.programs import Statement, unit_of


class Nudge:
    """Moves floating values, and the cotangents that pass, by one unit in the last place or none."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, x: Tensor, unit: float | None = None) -> Tensor:
        """unit: how far one unit in the last place is, of a number of size one; that of x's type if None."""
        if not x.is_floating_point():
            return x
        return _Moved.apply(x, self.steps(x) * (torch.finfo(x.dtype).eps if unit is None else unit))

    def steps(self, x: Tensor) -> Tensor:
        """-1, 0 or 1 for each number."""
        return torch.randint(-1, 2, x.shape, generator=self.generator).to(x.dtype)

    def of_kernel(self, x: Tensor) -> Tensor:
        """The result of a kernel moved, where no autograd records it."""
        return x * (1 + self.steps(x) * torch.finfo(x.dtype).eps) if x.is_floating_point() else x

    def again(self, x: Any) -> Any:
        """The same value, whose cotangent is moved: those of a value's several uses are rounded, each by
        itself, before they cancel.
        """
        return _Passed.apply(x, self) if isinstance(x, Tensor) and x.is_floating_point() else x

    def after(self, names: dict[str, Any], statement: Statement) -> None:
        x = names[statement.target]
        if not isinstance(x, Tensor) or not x.is_floating_point():
            return
        if statement.writes:
            x.copy_(self(x.clone(), unit_of(x.dtype, statement.text)))
        elif not x._is_view() and all(
            x is not other for name, other in names.items() if name != statement.target
        ):
            names[statement.target] = self(x, unit_of(x.dtype, statement.text)) + self.of_deviation(
                names, statement, x
            )

    def of_deviation(self, names: dict[str, Any], statement: Statement, x: Tensor) -> Tensor | int:
        """What is lost of a deviation of numbers: some units of the largest. Of equal numbers it is zero, or
        nearly, by the kernel.
        """
        found = re.search(r"(\w+)\.(std|var)\(|torch\.(std|var)_mean\((\w+)", statement.text)
        values = names.get(found[1] or found[4]) if found else None
        if not isinstance(values, Tensor) or not values.numel():
            return 0
        sign = 2 * torch.randint(0, 2, x.shape, generator=self.generator).to(x.dtype) - 1
        return 4 * sign * torch.finfo(x.dtype).eps * values.detach().abs().nan_to_num(0, 0, 0).max()

    def inside_softmax(self, name: str, g: Tensor, result: Tensor, dim: int) -> Tensor:
        """What the kernel of the derivative loses where the sum that it takes off cancels."""
        weights = result if name == "_softmax_backward_data" else result.exp()
        products = (g * result if name == "_softmax_backward_data" else g).abs().sum(dim, keepdim=True)
        unit = torch.randint(-1, 2, g.shape, generator=self.generator).to(g.dtype)
        return unit * torch.finfo(g.dtype).eps * (weights * products).nan_to_num(0, 0, 0)


class _Moved(torch.autograd.Function):
    """x times 1 + step. A NaN gets an arbitrary sign: operators may give it either, and copysign reads
    it.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, step: Tensor) -> Tensor:
        ctx.factor = 1 + step
        return torch.where(x.isnan(), torch.full_like(x, math.nan).copysign(step), x * ctx.factor)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return g * ctx.factor, None


class _Passed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, nudge: Nudge) -> Tensor:
        ctx.nudge = nudge
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return ctx.nudge(g), None


# Operators whose results are rounded. What copies or chooses is exact: numbers that are equal stay so.
_ARITHMETIC = """add sub rsub mul div addcmul addcdiv lerp pow square sqrt rsqrt reciprocal exp expm1 exp2 log
log1p log2 sin cos tanh
sigmoid erf sum mean var var_mean std prod cumsum cumprod logsumexp logcumsumexp norm linalg_vector_norm mm
bmm addmm baddbmm addmv mv dot
convolution linalg_solve_ex linalg_inv_ex linalg_cholesky_ex _linalg_det _linalg_slogdet _softmax _log_softmax
_softmax_backward_data
_log_softmax_backward_data sigmoid_backward tanh_backward native_layer_norm native_group_norm
native_batch_norm"""
_ROUNDED = frozenset(_ARITHMETIC.split())


class EveryOperatorRounds(TorchDispatchMode):
    """Inside it each operator's new result is moved, on the way forward and on the way back, also those that
    a statement does not name.

    seed: None moves nothing. PyTorch takes other formulas for some derivatives where a mode is there, so that
    what moving does is seen beside what is found inside a mode that moves nothing.
    """

    def __init__(self, seed: int | None) -> None:
        super().__init__()
        self.nudge = None if seed is None else Nudge(seed)

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = op(*args, **(kwargs or {}))
        nudge, name = self.nudge, op._schema.name.removeprefix("aten::")
        if nudge is None or name not in _ROUNDED:
            return out
        if name in ("_softmax_backward_data", "_log_softmax_backward_data"):
            out = out + nudge.inside_softmax(name, *args[:3])
        move = self.move(nudge)
        return (
            move(out)
            if isinstance(out, Tensor)
            else type(out)(move(x) if isinstance(x, Tensor) else x for x in out)
        )

    def move(self, nudge: Nudge) -> Callable[[Tensor], Tensor]:
        return nudge


class EveryKernelRounds(EveryOperatorRounds):
    """The same below psgrad's transforms, which call the kernels of plain tensors."""

    def move(self, nudge: Nudge) -> Callable[[Tensor], Tensor]:
        return nudge.of_kernel
