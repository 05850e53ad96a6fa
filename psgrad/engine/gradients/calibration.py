"""The constants of this machine, measured in a second or two."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from psgrad.engine.gradients.costs import THIN_SIZES, Machine
from psgrad.engine.gradients.machines import device_name

aten = torch.ops.aten

_LONG = {"cpu": 512, "cuda": 4096}  # an axis that is no obstacle
_STREAMS = {"cpu": (1 << 10, 1 << 14, 1 << 18, 1 << 20, 1 << 22, 1 << 24, 1 << 26), "cuda": (1 << 16, 1 << 20, 1 << 24, 1 << 28)}
_SHORTEST = 2e-4  # a quick call is repeated for so long, so that the clock's grain does not show
_ROUNDS = 4


def measure(device: torch.device) -> Machine:
    """The machine's constants: for each the best of a few timings, as other programs can only slow one down."""
    with torch.no_grad():
        return _measured(device)


def _measured(device: torch.device) -> Machine:
    kind = "cpu" if device.type == "cpu" else "cuda"
    clock = _Clock(device)
    long = _LONG[kind]
    products = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}
    rates = {name: _product_rate(clock, long, long, long, dtype) for name, dtype in products.items()}
    call = clock.seconds(torch.ones(8, device=device).neg)
    thin: dict[str, list[float]] = {"rows": [], "columns": [], "inner": []}
    for size in THIN_SIZES[:-1]:
        for name, sizes in (("rows", (size, long, long)), ("columns", (long, size, long)), ("inner", (long, long, size))):
            thin[name].append(min(1.0, _product_rate(clock, *sizes, torch.float32) / rates["float32"]))
    stream = []
    for size in _STREAMS[kind]:
        x = torch.ones(size // 4, device=device)
        seconds = clock.seconds(lambda x=x: x * x, fewer=size > 1 << 24)  # type: ignore[misc]
        stream.append((float(size), 2 * size / max(seconds - call, seconds / 10)))
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
        convolution=_convolution(clock, device, 1) / rates["float32"],
        grouped_convolution=_convolution(clock, device, 16) / rates["float32"],
        attention=_attention(clock, device) / rates["float32"],
        call_seconds=call,
        operator_seconds=_operator_seconds(clock, device),
        asynchronous=device.type != "cpu",
    )


class _Clock:
    def __init__(self, device: torch.device) -> None:
        self.device = device

    def seconds(self, call: Callable[[], Any], *, fewer: bool = False) -> float:
        """Wall-clock seconds of one call, its kernels done: the best of a few rounds."""
        call()  # a first call makes handles and plans
        repeats = max(1, int(_SHORTEST / max(self._of(call, 1), 1e-7)))
        return min(self._of(call, repeats) for _ in range(2 if fewer else _ROUNDS))

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


def _product_rate(clock: _Clock, rows: int, columns: int, inner: int, dtype: torch.dtype) -> float:
    a, b = (torch.ones(shape, dtype=dtype, device=clock.device) for shape in ((rows, inner), (inner, columns)))
    return 2 * rows * columns * inner / clock.seconds(lambda: torch.mm(a, b))


def _matrix_seconds(clock: _Clock, device: torch.device) -> float:
    """What one more matrix of next to no operations costs in a batch."""
    few, many = torch.ones(64, 2, 2, device=device), torch.ones(1024, 2, 2, device=device)
    more = clock.seconds(lambda: torch.bmm(many, many)) - clock.seconds(lambda: torch.bmm(few, few))
    return max(more / (1024 - 64), 1e-11)


def _scattered(clock: _Clock, device: torch.device) -> float:
    rows = torch.ones(4096, 64, device=device)
    index = torch.arange(4096, device=device).flip(0)
    return 2 * rows.numel() * 4 / clock.seconds(lambda: rows[index])


def _transcendental(clock: _Clock, device: torch.device) -> float:
    x = torch.ones(1 << 18, device=device)
    return x.numel() / clock.seconds(x.exp)


def _convolution(clock: _Clock, device: torch.device, groups: int) -> float:
    """Operations a second of a 3x3 convolution and both its derivatives, of 16 images one by one or as groups."""
    x = torch.ones(16 // groups, groups * 32, 16, 16, device=device)
    weight = torch.ones(groups * 32, 32, 3, 3, device=device)
    geometry = ([1, 1], [1, 1], [1, 1], False, [0, 0], groups)
    g = aten.convolution.default(x, weight, None, *geometry)
    operations = 2.0 * g.numel() * 32 * 9
    if groups > 1:
        return operations / clock.seconds(lambda: aten.convolution_backward.default(g, x, weight, [0], *geometry, [False, True, False]))
    there = clock.seconds(lambda: aten.convolution.default(x, weight, None, *geometry))
    back = clock.seconds(lambda: aten.convolution_backward.default(g, x, weight, [0], *geometry, [True, True, False]))
    return 3 * operations / (there + back)


def _attention(clock: _Clock, device: torch.device) -> float:
    q = torch.ones(8, 4, 128, 64, device=device)
    return 4.0 * 8 * 4 * 128 * 128 * 64 / clock.seconds(lambda: torch.nn.functional.scaled_dot_product_attention(q, q, q))


def _operator_seconds(clock: _Clock, device: torch.device) -> float:
    """The Python around one kernel of a pass: of a chain so small that its kernels take no time."""
    from psgrad.engine.gradients.ledger import traced
    from psgrad.engine.gradients.per_sample import per_sample_square_norms

    weight, x = torch.ones(4, 4, device=device), torch.ones(2, 4, device=device)

    def loss(params: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        for _ in range(6):
            x = torch.nn.functional.linear(x, params["weight"]).relu()
        return x.sum()

    def norms(params: dict[str, torch.Tensor], x: torch.Tensor) -> Any:
        return per_sample_square_norms(loss, params, x)

    found = traced(norms, {"weight": weight}, x)
    kernels = len(found.kernels)
    alone = sum(1 for kernel in found.kernels if not kernel.is_view) * clock.seconds(torch.ones(8, device=device).neg)
    return max((clock.seconds(lambda: norms({"weight": weight}, x)) - alone) / kernels, 1e-7)
