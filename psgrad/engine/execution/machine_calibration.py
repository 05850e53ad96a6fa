"""The constants of this machine, measured in a second or two."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from psgrad.engine.gradients.costs import THIN_SIZES, Machine
from psgrad.engine.gradients.machine import device_name

aten = torch.ops.aten

_LONG = {
    "cpu": 256,
    "cuda": 4096,
}  # axes this long don't limit the rate; on a CPU a call has to be shorter than a busy system's time slice
_STREAMS = {
    "cpu": (1 << 10, 1 << 14, 1 << 18, 1 << 20, 1 << 22, 3 << 23, 5 << 23),
    "cuda": (1 << 16, 1 << 20, 1 << 24, 1 << 28),
}
_SHORTEST = 2e-4  # a quick call is repeated for so long, so that the clock's grain does not show
_LONGEST = 0.05  # a slow one is not
_ROUNDS = 12


def measure(device: torch.device) -> Machine:
    """The machine's constants: for each the best of a few timings, as other programs can only slow
    one down.
    """
    with torch.no_grad():
        return _measured(device)


def _measured(device: torch.device) -> Machine:
    kind = "cpu" if device.type == "cpu" else "cuda"
    clock = _CallTimer(device)
    long = _LONG[kind]
    products = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}
    rates = {name: _large_product_rate(clock, long, dtype) for name, dtype in products.items()}
    call = clock.seconds(torch.ones(8, device=device).neg)
    thin: dict[str, list[float]] = {"rows": [], "columns": [], "inner": []}
    for size in THIN_SIZES[:-1]:
        for name, sizes in (
            ("rows", (size, long, long)),
            ("columns", (long, size, long)),
            ("inner", (long, long, size)),
        ):
            thin[name].append(min(1.0, _product_rate(clock, *sizes, torch.float32) / rates["float32"]))
    stream = []
    for size in _STREAMS[kind]:
        x = torch.ones(size // 4, device=device)
        seconds = clock.seconds(lambda x=x: x * x)  # type: ignore[misc]
        stream.append((float(size), 2 * size / max(seconds - call, seconds / 10)))
    operator_seconds, kernel_seconds = _python_seconds(clock, device)
    return Machine(
        name=device_name(device),
        origin="measured",
        product=rates,
        thin_rows=(*thin["rows"], 1.0),
        thin_columns=(*thin["columns"], 1.0),
        thin_inner=(*thin["inner"], 1.0),
        matrix_seconds=_matrix_seconds(clock, device),
        stream=tuple(stream),
        scattered=_scattered(clock, device),
        transcendental=_transcendental(clock, device),
        pooling=_pooling(clock, device),
        convolution=_convolution(clock, device, 1) / rates["float32"],
        grouped_convolution=_convolution(clock, device, 16) / rates["float32"],
        attention=_attention(clock, device) / rates["float32"],
        call_seconds=call,
        operator_seconds=operator_seconds,
        kernel_seconds=kernel_seconds,
        asynchronous=device.type != "cpu",
    )


class _CallTimer:
    def __init__(self, device: torch.device) -> None:
        self.device = device

    def seconds(self, call: Callable[[], Any]) -> float:
        """Wall-clock seconds of one call, its kernels done: the best of a few rounds."""
        call()  # a first call makes handles and plans
        repeats = max(1, int(_SHORTEST / max(min(self._of(call, 1), self._of(call, 1)), 1e-7)))
        best, start = math.inf, time.perf_counter()
        for number in range(_ROUNDS):
            best = min(best, self._of(call, repeats))
            if number >= 2 and time.perf_counter() - start > _LONGEST:
                break
        return best

    def _of(self, call: Callable[[], Any], repeats: int) -> float:
        self._wait()
        start = time.perf_counter()
        for _ in range(repeats):
            call()
        self._wait()
        return (time.perf_counter() - start) / repeats

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _product_rate(clock: _CallTimer, rows: int, columns: int, inner: int, dtype: torch.dtype) -> float:
    a, b = (
        torch.ones(shape, dtype=dtype, device=clock.device) for shape in ((rows, inner), (inner, columns))
    )
    return 2 * rows * columns * inner / clock.seconds(lambda: torch.mm(a, b))


def _large_product_rate(clock: _CallTimer, long: int, dtype: torch.dtype) -> float:
    """Operations per second of a large product: the mean of one with a transposed weight, as layers have it,
    and one without. Passes have as many of either.
    """
    a, b = (torch.ones(shape, dtype=dtype, device=clock.device) for shape in ((2 * long, long), (long, long)))
    seconds = clock.seconds(lambda: torch.mm(a, b)) + clock.seconds(lambda: torch.mm(a, b.t()))
    return 8 * long**3 / seconds


def _matrix_seconds(clock: _CallTimer, device: torch.device) -> float:
    """What one more matrix of next to no operations costs in a batch."""
    few, many = torch.ones(64, 2, 2, device=device), torch.ones(1024, 2, 2, device=device)
    more = clock.seconds(lambda: torch.bmm(many, many)) - clock.seconds(lambda: torch.bmm(few, few))
    return max(more / (1024 - 64), 1e-11)


def _scattered(clock: _CallTimer, device: torch.device) -> float:
    rows = torch.ones(4096, 64, device=device)
    index = torch.arange(4096, device=device).flip(0)
    return 2 * rows.numel() * 4 / clock.seconds(lambda: rows[index])


def _transcendental(clock: _CallTimer, device: torch.device) -> float:
    x = torch.ones(1 << 18, device=device)
    return x.numel() / clock.seconds(x.exp)


def _convolution(clock: _CallTimer, device: torch.device, groups: int) -> float:
    """Operations a second of a 3x3 convolution and both its derivatives, of 16 images one by one or as
    groups.
    """
    x = torch.ones(16 // groups, groups * 32, 16, 16, device=device)
    weight = torch.ones(groups * 32, 32, 3, 3, device=device)
    geometry = ([1, 1], [1, 1], [1, 1], False, [0, 0], groups)
    g = aten.convolution.default(x, weight, None, *geometry)
    operations = 2.0 * g.numel() * 32 * 9
    if groups > 1:
        return operations / clock.seconds(
            lambda: aten.convolution_backward.default(g, x, weight, [0], *geometry, [False, True, False])
        )
    there = clock.seconds(lambda: aten.convolution.default(x, weight, None, *geometry))
    back = clock.seconds(
        lambda: aten.convolution_backward.default(g, x, weight, [0], *geometry, [True, True, False])
    )
    return 3 * operations / (there + back)


def _attention(clock: _CallTimer, device: torch.device) -> float:
    q = torch.ones(8, 4, 128, 64, device=device)
    return (
        4.0
        * 8
        * 4
        * 128
        * 128
        * 64
        / clock.seconds(lambda: torch.nn.functional.scaled_dot_product_attention(q, q, q))
    )


def _pooling(clock: _CallTimer, device: torch.device) -> float:
    x = (
        torch.arange(16 * 16 * 32 * 32, device=device).sin().reshape(16, 16, 32, 32)
    )  # equal numbers would be easy for branch prediction
    return x.numel() / clock.seconds(lambda: aten.max_pool2d_with_indices.default(x, [2, 2], [2, 2]))


def _python_seconds(clock: _CallTimer, device: torch.device) -> tuple[float, float]:
    """The Python of one operator of a pass, and around one kernel: of a chain so small that its kernels take
    no time.

    Norms run many more kernels than gradients by themselves, and no more operators.
    """
    from psgrad.engine.execution.pass_costs import trace_pass
    from psgrad.engine.gradients.per_sample import per_sample_gradients, per_sample_square_norms

    names = [str(number) for number in range(6)]
    params = {name: torch.ones(4, 4, device=device) for name in names}
    x = torch.ones(2, 4, device=device)
    call = clock.seconds(torch.ones(8, device=device).neg)

    def loss(params: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        for name in names:
            x = torch.nn.functional.linear(x, params[name]).relu()
        return x.sum()

    found = []
    for how in (per_sample_gradients, per_sample_square_norms):
        way = partial(how, loss, params, x)
        costs = trace_pass(lambda params, x, how=how: how(loss, params, x), params, x)  # type: ignore[misc]
        computing = sum(1.0 if not kernel.is_view else 0.5 for kernel in costs.kernels) * call
        found.append((clock.seconds(way) - computing, costs.operators, len(costs.kernels)))
    (less, operators, few), (more, _, many) = found
    kernel = max((more - less) / max(many - few, 1), call / 4)
    return max((less - few * kernel) / operators, kernel), kernel
