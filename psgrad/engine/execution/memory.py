"""How much memory a chunk of samples may take, and which errors say that memory ran out. What is done then is
in chunker.py.
"""

from __future__ import annotations

import ctypes
import errno
import os
from contextlib import suppress
from functools import cache

import torch

from psgrad.engine.free_memory import free_memory

# A chunk may take the free memory divided by this: other programs need some, and no estimate is exact.
CHUNK_SHARE = 4
# On a CPU larger chunks save no time: a chunk of this size is far larger than the caches.
_CPU_CHUNK_BYTES = 128 << 20

# Messages of plain RuntimeErrors of the CPU's allocators and CUDA's libraries, some of which come long after
# the call that failed.
_NO_MEMORY = (
    "can't allocate memory",
    "not enough memory",
    "bad_alloc",
    "CUDA error: out of memory",
    "CUDA driver error: out of memory",
    "_STATUS_ALLOC_FAILED",
    "CUFFT_ALLOC_FAILED",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that memory ran out, on a GPU or on the CPU."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _NO_MEMORY)


def chunk_budget(device: torch.device, allowed: int | None = None) -> int:
    """Bytes that one chunk's computation may take beyond what is allocated already.

    allowed: the limit that the user set; None for a share of the free memory. On a CPU at most 128 MiB,
    beyond which chunks save no time.
    """
    budget = free_memory(device) // CHUNK_SHARE if allowed is None else allowed
    return min(budget, _CPU_CHUNK_BYTES) if device.type == "cpu" else budget


@cache
def keep_freed_memory() -> None:
    """Let the C library keep what is freed, up to 64 MiB, for the next tensors, where it would give it back
    to the system at once.

    New pages cost the system's time: a step that takes 10 MiB and gives it back spends a fifth of its time on
    them. glibc raises what it keeps to twice the size of a large block that is freed, and takes blocks of up
    to 32 MiB for it. The block that is freed here was never written to, so it takes no memory. Other C
    libraries ignore it.
    """
    with suppress(RuntimeError):  # a limit on the address space that leaves no room for it
        torch.empty((1 << 25) - (1 << 13), dtype=torch.uint8, device="cpu")


# Of mallopt, https://man7.org/linux/man-pages/man3/mallopt.3.html
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


@cache
def give_freed_memory_back() -> None:
    """Let the C library give what is freed back to the system, from 1 MiB on: the opposite of
    `keep_freed_memory`, for passes that are to take little memory.

    glibc keeps blocks of up to 32 MiB otherwise, in places that new blocks do not fit into: 3.3 GiB in place
    of 1.4 for a pass over GPT-2 XL's shape (benchmarks/offloaded.py).

    What is given back is new the next time, and the system fills it with zeros page by page. So PyTorch is
    asked to take pages of 2 MiB for tensors of that size. It reads its setting when it makes the first
    tensor of a process; from then on this has no effect.
    """
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    with suppress(OSError, AttributeError):  # no glibc
        mallopt = ctypes.CDLL(None).mallopt
        for setting in (_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD):
            mallopt(setting, 1 << 20)
