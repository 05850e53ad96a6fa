"""Which rows each of several processes computes."""

from __future__ import annotations

import threading
import time
from collections import Counter
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import DistNetworkError, HashStore

from psgrad.engine.execution import process_group, rank_waits
from psgrad.engine.execution.process_group import RankGroup
from psgrad.engine.execution.rank_waits import Limits, Patience, ReachableStore
from psgrad.engine.execution.ranks import MergingParts, RowPart, gaps, guided_ranges
from psgrad.errors import ConfigError, DataError, DistributedError

COUNTS, CHUNKS, SIZES = st.integers(0, 3000), st.integers(1, 70), st.integers(1, 70)


def rows_of(ranges: list[range]) -> list[int]:
    return [row for rows in ranges for row in rows]


@given(count=COUNTS, chunk=CHUNKS, size=SIZES)
def test_guided_ranges_have_each_row_once_in_whole_chunks(count: int, chunk: int, size: int) -> None:
    found = guided_ranges([range(count)] if count else [], chunk, size)
    assert rows_of(found) == list(range(count))
    assert all(rows.start % chunk == 0 for rows in found)
    assert all(len(rows) > 0 for rows in found)


def test_guided_ranges_become_smaller() -> None:
    """The first range is a quarter of all rows for two processes, the last is a chunk."""
    sizes = [len(rows) for rows in guided_ranges([range(6400)], 32, 2)]
    assert sizes[0] == 1600
    assert sizes[-1] == 32
    assert sizes == sorted(sizes, reverse=True)


@given(count=COUNTS, chunk=CHUNKS, parts=SIZES)
def test_row_parts_have_each_row_once_in_whole_chunks(count: int, chunk: int, parts: int) -> None:
    found = [RowPart.of(number, parts, count, chunk).rows for number in range(1, parts + 1)]
    assert rows_of(found) == list(range(count))
    assert all(rows.start % chunk == 0 for rows in found if rows)


@given(done=st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20)), max_size=8))
def test_gaps_are_the_rows_in_no_range(done: list[tuple[int, int]]) -> None:
    ranges = [range(start, start + length) for start, length in done]
    finished = set(rows_of(ranges))
    assert rows_of(gaps(60, ranges)) == [row for row in range(60) if row not in finished]


