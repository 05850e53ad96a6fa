"""Memory: what counts as free, what a chunk may take of it, and runs in processes that have little."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from torch import nn

from psgrad.engine.execution import memory
from psgrad.engine.execution.memory import chunk_budget, is_out_of_memory
from psgrad.engine.execution.recompute import Recompute
from psgrad.engine.free_memory import free_host_memory
from tests.engine.execution.test_streaming import OUT_OF_MEMORY

ROOT = Path(__file__).parents[3]
GIB = 1 << 30


# -- What counts as want of memory ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error",
    [
        *(error() for error in OUT_OF_MEMORY.values()),
        OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)),
        RuntimeError(
            "[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: not enough memory: you tried to"
            " allocate 1"
        ),
        RuntimeError("std::bad_alloc"),
        RuntimeError(
            "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported at some other API"
            " call"
        ),
        RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
        RuntimeError("cuFFT error: CUFFT_ALLOC_FAILED"),
    ],
    ids=str,
)
def test_want_of_memory_in_many_words(error: Exception) -> None:
    assert is_out_of_memory(error)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("shape mismatch"),
        ValueError("can't allocate memory"),
        OSError(errno.ENOSPC, "No space left on device"),
    ],
    ids=str,
)
def test_other_errors_are_not_want_of_memory(error: Exception) -> None:
    assert not is_out_of_memory(error)


def test_what_the_allocator_says_when_asked_for_too_much() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)


# -- What is free --------------------------------------------------------------------------------------------


# What this process's control groups are, files of theirs, and how much is free of 8 GiB.
MACHINES: dict[str, tuple[str, dict[str, object], int]] = {
    "pages that the kernel gives back": ("", {}, 8 * GIB),
    "a container's limit": (
        "0::/\n",
        {
            "memory.max": 4 * GIB,
            "memory.current": 3 * GIB,
            "memory.stat": f"anon {2 * GIB}\ninactive_file {GIB // 2}",
        },
        3 * GIB // 2,
    ),
    "the tightest limit above the group": (
        "0::/batch/job-7\n",
        {
            "batch/memory.max": 2 * GIB,
            "batch/memory.current": GIB,
            "batch/job-7/memory.max": "max",
            "batch/job-7/memory.current": GIB // 4,
        },
        GIB,
    ),
    "control groups of version 1": (
        "5:cpu:/a\n4:memory:/a\n0::/\n",
        {
            "memory/a/memory.limit_in_bytes": 3 * GIB,
            "memory/a/memory.usage_in_bytes": 2 * GIB,
            "memory/a/memory.stat": f"total_inactive_file {GIB // 2}",
            "memory/memory.limit_in_bytes": 9223372036854771712,
            "memory/memory.usage_in_bytes": 0,
        },
        3 * GIB // 2,
    ),
    "a group over its limit": ("0::/\n", {"memory.max": GIB, "memory.current": 2 * GIB}, 0),
}


@pytest.mark.parametrize("name", MACHINES)
def test_free_memory_within_the_limits_of_a_machine(name: str, tmp_path: Path) -> None:
    groups, files, free = MACHINES[name]
    content = {
        "proc/meminfo": f"MemTotal: 99 kB\nMemFree: 1 kB\nMemAvailable: {8 * GIB // 1024} kB\n",
        "proc/self/cgroup": groups,
        **{f"sys/fs/cgroup/{file}": f"{text}\n" for file, text in files.items()},
    }
    for file, text in content.items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(text)
    assert free_host_memory(tmp_path) == free


def test_a_chunk_gets_a_share_or_what_it_is_given_and_on_a_cpu_no_more_than_pays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    monkeypatch.setattr(memory, "free_memory", lambda device: 40 << 20)
    assert chunk_budget(cpu) == chunk_budget(gpu) == 10 << 20
    assert chunk_budget(cpu, 30 << 20) == chunk_budget(gpu, 30 << 20) == 30 << 20
    monkeypatch.setattr(memory, "free_memory", lambda device: 40 << 30)
    assert chunk_budget(gpu) == 10 << 30
    assert chunk_budget(cpu) == chunk_budget(cpu, 8 << 30) < 1 << 30


# -- Processes of their own ----------------------------------------------------------------------------------

SETUP = """\
import resource
from types import SimpleNamespace
import torch
import torch.nn.functional as F
from psgrad.engine.execution.streaming import Stream
from psgrad.engine.measures.builtin.norms import GradientNorms
from psgrad.engine.execution.objective import Objective
from psgrad.data.rows import Block

