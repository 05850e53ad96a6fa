"""Where weights live, by their bytes, the memory and the ranks: on each device, over a group of ranks, or
elsewhere; and the bytes that come to a device for a chunk.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Where = Literal["resident", "sharded", "offloaded"]
# Of the memory, what weights may take that live on the device, and what those that do not take with a chunk.
SHARE = 2


@dataclass(frozen=True)
class WeightsPlan:
    """Where the weights of a model live.

    Attributes:
        where: resident, sharded or offloaded.
        held: bytes of weights on a device, at the most.
        moved: bytes of weights that come to a device for a chunk.
        group: ranks of which each keeps a part; 1 where none does.
    """

    where: Where
    held: int
    moved: int
    group: int = 1


def weights_plan(
    weights: int, memory: int, ranks: int = 1, per_host: int = 1, largest: int = 0
) -> WeightsPlan:
    """Resident where the weights take at most half of the memory; else sharded over the smallest group that
    has room for the parts; else offloaded.

    Args:
        weights: bytes of all. largest: bytes of the largest one.
        memory: bytes that are free for a rank.
        ranks: of the run. per_host: of them on a host.

    A pass with blocks that run again uses each weight forward and backward. What is in the memory at the turn
    does not come again: offloaded weights that fill it stay, of both passes one after another.
    """
    if fit(weights, memory):
        return WeightsPlan("resident", weights, 0)
    group = smallest_group(weights, memory, ranks, per_host)
    room = room_for_others(memory // SHARE)
    held = room if group is None else room_for_parts(room, weights, largest, group)
    return WeightsPlan(
        "offloaded" if group is None else "sharded", held, 2 * max(0, weights - held), group or 1
    )


def fit(weights: int, memory: int) -> bool:
    """Whether weights live on the device."""
    return weights <= memory // SHARE


def smallest_group(weights: int, memory: int, ranks: int, per_host: int) -> int | None:
    """How many ranks keep the parts of a weight: those of one host, or all, the fewest that have room for
    them; None where these have none, either.
    """
    sizes = [per_host, ranks] if ranks % per_host == 0 else [ranks]
    return next((each for each in sizes if each > 1 and fit(weights // each, memory)), None)


def room_for_others(memory: int) -> int:
    """Bytes that weights may take on the device that do not live there. memory: for them and a chunk."""
    return memory // SHARE


def room_for_parts(room: int, weights: int, largest: int, group: int) -> int:
    """The same of sharded weights: no more than a rank's part, or the two largest weights."""
    return min(room, max(weights // group, 2 * largest))
