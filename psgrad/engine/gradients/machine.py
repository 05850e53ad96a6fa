"""The constants by which the work on a CPU, or on a GPU, is priced, and the name of a device."""

from __future__ import annotations

import functools
import re
from dataclasses import replace
from pathlib import Path

import torch

from psgrad.engine.gradients.costs import Machine

# One thread of a server of 2023 (an AMD EPYC of the fourth generation, PyTorch 2.13 with oneDNN): kernels
# were timed on tensors of many sizes, and rounded. Rates grow with the threads. benchmarks/crossover.py
# compares the choices that follow with the better one.
_CPU = Machine(
    product=8e10,
    halves=1,
    thin=4,
    thin_inner=4,
    matrix_seconds=2e-8,
    cached=7e10,
    streamed=1e10,
    cache=1 << 24,
    scattered=1.2e10,
    convolution=0.8,
    grouped_convolution=0.7,
    call_seconds=1e-6,
    operator_seconds=5e-5,
    kernel_seconds=5e-6,
)
# A GPU of a data centre of 2023, between an A100 and an H200: the rates of large products and of memory from
# its maker, reduced to what kernels reach, the others timed with benchmarks/gpu.py.
_GPU = Machine(
    product=4e13,
    halves=10,
    thin=100,
    thin_inner=45,
    matrix_seconds=2e-9,
    cached=2e12,
    streamed=2e12,
    cache=1 << 24,
    scattered=5e11,
    convolution=0.5,
    grouped_convolution=0.1,
    call_seconds=3e-6,
    operator_seconds=6e-5,
    kernel_seconds=6e-6,
)
# The threads that one memory has enough of.
_MEMORY_THREADS = 4


def machine(device: torch.device) -> Machine:
    """The constants for a device: of a CPU with the threads that PyTorch has, or of a GPU."""
    return _with_threads(torch.get_num_threads()) if device.type == "cpu" else _GPU


@functools.cache
def _with_threads(threads: int) -> Machine:
    few = min(threads, _MEMORY_THREADS)
    return replace(
        _CPU,
        product=_CPU.product * threads,
        cached=_CPU.cached * few,
        streamed=_CPU.streamed * few,
        scattered=_CPU.scattered * few,
    )


def device_name(device: torch.device) -> str:
    """The manufacturer's name of the device."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        text = ""
    models = re.findall(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return models[0].strip() if models else "cpu"