def test_merging_process_names_missing_rows() -> None:
    with pytest.raises(DataError, match="12 rows of the pass samples are missing: 0 to 9, 30 to 31"):
        list(MergingParts(3).ranges("samples", [range(10), range(30, 32)]))
    assert list(MergingParts(3).ranges("samples", [])) == []


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Three ranks in one process, which share a store; without collectives."""
    monkeypatch.setattr(rank_waits, "_BEAT", 0.02)
    store = HashStore()
    found = [RankGroup(store, rank, 3) for rank in range(3)]
    yield found
    for group in found:
        group.heartbeats.stopped.set()


def test_ranks_take_each_range_once(groups: list[RankGroup]) -> None:
    """The ranges whose gradients a rank has in memory come first for it."""
    every = [range(10 * i, 10 * i + 10) for i in range(30)]
    taken: list[list[range]] = [[], [], []]

    def work(rank: int) -> None:
        for rows in groups[rank].ranges("samples", every, first=[100 * rank + 55]):
            taken[rank].append(rows)
            time.sleep(0.001 * (1 + 4 * rank))

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted((rows for part in taken for rows in part), key=lambda rows: rows.start) == every
    assert [part[0].start for part in taken] == [50, 150, 250]
    assert len(taken[0]) > len(taken[2])  # the slow rank takes fewer


class CountedStore:
    """A store that counts its requests by their names."""

    def __init__(self, inner: Any) -> None:
        self._inner, self.requests = inner, Counter[str]()

    def __getattr__(self, name: str) -> Any:
        self.requests[name] += 1
        return getattr(self._inner, name)


def test_taking_ranges_makes_two_requests_a_range_and_no_more_for_more_ranks(groups: list[RankGroup]) -> None:
    every = [range(10 * i, 10 * i + 10) for i in range(300)]
    stores = []
    for group in groups:
        group._store = store = CountedStore(group._store)  # type: ignore[assignment]
        stores.append(store)
    taken = [iter(group.ranges("samples", every)) for group in groups]
    found = [next(taken[place % 3], None) for place in range(303)]
    assert sorted((rows for rows in found if rows is not None), key=lambda rows: rows.start) == every
    assert sum(store.requests["add"] for store in stores) == 2 * 300 + 3


def test_progress_asks_the_store_now_and_then(
    groups: list[RankGroup], monkeypatch: pytest.MonkeyPatch
) -> None:
    groups[0]._store = store = CountedStore(groups[0]._store)  # type: ignore[assignment]
    assert [groups[0].progress("samples", 3) for _ in range(100)] == list(range(3, 303, 3))
    assert store.requests["add"] == 1
    assert groups[1].progress("samples", 1) == 4  # of the first three rows, and its own
    monkeypatch.setattr(process_group, "PROGRESS_EVERY", 0)
    assert groups[0].progress("samples", 0) == 301
    assert groups[1].progress("samples", 0) == 301


def test_looking_for_dead_ranks_is_one_request_however_many_there_are(
    groups: list[RankGroup],
) -> None:
    for rank in range(3, 200):
        groups[0].heartbeats.heard[rank] = b"", time.monotonic()
        groups[0].heartbeats.store.set(f"alive.{rank}", "1.0")
    while not all(beat for beat, _ in groups[0].heartbeats.heard.values()):  # who has begun
        groups[0].heartbeats.require_others()
    store = CountedStore(groups[0].heartbeats.store)
    groups[0].heartbeats.store = store  # type: ignore[assignment]
    groups[0].heartbeats.require_others()
    del store.requests["set"]  # its own heartbeats
    assert store.requests == {"check": 1, "multi_get": 1}


def test_rank_that_waits_gets_the_error_of_another(groups: list[RankGroup]) -> None:
    assert groups[2].fail("row 7 is broken")
    assert not groups[1].fail("another error")
    with pytest.raises(DistributedError, match="rank 2 failed: row 7 is broken"):
        groups[0].meet("samples")


def test_rank_that_waits_names_one_without_heartbeat(groups: list[RankGroup]) -> None:
    groups[0].heartbeats.limits = Limits(silence=0.3)
    groups[1].heartbeats.stopped.set()
    with pytest.raises(DistributedError, match="rank 1 has sent no heartbeat"):
        groups[0].meet("samples")


def test_rank_that_was_asked_to_end_waits_a_shorter_time(
    groups: list[RankGroup], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_waits, "HURRIED", 0.2)
    groups[1].heartbeats.stopped.set()
    groups[0].hurry()
    began = time.monotonic()
    with pytest.raises(DistributedError, match="rank 1 has sent no heartbeat for 0 seconds"):
        groups[0].meet("samples")
    assert time.monotonic() - began < 5 < groups[0].limits.silence


@given(size=SIZES)
def test_all_ranks_send_once_towards_rank_0(size: int) -> None:
    ranks = [RankGroup.__new__(RankGroup) for _ in range(size)]
    for rank, group in enumerate(ranks):
        group.rank, group.size = rank, size
    received = [(source, group.rank) for group in ranks for source in group._sources()]
    assert sorted(received) == [(rank, ranks[rank]._receiver) for rank in range(1, size)]
    assert all(source > rank for source, rank in received)


def test_texts_of_ranks_are_in_their_order_on_rank_0(groups: list[RankGroup]) -> None:
    found: dict[int, list[str]] = {}

    def say(rank: int) -> None:
        found[rank] = groups[rank].texts("hosts", f"host {rank}")

    threads = [threading.Thread(target=say, args=(rank,)) for rank in (2, 0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {0: ["host 0", "host 1", "host 2"], 1: [], 2: []}


def test_ranks_agree_on_the_numbers_of_the_first(groups: list[RankGroup]) -> None:
    waiting = [threading.Thread(target=lambda: found.append(groups[2].agreed("sizes", lambda: [1])))]
    found: list[list[int]] = []
    waiting[0].start()
    time.sleep(0.05)
    assert found == []
    assert groups[0].agreed("sizes", lambda: [64, 3]) == [64, 3]
    waiting[0].join()
    assert found == [[64, 3]]


def test_ranks_agree_on_new_numbers_under_a_name_of_before(groups: list[RankGroup]) -> None:
    groups[0].agreed("sizes", lambda: [64])
    groups[1].agreed("sizes", lambda: [1])
    found: list[list[int]] = []
    waiting = threading.Thread(target=lambda: found.append(groups[1].agreed("sizes", lambda: [1])))
    waiting.start()
    time.sleep(0.05)
    assert found == []
    groups[0].agreed("sizes", lambda: [32])
    waiting.join()
    assert found == [[32]]


def attempt(store: HashStore, size: int, slow: int) -> list[Any]:
    """The parts of the store that the ranks of an attempt get. slow: the rank that comes last."""
    found: list[Any] = [None] * size

    def come(rank: int) -> None:
        time.sleep(0.2 * (rank == slow))
        found[rank] = process_group.keys_of_this_attempt(store, rank, size, 20.0)

    threads = [threading.Thread(target=come, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


@pytest.mark.long
@pytest.mark.parametrize("slow", [0, 1, 2])
def test_ranks_that_start_again_find_no_key_of_the_attempt_before(slow: int) -> None:
    """The agent of torchrun keeps its store; ranks may be more or fewer then."""
    store = HashStore()
    for number, size in enumerate((3, 3, 2, 4)):
        parts = attempt(store, size, min(slow, size - 1))
        assert not parts[0].check(["failed"])
        parts[0].set("failed", "a rank was killed")
        assert [part.get("failed") for part in parts] == [b"a rank was killed"] * size
        # A rank that was killed before the others had come.
        if number == 1:
            store.add("psgrad.attempts", 1)


def test_ranks_that_do_not_come_are_a_named_error() -> None:
    with pytest.raises(DistributedError, match="not all of the 2 ranks have come together within 0 seconds"):
        process_group.keys_of_this_attempt(HashStore(), 0, 2, 0.2)


def test_store_that_gives_no_answer_is_a_named_error() -> None:
    """As an agent that is stopped: its first request is answered late, and no other is made."""
    go_on, asked = threading.Event(), list[str]()

    class Stopped:
        def check(self, keys: list[str]) -> bool:
            asked.extend(keys)
            return go_on.wait(20)

    store = ReachableStore(Stopped(), silence=0.3)  # type: ignore[arg-type]
    began = time.monotonic()
    for key in ("first", "second"):
        with pytest.raises(DistributedError, match="has given no answer for 0 seconds"):
            store.check([key])
    assert time.monotonic() - began < 5
    assert (asked, store.silent) == (["first"], True)
    go_on.set()


@pytest.mark.long
def test_wait_for_a_rank_that_lives_has_a_limit_and_names_it(
    groups: list[RankGroup], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks 0 and 2 wait, rank 1 sends heartbeats and does not come."""
    for group in groups:
        group.heartbeats.limits = Limits(work=1.0)

    def waits() -> None:
        with suppress(DistributedError):
            groups[2].meet("samples")

    other = threading.Thread(target=waits)
    other.start()
    with pytest.raises(
        DistributedError, match=r"waited 1 seconds for 'met.samples'; not there: rank 1\n"
    ) as found:
        groups[0].meet("samples")
    assert found.value.rank == 1
    other.join()