torch.set_num_threads(1)
torch.manual_seed(0)


def peak():
    # of this program: getrusage would tell the parent's, which had as much when it forked
    status = dict(line.split(":", 1) for line in open("/proc/self/status"))
    return int(status["VmHWM"].split()[0]) * 1024


def rows(width, shape=()):
    def take(rows):
        n = len(rows)
        return Block((torch.randn(n, *shape, width),), torch.zeros(n, *shape, dtype=torch.int64))

    return SimpleNamespace(take=take)


def run(model, rows, count, **options):
    objective = Objective(model, F.cross_entropy)
    stream = Stream(objective.loss, objective.params, rows, **options)
    done = sum(chunk.stop - chunk.start for chunk in stream.run(count, [GradientNorms()]))
    return stream, done
"""


def in_a_process(script: str) -> list[int]:
    """The numbers that a script prints, after the lines above."""
    command = [sys.executable, "-c", SETUP + textwrap.dedent(script)]
    # Large blocks are not taken from the heap, whose gaps would be counted, too.
    heap = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "131072"}
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **heap}
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, timeout=120, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr
    return [int(word) for word in done.stdout.split()]


def test_blocks_run_again_when_memory_has_run_out() -> None:
    recompute = Recompute(False)
    recompute.add(nn.Sequential(nn.Sequential(*[nn.Sequential(nn.Linear(2, 2)) for _ in range(2)])))
    assert recompute.switch_on()
    assert recompute.on
    assert not recompute.switch_on()


@pytest.mark.sweep
def test_a_real_limit_on_memory_is_met_by_smaller_chunks() -> None:
    done, retries, chunk_size = in_a_process("""
        model = torch.nn.Sequential(torch.nn.Tanh(), torch.nn.Linear(16384, 10))
        run(model, rows(16384), 32 * 6, chunk_size=32)  # what PyTorch imports for a program is there
        used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + (96 << 20), resource.RLIM_INFINITY))
        stream, done = run(model, rows(16384), 2048, chunk_size=1024)
        print(done, stream.retries, stream.chunk_size)
    """)
    assert done == 2048
    assert 1 <= retries <= 12
    assert 1 <= chunk_size < 1024


@pytest.mark.sweep
@pytest.mark.skipif(sys.platform != "linux", reason="peak memory is read as Linux tells it")
def test_peak_memory_is_that_of_one_chunk_and_does_not_grow_with_the_dataset() -> None:
    count, chunk, width, layers = 500, 50, 4096, 8
    few, small, large, largest = in_a_process(f"""
        class Model(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.layers = torch.nn.ModuleList(torch.nn.Linear({width}, 4) for _ in range({layers}))

            def forward(self, x):
                return sum(layer(x * scale) for scale, layer in enumerate(self.layers, 1))

        model, peaks = Model(), []
        # In all of them a program is made.
        sizes = [(10, 1), *((count, {chunk}) for count in {(count, 10 * count, 40 * count)})]
        for count, chunk_size in sizes:
            run(model, rows({width}), count, chunk_size=chunk_size)
            peaks.append(peak())
        print(*peaks)
    """)
    factors = chunk * width * layers * 4  # of one chunk: what goes into each layer
    # All chunks' are ten times that, or a hundred times.
    assert factors / 2 < small - few < 5 * factors, (few, small, large)
    assert large - small < factors, (few, small, large)
    assert largest - large < 2 * factors, (large, largest)  # of 37 times that in the rows
