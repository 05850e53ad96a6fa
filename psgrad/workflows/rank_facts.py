"""What a manifest says of the processes that shared a run: hosts, work, and how even it was."""

from __future__ import annotations

import json
import socket
from dataclasses import asdict, dataclass
from typing import Any

from psgrad.engine.execution.ranks import Processes


@dataclass
class RankWork:
    """What one process did.

    seconds: computing. waited: seconds at the end of passes, for the others. rows: that it computed, in all
    passes; None where they are not counted.
    """

    seconds: float = 0.0
    waited: float = 0.0
    rows: int | None = None


def rank_facts(processes: Processes, name: str, own: RankWork) -> dict[str, Any] | None:
    """The work of all processes, on the first of several.

    balance: the mean of their seconds over the largest, 1 where all took as long.
    """
    if processes.size == 1:
        return None
    said = {"rank": processes.rank, "host": socket.gethostname(), **asdict(own)}
    each = [json.loads(text) for text in processes.texts(f"{name}ranks", json.dumps(said))]
    if not each:
        return None
    seconds = [rank["seconds"] for rank in each]
    for rank in each:
        rank |= {key: round(rank[key], 3) for key in ("seconds", "waited")}
    balance = sum(seconds) / len(seconds) / max(*seconds, 1e-9)
    return {
        "processes": processes.size,
        "backend": processes.backend,
        "balance": round(balance, 3),
        "each": each,
    }


def words_for(ranks: dict[str, Any]) -> list[str]:
    """A line for each process, for `-v`."""
    return [
        f"rank {each['rank']} on {each['host']}: {each['rows']:,} rows in {each['seconds']:.1f} s, waited"
        f" {each['waited']:.1f} s"
        for each in ranks["each"]
    ]
