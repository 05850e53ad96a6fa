"""Which rows each of several processes computes, and what ranks of torch.distributed send each other."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import HashStore

from psgrad.engine.execution.process_group import RankGroup, keys_of_this_attempt
from psgrad.engine.execution.ranks import MergingParts, RowPart, gaps, in_chunks, joined
from psgrad.errors import ConfigError, DataError, DistributedError
from tests.forked_ranks import die, fork_ranks, run_in_group

COUNTS, CHUNKS, SIZES = st.integers(0, 3000), st.integers(1, 70), st.integers(1, 70)
DONE = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20)), max_size=8)


def rows_of(ranges: list[range]) -> list[int]:
    return [row for rows in ranges for row in rows]


@given(done=DONE, chunk=CHUNKS, size=SIZES)
def test_shares_of_ranks_have_each_row_once_in_whole_chunks(
    done: list[tuple[int, int]], chunk: int, size: int
) -> None:
    todo = gaps(60, [range(start, start + length) for start, length in done if length])
    group = RankGroup.__new__(RankGroup)
    group.size, found = size, list[range]()
    for group.rank in range(size):
        found += group.my_rows("samples", in_chunks(todo, chunk))
    assert rows_of(found) == rows_of(todo)
    edges = {edge for rows in todo for edge in (rows.start, rows.stop)}
    assert all(edge % chunk == 0 or edge in edges for rows in found for edge in (rows.start, rows.stop))
    assert joined(in_chunks(todo, chunk)) == todo


@given(count=COUNTS, chunk=CHUNKS, parts=SIZES)
def test_row_parts_have_each_row_once_in_whole_chunks(count: int, chunk: int, parts: int) -> None:
    found = [RowPart.of(number, parts, count, chunk).rows for number in range(1, parts + 1)]
    assert rows_of(found) == list(range(count))
    assert all(rows.start % chunk == 0 for rows in found if rows)


@given(done=DONE)
def test_gaps_are_the_rows_in_no_range(done: list[tuple[int, int]]) -> None:
    ranges = [range(start, start + length) for start, length in done]
    finished = set(rows_of(ranges))
    assert rows_of(gaps(60, ranges)) == [row for row in range(60) if row not in finished]


def test_merging_process_names_missing_rows() -> None:
    with pytest.raises(DataError, match="12 rows of the pass samples are missing: 0 to 9, 30 to 31"):
        MergingParts(3).my_rows("samples", [range(10), range(30, 32)])
    assert MergingParts(3).my_rows("samples", []) == []


TENSORS = {
    "half": torch.arange(6).reshape(2, 3).to(torch.bfloat16).t(),
    "bool": torch.tensor([True, False]),
    "number": torch.tensor(2.5, dtype=torch.float64),
    "none": torch.zeros(0, 3),
}


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.sweep)])
def test_calls_of_ranks_send_tensors_of_all_types(tmp_path: Path, size: int) -> None:
    def work(group: RankGroup) -> None:
        own = {name: value + group.rank if name != "bool" else value for name, value in TENSORS.items()}
        every = group.gathered("tensors", own if group.rank < 2 else {})
        assert [len(each) for each in every] == [4, 4, 0][:size]
        sent = group.broadcast("from rank 0", own)
        for name, value in TENSORS.items():
            assert torch.equal(every[0][name], value)
            assert torch.equal(sent[name], value)
            assert sent[name].dtype == value.dtype
        assert every[1]["number"] == 3.5
        total = {"sum": torch.tensor([2.0**group.rank])}
        whole = group.reduce("a sum", lambda: total, lambda other: total["sum"].add_(other["sum"]) and None)
        assert whole["sum"] == 2**size - 1
        kept = [f"{group.rank}"]
        group.collect(
            "names",
            lambda: {name: torch.zeros(1) for name in kept},
            kept.extend,
        )
        assert group.rank or sorted(kept) == list(map(str, range(size)))
        assert group.texts("texts", f"rank {group.rank}") == [f"rank {rank}" for rank in range(size)]
        assert group.agreed("numbers", lambda: [7, -group.rank]) == [7, 0]

    ended = run_in_group(tmp_path, size, work)
    assert [rank.code for rank in ended] == [0] * size, ended


def test_error_of_one_rank_is_raised_on_all(tmp_path: Path) -> None:
    def work(group: RankGroup) -> None:
        def fails() -> int:
            if group.rank == 1:
                raise ConfigError(
                    "row 7 is broken",
                    hint="mend it",
                )
            return 3

        assert group.together("a pass", lambda: group.rank) == group.rank
        with pytest.raises(ConfigError, match="row 7 is broken") as found:
            group.together("a pass", fails)
        assert found.value.hint == "mend it"

    ended = run_in_group(tmp_path, 2, work)
    assert [rank.code for rank in ended] == [0, 0], ended


def test_ranks_at_different_places_end_with_an_error(tmp_path: Path) -> None:
    def work(group: RankGroup) -> None:
        with pytest.raises(DistributedError, match=r"rank . shares a . sum, and another rank shares a . sum"):
            group.gathered(f"a {group.rank} sum", {})

    ended = run_in_group(tmp_path, 2, work)
    assert [rank.code for rank in ended] == [0, 0], ended


def test_rank_that_dies_ends_the_others_with_a_named_error(tmp_path: Path) -> None:
    def work(group: RankGroup) -> None:
        if group.rank == 1:
            die()
        with pytest.raises(DistributedError, match="rank 0 has lost another rank") as found:
            group.meet("the end of a pass")
        Path(tmp_path / "said").write_text(json.dumps(found.value.parts()))
        die()

    ended = run_in_group(tmp_path, 2, work)
    assert [rank.code for rank in ended] == [-9, -9], ended
    assert ended[0].seconds < 30
    assert "--resume" in (tmp_path / "said").read_text()


def test_rank_that_hangs_ends_the_others_after_the_time_limit(tmp_path: Path) -> None:
    def work(rank: int) -> None:
        group = RankGroup.join(3.0)
        if rank == 1:
            time.sleep(20)
            return
        with pytest.raises(DistributedError, match=r"has waited 3 seconds for it.*[Tt]imed out"):
            group.meet("the end of a pass")

    ended = fork_ranks(tmp_path, 2, work)
    assert ended[0].code == 0, ended
    assert ended[0].seconds < 20


def attempt(store: HashStore, size: int, slow: int) -> list[Any]:
    """The parts of the store that the ranks of an attempt get. slow: the rank that comes last."""
    found: list[Any] = [None] * size

    def come(rank: int) -> None:
        time.sleep(0.2 * (rank == slow))
        found[rank] = keys_of_this_attempt(store, rank, size, 20.0)

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
        parts[0].set("failed", "0 3")
        assert [part.get("failed") for part in parts] == [b"0 3"] * size
        if number == 1:  # a rank that was killed before the others had come
            store.add("attempts", 1)


def test_ranks_that_do_not_come_are_a_named_error() -> None:
    with pytest.raises(DistributedError, match="not all of the 2 ranks have come together within 0 seconds"):
        keys_of_this_attempt(HashStore(), 0, 2, 0.2)
