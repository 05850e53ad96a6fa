"""Where weights live, by their bytes and the memory: on each device, over a group of devices, or elsewhere;
and the bytes that come to a device for a chunk.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Where = Literal["resident", "sharded", "offloaded"]
# Of the memory, what weights may take. The other half is for a chunk.
SHARE = 2
# Blocks of a sharded model that a device has at once: the one that runs, and the next one on its way.
_BLOCKS = 2


@dataclass(frozen=True)
class WeightsPlan:
    """Where the weights of a model live.

    Attributes:
        where: resident, sharded or offloaded.
        held: bytes of weights on a device, at the most.
        moved: bytes of weights that come to a device for a chunk.
        group: devices over which they are sharded; 1 where they are not.
    """

    where: Where
    held: int
    moved: int
    group: int = 1


def weights_plan(weights: int, memory: int, devices: int = 1, block: int = 0) -> WeightsPlan:
    """Resident where the weights take at most half of the memory; else sharded over the smallest group, of
    2, 4, 8, ... devices, whose members have room for their share and two blocks; else offloaded.

    Args:
        weights: bytes of all. block: bytes of the largest module that repeats.
        memory: bytes of a device. devices: of the run.

    A pass with blocks that run again uses each weight forward and backward. What is in the memory at the turn
    does not come again: offloaded weights that fill it stay, of both passes one after another.
    """
    room = memory // SHARE
    if weights <= room:
        return WeightsPlan("resident", weights, 0)
    group = 2
    while group <= devices:
        share = -(-weights // group)
        if share + _BLOCKS * block <= room:
            return WeightsPlan("sharded", share + _BLOCKS * block, 2 * (weights - share), group)
        group *= 2
    return WeightsPlan("offloaded", room, 2 * (weights - room))