def test_time_in_which_a_rank_was_stopped_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    patience = Patience(2.5)
    now += 3600.0
    assert not patience.ended()
    now += 1.0
    assert not patience.ended()
    now += 1.1
    assert patience.ended()


def test_limits_of_waits_come_from_the_environment() -> None:
    assert Limits.of({}) == Limits(25.0, 600.0, 86_400.0)
    assert Limits.of({"PSGRAD_RANK_SILENCE": "120", "PSGRAD_RANK_WORK": "1e6"}) == Limits(120.0, 600.0, 1e6)


@pytest.mark.parametrize("text", ["soon", "0", "-1", "nan", "inf"])
def test_limit_of_a_wait_that_is_no_number_of_seconds_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=f"PSGRAD_RANK_EXCHANGE is '{text}'") as found:
        Limits.of({"PSGRAD_RANK_EXCHANGE": text})
    assert found.value.next_step == "unset it for 600 seconds, or set a number"


def test_store_that_is_gone_is_a_named_error(groups: list[RankGroup]) -> None:
    class Gone:
        def add(self, *args: Any) -> int:
            raise DistNetworkError("failed to recv, got 0 bytes")

    groups[1]._store = ReachableStore(Gone(), 5.0)  # type: ignore[arg-type]
    with pytest.raises(DistributedError, match="can't be reached"):
        groups[1].progress("samples", 3)


@pytest.mark.long
def test_rank_that_was_stopped_itself_takes_no_other_for_dead(groups: list[RankGroup]) -> None:
    """Ctrl-Z stops all ranks; the first that goes on sees heartbeats that are as old as the pause."""
    groups[0].heartbeats.limits = Limits(silence=2.0)
    groups[0].heartbeats.require_others()
    groups[1].heartbeats.stopped.set()
    groups[1].heartbeats._beating.join()
    groups[0].heartbeats.require_others()
    pause = 60.0
    beats = groups[0].heartbeats
    beats.checked -= pause
    beats.heard = {rank: (beat, since - pause) for rank, (beat, since) in beats.heard.items()}
    beats.require_others()
    with pytest.raises(DistributedError, match=r"rank 1 has sent no heartbeat for [23] seconds"):
        groups[0].meet("samples")
