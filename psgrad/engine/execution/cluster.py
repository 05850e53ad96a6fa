"""The time of a run on many ranks, from a discrete-event simulation: ranks, chunks, the key-value store, the
network and the storage.

The simulated ranks take the ranges of rows that real ones take, one after another (`guided_ranges`). The
constants are measured by `benchmarks/scale_out.py`, which also compares the simulation with real runs.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass

from psgrad.engine.execution.rank_pieces import PIECES_OF_A_RANK
from psgrad.engine.execution.ranks import PROGRESS_EVERY, guided_ranges

_REQUESTS_A_RANGE = 2  # which place is next, and whether it is free


@dataclass(frozen=True)
class Cluster:
    """The constants of the machines. By default those that benchmarks/scale_out.py has measured on two cores,
    and a network of 10 Gbit/s and a storage that are assumed.

    Attributes:
        startup: seconds until a process has imported its code and built the model.
        request: seconds that the key-value store needs for one request. A rank makes one for the progress
            after a chunk, at most twice a second.
        network: bytes a second from one rank to another. latency: seconds of a message.
        storage: bytes a second of the storage that all ranks share, for all of them together.
        ranks_per_host: that read a file from the storage once, together.
        variation: how much the time of a chunk varies: the standard deviation of its logarithm.
    """

    startup: float = 7.6
    request: float = 36.7e-6
    network: float = 1.25e9
    latency: float = 1e-3
    storage: float = 5e9
    ranks_per_host: int = 8
    variation: float = 0.05


@dataclass(frozen=True)
class Workload:
    """The work of a run.

    Attributes:
        rows: of the dataset. chunk_size: rows at a time. chunk_seconds: of one rank for a chunk.
        read, written: bytes of storage for each row. loaded: bytes that each host reads before its first
            chunk, such as the checkpoint.
        hashed_bytes: bytes of the dataset's files, which all ranks together read once before the first chunk,
            for their hashes. hash_seconds: the time of one rank for all of them.
        listing_seconds: of each rank by itself before its first chunk, such as for the names of images.
        broadcast_bytes: bytes that each host fetches from the host of rank 0, such as the digests of images.
        gathered: bytes of what the measures of a rank have gathered.
        table_seconds: for each row, of rank 0 alone, at the end: verdicts, tables and the report.
        report_seconds: of the same, beside what each row takes.
    """

    rows: int
    chunk_size: int
    chunk_seconds: float
    read: float = 0.0
    written: float = 0.0
    loaded: float = 0.0
    hashed_bytes: float = 0.0
    hash_seconds: float = 0.0
    listing_seconds: float = 0.0
    broadcast_bytes: float = 0.0
    gathered: float = 0.0
    table_seconds: float = 0.0
    report_seconds: float = 0.0


@dataclass(frozen=True)
class RankTimes:
    """The predicted times of a run of `ranks` processes.

    Attributes:
        seconds: from the start to the last file.
        parts: what the run's seconds were spent on, as a mean of the ranks: `startup`, `computing`, `storage`
            (waiting for it), `identity` (of the dataset, before the first chunk), `store` (for the key-value
            store), `other ranks` (for the slowest of them), `merging` (what measures have gathered) and
            `tables` (of rank 0).
        sent: bytes over the network. stored: bytes read from and written to the storage.
    """

    ranks: int
    seconds: float
    parts: dict[str, float]
    sent: float
    stored: float

    @property
    def bottleneck(self) -> str:
        """What takes most of the time beside computing."""
        return max((name for name in self.parts if name != "computing"), key=self.parts.__getitem__)


def simulate(work: Workload, cluster: Cluster, ranks: int, seed: int = 0) -> RankTimes:
    """The times of `ranks` processes that share the rows of `work`.

    A chunk takes at least as long as the storage and the store need to serve all ranks once. The seed draws
    how much the time of each range varies.
    """
    draw, asking = random.Random(seed), _REQUESTS_A_RANGE * cluster.request
    ranges = iter(guided_ranges([range(work.rows)], work.chunk_size, ranks))
    hosts = math.ceil(ranks / cluster.ranks_per_host)
    loading = hosts * work.loaded / cluster.storage
    bytes_a_chunk = work.chunk_size * (work.read + work.written)
    requests = min(1.0, work.chunk_seconds / PROGRESS_EVERY)  # how often a chunk is followed by a request
    store = 0.0 if ranks == 1 else _excess(requests * cluster.request, ranks, work.chunk_seconds)
    storage = _excess(bytes_a_chunk / cluster.storage, ranks, work.chunk_seconds)
    spent = dict.fromkeys(("computing", "storage", "store"), 0.0) | {"storage": ranks * loading}
    identity = _identity(work, cluster, ranks, hosts)
    ready = [(cluster.startup + loading + identity, rank) for rank in range(ranks)]
    served = 0.0  # until when the store answers the requests for ranges
    finished = list[float]()
    while ready:
        now, rank = heapq.heappop(ready)
        rows = next(ranges, None)
        served = max(served, now) + (0.0 if ranks == 1 else asking)
        spent["store"] += served - now
        if rows is None:
            finished.append(served)
            continue
        chunks = len(rows) / work.chunk_size
        took = {
            "computing": chunks * work.chunk_seconds * _varied(draw, cluster, chunks),
            "store": chunks * store,
            "storage": chunks * max(0.0, storage - store),
        }
        for name, seconds in took.items():
            spent[name] += seconds
        heapq.heappush(ready, (served + sum(took.values()), rank))
    last = max(finished)
    merging, sent = _merging(work, cluster, ranks)
    tables = work.report_seconds + work.rows * work.table_seconds
    parts = {"startup": cluster.startup, "identity": identity}
    parts |= {name: seconds / ranks for name, seconds in spent.items()}
    parts |= {"other ranks": last - sum(finished) / ranks, "merging": merging, "tables": tables}
    stored = hosts * work.loaded + work.hashed_bytes + work.rows * (work.read + work.written)
    return RankTimes(ranks, last + merging + tables, parts, sent + (hosts - 1) * work.broadcast_bytes, stored)


def _identity(work: Workload, cluster: Cluster, ranks: int, hosts: int) -> float:
    """Seconds until all ranks know what their dataset is. They take pieces of it, a few each, so that the
    last to end is at most one piece late.
    """
    late = 0.0 if ranks == 1 else 1 / PIECES_OF_A_RANK
    looking = max(work.hashed_bytes / cluster.storage, (1 + late) * work.hash_seconds / ranks)
    return work.listing_seconds + looking + (hosts - 1) * work.broadcast_bytes / cluster.network


def _excess(service: float, ranks: int, between: float) -> float:
    """Seconds by which a server with this time of service delays each of its clients, which ask again
    `between` seconds after an answer: no more than one answer is given at a time.
    """
    return max(service, ranks * service - between)


def efficiencies(
    work: Workload, cluster: Cluster, ranks: tuple[int, ...]
) -> Iterator[tuple[RankTimes, float]]:
    """For each number of ranks its times, and its efficiency: the seconds of one process, divided by those
    of all ranks together.
    """
    alone = simulate(work, cluster, 1).seconds
    for count in ranks:
        found = simulate(work, cluster, count)
        yield found, alone / (count * found.seconds)


def _varied(draw: random.Random, cluster: Cluster, chunks: float) -> float:
    """The time of a range of `chunks` chunks, as a multiple of the expected time; 1 in the mean."""
    deviation = cluster.variation / math.sqrt(max(1.0, chunks))
    return draw.lognormvariate(-deviation * deviation / 2, deviation)


def _merging(work: Workload, cluster: Cluster, ranks: int) -> tuple[float, float]:
    """(seconds, bytes sent) until each rank has what all have gathered: in pairs to rank 0, and back."""
    if ranks == 1:
        return 0.0, 0.0
    steps = 2 * math.ceil(math.log2(ranks))
    seconds = steps * (cluster.latency + work.gathered / cluster.network)
    return seconds, 2 * (ranks - 1) * work.gathered
