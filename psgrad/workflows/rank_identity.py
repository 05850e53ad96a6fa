"""Whether all ranks of a run have loaded the same: config, files, code and versions."""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping
from typing import Any

from psgrad.engine.execution.ranks import Processes
from psgrad.errors import DistributedError
from psgrad.wording import short_repr

_SHOWN = 4


def require_same_on_ranks(what: str, found: Mapping[str, Any], processes: Processes) -> None:
    """Raises DistributedError on a rank that has loaded something else than rank 0; the others end with its
    error where they next wait for it.

    what: a name for the comparison. found: in words -> plain value, of this rank.
    """
    if processes.size == 1:
        return
    own = json.dumps(found, default=str)
    of_first = bytes(processes.agreed(f"same {what}", lambda: list(own.encode())))
    first, here = json.loads(of_first), json.loads(own)
    others = [name for name in {**first, **here} if first.get(name) != here.get(name)]
    if not others:
        return
    lines = [
        f"\n  {name}: {short_repr(first.get(name))} on rank 0, {short_repr(here.get(name))} here"
        for name in others[:_SHOWN]
    ]
    more = f"\n  and {len(others) - _SHOWN} more" if len(others) > _SHOWN else ""
    raise DistributedError(
        f"rank {processes.rank} on {socket.gethostname()} has loaded something else than rank 0:"
        f"{''.join(lines)}{more}",
        expected="the same config, files, code and versions in all processes",
        cause="machines with copies of their own, a file that was changed in between, or a model or dataset"
        " that draws at random when it is made",
        next_step="give all processes the same files, or save a checkpoint of the model, and run again",
    )
