"""A hook for tests: the process kills itself at one chosen durable operation, as a power switch or `kill -9` would.

Every place of psgrad.storage that touches the disk stands behind a `point`: opening a temporary file, writing it, syncing it, renaming
it, syncing the folder, and each line of a ledger. With PSGRAD_CRASH_AT=N in the environment when psgrad is imported, the process sends
itself SIGKILL at point number N, from 1. Without it a point does nothing.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

VARIABLE = "PSGRAD_CRASH_AT"


class _Hook:
    at: int | None = None
    passed = 0


_hook = _Hook()


def arm(at: int) -> None:
    """Count points from here on, and die at point number `at`; at 0, or one that never comes, they are only counted."""
    _hook.at, _hook.passed = at, 0


def passed() -> int:
    """How many points there were since `arm`."""
    return _hook.passed


def point(half: Callable[[], object] = lambda: None) -> None:
    """One place where the process may be killed; there, `half` does half of what was to follow, such as a torn write."""
    if _hook.at is None:
        return
    _hook.passed += 1
    if _hook.passed == _hook.at:
        half()
        os.kill(os.getpid(), signal.SIGKILL)


if VARIABLE in os.environ:
    arm(int(os.environ[VARIABLE]))
