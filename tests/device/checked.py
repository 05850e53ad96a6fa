"""Builds and registers the device of checked_device.cpp, under the name `checked`."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.utils import cpp_extension

CHECKED = "checked"
_SOURCE = Path(__file__).parent / "checked_device.cpp"
_LONGEST_BUILD = 600.0  # seconds


@cache
def checked_device() -> torch.device:
    """The device. It is compiled at the first call, in about a minute, and kept in the temporary folder."""
    folder = Path(tempfile.gettempdir()) / f"psgrad-checked-device-{torch.__version__}"
    folder.mkdir(exist_ok=True)
    lock = folder / "lock"  # a build that was killed leaves it, and the next one would wait without an end
    if lock.exists() and time.time() - lock.stat().st_mtime > _LONGEST_BUILD:
        lock.unlink(missing_ok=True)
    built: Any = cpp_extension.load("checked_device", [str(_SOURCE)], build_directory=str(folder))
    torch.utils.rename_privateuse1_backend(CHECKED)
    torch._register_device_module(CHECKED, _module())
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    built.register_hooks()
    for name, kernel in (*_lstm_cell(), *_gru_cell()):
        _library.impl(name, kernel, "PrivateUse1")
    return torch.device(CHECKED, 0)


_library = torch.library.Library("aten", "IMPL")
Kernels = list[tuple[str, Callable[..., Any]]]


def _lstm_cell() -> Kernels:
    """The kernels that PyTorch has for GPUs alone, by their definition."""

    def cell(of_input: Tensor, of_state: Tensor, cx: Tensor, *biases: Tensor | None) -> tuple[Tensor, ...]:
        gates = sum((bias for bias in biases if bias is not None), start=of_input + of_state)
        i, f, g, o = gates.chunk(4, 1)
        i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
        cy = f * cx + i * g
        return o * cy.tanh(), cy, torch.cat([i, f, g, o], 1)

    def back(
        of_hy: Tensor | None, of_cy: Tensor | None, cx: Tensor, cy: Tensor, gates: Tensor, has_bias: bool
    ) -> tuple[Tensor | None, ...]:
        i, f, g, o = gates.chunk(4, 1)
        h = torch.zeros_like(cy) if of_hy is None else of_hy
        c = h * o * (1 - cy.tanh() ** 2) + (0 if of_cy is None else of_cy)
        parts = c * g * i * (1 - i), c * cx * f * (1 - f), c * i * (1 - g**2), h * cy.tanh() * o * (1 - o)
        whole = torch.cat(parts, 1)
        return whole, c * f, whole.sum(0) if has_bias else None

    return [("_thnn_fused_lstm_cell", cell), ("_thnn_fused_lstm_cell_backward_impl", back)]


def _gru_cell() -> Kernels:
    def cell(
        of_input: Tensor,
        of_state: Tensor,
        hx: Tensor,
        bias: Tensor | None = None,
        other: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        r_i, z_i, n_i = (of_input if bias is None else of_input + bias).chunk(3, 1)
        r_h, z_h, n_h = (of_state if other is None else of_state + other).chunk(3, 1)
        r, z = (r_i + r_h).sigmoid(), (z_i + z_h).sigmoid()
        n = (n_i + r * n_h).tanh()
        return n + z * (hx - n), torch.cat([r, z, n, hx, n_h], 1)

    def back(of_hy: Tensor, kept: Tensor, has_bias: bool) -> tuple[Tensor | None, ...]:
        r, z, n, hx, n_h = kept.chunk(5, 1)
        of_n = of_hy * (1 - z) * (1 - n**2)
        of_r, of_z = of_n * n_h * r * (1 - r), of_hy * (hx - n) * z * (1 - z)
        left, right = torch.cat([of_r, of_z, of_n], 1), torch.cat([of_r, of_z, of_n * r], 1)
        return left, right, of_hy * z, left.sum(0) if has_bias else None, right.sum(0) if has_bias else None

    return [("_thnn_fused_gru_cell", cell), ("_thnn_fused_gru_cell_backward", back)]


def _module() -> ModuleType:
    """What torch asks of `torch.checked`."""
    module: Any = ModuleType(f"torch.{CHECKED}")
    module.is_available = lambda: True
    module.is_initialized = lambda: True
    module._is_in_bad_fork = lambda: False
    module.device_count = lambda: 1
    module.current_device = lambda: 0
    module.manual_seed_all = lambda seed: None
    # Operators without a generator of their own draw from the CPU's.
    module.get_rng_state = lambda device=None: torch.get_rng_state()
    module.set_rng_state = lambda state, device=None: torch.set_rng_state(state)
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    sys.modules[module.__name__] = module
    return module  # type: ignore[no-any-return]
