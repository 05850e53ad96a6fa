"""The place of the ledger of a private run, by which a copy of its folder, or a restored one, is recognised.

A file's number (inode) and time of birth are given to it once; a copy has others, also under the same name
and with the same dates. A file that was overwritten in place, and a whole disk that was copied bit for bit,
have the same.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from psgrad.errors import LedgerError

_IN_WORDS = {
    "path": "it was at {then} and is at {now}",
    "inode": "it is another file",
    "born": "the file was made anew",
}

# Of Linux' statx: relative to the current folder; ask for the time of birth; the size of the answer; where
# the time is in it.
_AT_CURRENT, _BIRTH, _SIZE, _BIRTH_AT = -100, 0x800, 256, 80


def place_of(ledger: Path) -> dict[str, Any]:
    """A file's path, inode, born (nanoseconds; None where the system does not say) and machine. Raises
    OSError.
    """
    return {
        "path": str(ledger.resolve()),
        "inode": ledger.stat().st_ino,
        "born": birth_time(ledger),
        "machine": platform.node(),
    }


def birth_time(path: Path) -> int | None:
    """When a file was made, in nanoseconds; None where the system does not say."""
    if not sys.platform.startswith("linux"):
        seconds = getattr(path.stat(), "st_birthtime", None)
        return None if seconds is None else int(seconds * 1e9)
    answer = ctypes.create_string_buffer(_SIZE)
    try:
        failed = ctypes.CDLL(None, use_errno=True).statx(_AT_CURRENT, os.fsencode(path), 0, _BIRTH, answer)
    except AttributeError:  # a C library without it
        return None
    (attributes,) = struct.unpack_from("=I", answer)
    seconds, nanoseconds = struct.unpack_from("=qI", answer, _BIRTH_AT)
    return None if failed or not attributes & _BIRTH else seconds * 10**9 + nanoseconds


def differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Evidence that a file is not the earlier one, in words; folders are shared among machines."""
    untold = {"born"} if None in (then.get("born"), now["born"]) else set[str]()
    changed = [key for key in _IN_WORDS if key not in untold and then.get(key) != now[key]]
    return [_IN_WORDS[key].format(then=then.get(key), now=now[key]) for key in changed]


def require_in_place(folder: Path, ledger: Path, then: Mapping[str, Any] | None) -> None:
    """Raises LedgerError if a ledger is not the file that the run left. then: the earlier result of
    `place_of`; None if that is gone.
    """
    gone = ["what was written down of the ledger's place is gone"]
    actual = gone if then is None else differences(then, place_of(ledger))
    if actual:
        raise LedgerError(
            f"the ledger in {folder} is not where the run left it: {'; '.join(actual)}",
            expected=(
                "the folder that the last process of this run worked in, not a copy of it and not a backup"
            ),
            cause=(
                "the folder was moved, copied or restored. Two copies spend on the same data, and neither"
                " ledger has the steps of the other: the epsilon of both together is that of all their steps,"
                " composed"
            ),
            next_step=(
                "go on in the original folder; or, if this is the only one that there is and that will be"
                " gone on with, add --moved, which the ledger and public/step.json then say. A restored"
                " backup is not: steps that were taken after it are spent, too"
            ),
        )
