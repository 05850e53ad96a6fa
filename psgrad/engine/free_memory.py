"""How much memory can be taken now: on a GPU, and on this machine within its limits."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import torch

# Bytes that are taken to be free where the system does not report it.
_UNKNOWN = 2 << 30


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
    leave. Of what processes share each one of a machine has the same part (LOCAL_WORLD_SIZE, as torchrun sets
    it).

    root: where /proc and /sys lie.
    """
    processes = int(os.environ.get("LOCAL_WORLD_SIZE") or 1)
    shared = [left // processes for left in (*_of_the_machine(root), *_of_control_groups(root))]
    left = [*shared, *_of_this_process(root)]
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
    except (ValueError, OSError, AttributeError):  # neither Linux nor a Unix that reports it
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
