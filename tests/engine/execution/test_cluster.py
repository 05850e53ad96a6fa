"""The simulation of a run on many ranks, held against closed forms."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from psgrad.engine.execution.cluster import Cluster, Workload, efficiencies, simulate

QUIET = Cluster(startup=3, request=0, latency=0, variation=0)
RANKS = st.integers(1, 64)


@given(ranks=RANKS, chunks=st.integers(1, 300))
def test_rows_that_divide_evenly_take_their_share_of_the_time(ranks: int, chunks: int) -> None:
    work = Workload(rows=4 * chunks * ranks, chunk_size=4, chunk_seconds=0.5)
    found = simulate(work, QUIET, ranks)
    assert chunks * 0.5 <= found.seconds - 3 <= (chunks + 2) * 0.5 + 1e-6


@given(
    ranks=RANKS,
    rows=st.integers(1, 20_000),
    chunk=st.integers(1, 50),
    read=st.floats(0, 1e9),
    request=st.floats(0, 0.1),
    gathered=st.floats(0, 1e9),
    hashed_bytes=st.floats(0, 1e12),
)
def test_parts_add_up_to_the_seconds_of_the_run(
    ranks: int, rows: int, chunk: int, read: float, request: float, gathered: float, hashed_bytes: float
) -> None:
    before = {
        "loaded": 1e8,
        "hashed_bytes": hashed_bytes,
        "listing_seconds": 1.0,
        "broadcast_bytes": gathered,
    }
    work = Workload(rows, chunk, 0.1, read=read, gathered=gathered, table_seconds=1e-5, **before)
    found = simulate(work, Cluster(request=request, variation=0.3), ranks)
    assert sum(found.parts.values()) == pytest.approx(found.seconds)
    assert min(found.parts.values()) >= -1e-9
    assert found.bottleneck != "computing"


@given(ranks=RANKS, work=st.sampled_from((0.001, 0.1)), read=st.floats(1, 1e8))
def test_storage_is_not_read_faster_than_it_can_be(ranks: int, work: float, read: float) -> None:
    job = Workload(3_000, 10, work, read=read)
    found = simulate(job, Cluster(variation=0), ranks)
    assert found.stored == pytest.approx(3_000 * read)
    assert found.seconds >= found.stored / 5e9


def test_store_bounds_the_chunks_of_all_ranks() -> None:
    """A thousand ranks that tell their progress twice a second: two thousand requests of 0.1 s a second."""
    work = Workload(rows=1_000_000, chunk_size=1, chunk_seconds=0.01)
    found = simulate(work, Cluster(request=0.1), 1000)
    assert found.bottleneck == "store"
    assert found.seconds >= 1_000_000 * 0.02 * 0.1


def test_bottleneck_is_the_storage_where_ranks_load_a_large_checkpoint() -> None:
    found = simulate(Workload(512, 1, 1.0, loaded=1e12), Cluster(), 512)
    assert found.bottleneck == "storage"
    assert found.seconds >= 64 * 1e12 / 5e9  # once for each host


@pytest.mark.parametrize(("ranks", "steps"), [(1, 0), (2, 2), (3, 4), (64, 12)])
def test_merging_goes_in_pairs_and_back(ranks: int, steps: int) -> None:
    cluster = Cluster(latency=0.5, network=1e6)
    found = simulate(Workload(1_000, 10, 1.0, gathered=2e6), cluster, ranks)
    assert found.parts["merging"] == steps * 2.5
    assert found.sent == 2 * (ranks - 1) * 2e6


def test_efficiency_is_that_of_ranks_against_one_process() -> None:
    """Startup alone is lost: 10 s of it and 100 s of work, on ten ranks."""
    cluster = Cluster(startup=10, request=0, latency=0, variation=0)
    ((times, efficiency),) = efficiencies(Workload(1_000, 1, 0.1), cluster, (10,))
    assert times.seconds == pytest.approx(20)
    assert efficiency == pytest.approx(110 / 200)
    assert times.bottleneck == "startup"


def test_work_of_rank_0_alone_is_not_shared() -> None:
    found = simulate(Workload(1_000, 10, 1.0, table_seconds=1.0, report_seconds=7.0), Cluster(), 50)
    assert found.bottleneck == "tables"
    assert found.parts["tables"] == 1_007


@pytest.mark.parametrize(("ranks", "seconds"), [(1, 80.0), (2, 45.0), (4, 22.5), (16, 20.0), (64, 20.0)])
def test_a_dataset_is_looked_at_by_all_ranks_together_and_as_fast_as_the_storage(
    ranks: int, seconds: float
) -> None:
    """80 s of work, in eight pieces for each rank, of which one may be late; the storage takes 20 s."""
    work = Workload(1_000, 10, 1.0, hashed_bytes=100e9, hash_seconds=80.0)
    found = simulate(work, Cluster(), ranks)
    assert found.parts["identity"] == pytest.approx(seconds)
    assert found.stored == 100e9
    assert found.seconds >= seconds + simulate(Workload(1_000, 10, 1.0), Cluster(), ranks).seconds - 1e-6


def test_each_host_is_told_what_all_have_found_and_each_rank_lists_by_itself() -> None:
    work = Workload(1_000, 10, 1.0, listing_seconds=7.0, broadcast_bytes=1.25e9)
    found = [simulate(work, Cluster(ranks_per_host=8), ranks) for ranks in (1, 8, 9, 64)]
    assert [each.parts["identity"] for each in found] == pytest.approx([7, 7, 8, 14])
    assert [each.sent for each in found] == pytest.approx([0, 0, 1.25e9, 7 * 1.25e9])
