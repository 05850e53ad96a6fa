"""How much memory there is, how much of it a chunk of samples may take, and what it looks like when there is
none left.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path

import torch

# Of the free memory, what a chunk may take: other programs want some, and no estimate is exact.
_SHARE = 4
# On a CPU, where larger chunks stop paying: what a chunk touches has left the caches long before.
_CPU_CHUNK_BYTES = 128 << 20
# Where nobody tells how much is free.
_UNKNOWN = 2 << 30

# What the CPU's allocators and the libraries of CUDA say in plain RuntimeErrors, some of them long after the
# call that failed.
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
    """Bytes that one chunk's computation may take beyond what is there already.

    allowed: what the user gives it; None for a share of the free memory. More than pays is never taken.
    """
    budget = free_memory(device) // _SHARE if allowed is None else allowed
    return min(budget, _CPU_CHUNK_BYTES) if device.type == "cpu" else budget


@cache
def keep_freed_memory() -> None:
    """Let the C library keep what is freed, up to 64 MiB, for the next tensors, where it would give it back
    to the system at once.

    New pages cost the system's time: a step that takes 10 MiB and gives it back spends a fifth of its time on
    them. glibc raises what it keeps to twice the size of a large block that is freed, and takes blocks of up
    to 32 MiB for it. This one is never written to, so it takes no memory. Other C libraries make nothing of
    it.
    """
    with suppress(RuntimeError):  # a limit on the address space that leaves no room for it
        torch.empty((1 << 25) - (1 << 13), dtype=torch.uint8, device="cpu")


def free_memory(device: torch.device) -> int:
    """Bytes that can be taken now."""
    if device.type == "cuda":
        # PyTorch keeps what it has freed for itself, and for its next tensors.
        return (
            int(torch.cuda.mem_get_info(device)[0])
            + torch.cuda.memory_reserved(device)
            - torch.cuda.memory_allocated(device)
        )
    return free_host_memory()


def free_host_memory(root: Path = Path("/")) -> int:
    """Bytes that this process can take now: the least that the machine, its control groups and its own limits
    leave.

    root: where /proc and /sys lie.
    """
    left = [*_of_the_machine(root), *_of_control_groups(root), *_of_this_process(root)]
    return max(0, min(left)) if left else _UNKNOWN


def _of_the_machine(root: Path) -> Iterator[int]:
    """MemAvailable: with the page cache that the kernel gives back when asked, unlike the free pages
    alone.
    """
    for line in _text(root / "proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            yield int(line.split()[1]) * 1024
            return
    try:
        yield os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):  # neither Linux nor a Unix that tells
        return


def _of_control_groups(root: Path) -> Iterator[int]:
    """What the limits of containers, batch systems and services leave, of version 2 and of version 1: the
    group's and those above it.
    """
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            yield from _up_from(root / "sys/fs/cgroup", path, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            files = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
            yield from _up_from(root / "sys/fs/cgroup/memory", path, *files)


def _up_from(top: Path, path: str, limit: str, usage: str, cached: str) -> Iterator[int]:
    group = top / path.strip("/")
    for folder in (group, *(parent for parent in group.parents if parent == top or top in parent.parents)):
        most, used = _text(folder / limit).strip(), _text(folder / usage).strip()
        if most.isdigit() and used.isdigit():  # 'max' is no limit
            cache = next(
                (
                    int(line.split()[1])
                    for line in _text(folder / "memory.stat").splitlines()
                    if line.split()[0] == cached
                ),
                0,
            )
            yield int(most) - int(used) + cache


def _of_this_process(root: Path) -> Iterator[int]:
    """What a limit on the address space (ulimit -v) leaves."""
    try:
        import resource
    except ImportError:  # not a Unix
        return
    most = resource.getrlimit(resource.RLIMIT_AS)[0]
    pages = _text(root / "proc/self/statm").split()
    if most != resource.RLIM_INFINITY and pages:
        yield most - int(pages[0]) * os.sysconf("SC_PAGE_SIZE")


def _text(path: Path) -> str:
    """A file's content; nothing where there is none to read."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""
