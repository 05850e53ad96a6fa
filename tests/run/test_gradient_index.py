"""The index on the disk: what is written is whole, a kill loses a shard at most, and no index is taken for
another.
"""

from __future__ import annotations

import json
import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from psgrad.errors import OutputError, OutputExistsError
from psgrad.run import durable_files
from psgrad.run.gradient_index import GradientIndex
from tests.crashes import Tell, kill_and_resume, points_of

DESCRIPTION: dict[str, Any] = {
    "rows": 5,
    "rows_per_shard": 2,
    "checkpoints": 2,
    "projection": "sparse",
    "dtype": "float32",
    "parameters": {"weight": [3, 2], "bias": [3]},
    "fingerprint": {"data": "d" * 64, "checkpoints": ["a" * 64, "b" * 64]},
}


def arrays(checkpoint: int, rows: range) -> dict[str, np.ndarray]:
    result = np.array(rows, dtype=np.float32) + 100 * checkpoint
    return {"rows": np.stack([result, -result], 1), "loss": result.astype(np.float64)}


def fill(index: GradientIndex, tell: Tell = lambda told: None) -> None:
    for checkpoint, shard in index.unwritten():
        tell([checkpoint, shard])
        index.write(
            checkpoint,
            shard,
            {"rows": np.array([5])} if shard is None else arrays(checkpoint, index.shards[shard]),
        )


# -- Kills ---------------------------------------------------------------------------------------------------


SMALL = {**DESCRIPTION, "rows": 3, "checkpoints": 1}


def go(path: Path, tell: Tell) -> None:
    fill(GradientIndex.resume(path / "index", SMALL), tell)


def check(path: Path, told: list[Any], finished: bool) -> None:
    if finished:
        blocks = GradientIndex.open(path / "index").blocks(0, 100)
        found = np.concatenate([result["rows"] for _, result in blocks])
        np.testing.assert_array_equal(found, arrays(0, range(3))["rows"])
        assert not list((path / "index").rglob("*.tmp"))
        assert len(told) - len({tuple(each) for each in told}) <= 1, "a finished shard was computed again"
    else:
        # it may have died between the last file and its own end
        partial = len(list((path / "index").rglob("*.safetensors"))) < 3
        with pytest.raises(OutputError, match=r"half built|there is no index") if partial else nullcontext():
            GradientIndex.open(path / "index")


@pytest.mark.sweep
def test_gradient_index_killed_at_every_operation(tmp_path: Path) -> None:
    points = points_of(go, tmp_path / "undisturbed")
    for at in range(1, points + 1):
        assert kill_and_resume(go, check, tmp_path / str(at), [at]) == 1


# -- Updates -------------------------------------------------------------------------------------------------


def follow(path: Path, wanted: list[int], tell: Tell = lambda told: None) -> GradientIndex:
    """The index of rows with these numbers, which was built, is gone on with, or follows its data."""
    description = {**SMALL, "rows": len(wanted), "fingerprint": {"data": str(wanted)}}
    begun = GradientIndex.begun(path)
    if begun is None or begun.description == description:
        index = GradientIndex.resume(path, description)
    else:
        stored = all_of(GradientIndex.open(path), "rows")
        kept = [stored.index(number) for number in wanted if number in stored]
        assert kept == sorted(kept)
        assert [stored[place] for place in kept] == wanted[: len(kept)]
        index = begun.updated(description, np.array(kept, np.int64))
    for checkpoint, shard in index.unwritten():
        tell([len(index.shards), shard])
        rows = range(len(wanted)) if shard is None else index.shards[shard]
        index.write(
            checkpoint, shard, {"rows": np.array(wanted[rows.start : rows.stop], np.float32)[:, None]}
        )
    return index


def all_of(index: GradientIndex, name: str, most: int = 100) -> list[int]:
    return [int(x) for _, block in index.blocks(0, most, [name]) for x in block[name].reshape(-1)]


@settings(max_examples=12)
@given(st.lists(st.tuples(st.sets(st.integers(0, 12)), st.integers(0, 5)), max_size=4), st.integers(1, 5))
@example([({0, 1, 2, 3}, 2), ({1}, 0), (set(), 3)], 5)
def test_gradient_index_follows_rows_that_go_and_come(
    tmp_path_factory: pytest.TempPathFactory, changes: list[tuple[set[int], int]], most: int
) -> None:
    path, wanted, number = tmp_path_factory.mktemp("index"), [100, 101, 102, 103, 104], 200
    written: list[Any] = []
    follow(path, wanted, written.append)
    for gone, added in changes:
        wanted = [row for place, row in enumerate(wanted) if place not in gone]
        wanted += range(number, number + added)
        number += added
        if not wanted:
            break
        follow(path, wanted, written.append)
        index = GradientIndex.open(path)
        assert all_of(index, "rows", most) == wanted
        starts = [start for start, _ in index.blocks(0, most)]
        sizes = [len(block["rows"]) for _, block in index.blocks(0, most)]
        assert starts == np.cumsum([0, *sizes])[:-1].tolist()
        shared = [list(index.blocks(0, most, None, first, 2)) for first in (0, 1)]
        assert sorted(start for each in shared for start, _ in each) == starts
        assert index.read(0, None)["rows"].reshape(-1).tolist() == wanted
    shards = [each for each in written if each[1] is not None]
    assert len(shards) == len(GradientIndex.open(path).shards), "a row that was there was written again"


@pytest.mark.sweep
def test_gradient_index_update_killed_at_every_operation(tmp_path: Path) -> None:
    before, after = [1, 2, 3], [1, 3, 4]

    def go(path: Path, tell: Tell) -> None:
        follow(path, after, tell)

    def check(path: Path, told: list[Any], finished: bool) -> None:
        try:
            found = all_of(GradientIndex.open(path), "rows")
        except OutputError as error:  # of sums over other rows: they are deleted, and made anew
            assert not finished
            for sums in path.rglob("sums.safetensors") if "another index" in str(error) else ():
                sums.unlink()
        else:
            assert found == after if finished else found in (before, after)

    follow(tmp_path / "undisturbed", before)
    points = points_of(go, tmp_path / "undisturbed")
    assert points >= 15
    for at in range(1, points + 1):
        follow(tmp_path / str(at), before)
        assert kill_and_resume(go, check, tmp_path / str(at), [at]) == 1


def test_gradient_index_lost_shard_of_deleted_rows(tmp_path: Path) -> None:
    follow(tmp_path, [1, 2, 3, 4])
    index = follow(tmp_path, [1, 3, 4, 5])
    index.file(0, 1).unlink()
    assert GradientIndex.resume(tmp_path, index.description).unwritten() == [(0, 1)]
    index.file(0, 0).unlink()
    for action in (GradientIndex.open, lambda path: follow(path, [1, 3, 4, 5])):
        with pytest.raises(OutputError, match="are no more in the data") as refusal:
            action(tmp_path)
        assert "psgrad influence index CONFIG --overwrite" in str(refusal.value)


# -- Reading -------------------------------------------------------------------------------------------------


def test_gradient_index_dtypes(tmp_path: Path) -> None:
    index = GradientIndex.create(tmp_path, {**DESCRIPTION, "rows": 2, "checkpoints": 1})
    given = {
        name: np.arange(4, dtype=name).reshape(2, 2)
        for name in ("float64", "float32", "float16", "uint16", "int16")
    }
    index.write(0, 0, given | {"columns": np.arange(6.0).reshape(2, 3).T})  # not contiguous
    result = index.read(0, 0)
    np.testing.assert_array_equal(result.pop("columns"), np.arange(6.0).reshape(2, 3).T)
    assert {name: array.dtype.name for name, array in result.items()} == {name: name for name in given}


# -- Refusals ------------------------------------------------------------------------------------------------


def test_gradient_index_unfinished_refused(tmp_path: Path) -> None:
    index = GradientIndex.create(tmp_path, DESCRIPTION)
    index.write(0, 0, arrays(0, index.shards[0]))
    index.write(0, 2, arrays(0, index.shards[2]))
    words = f"the index {tmp_path} is half built: 2 of 8 files are written"
    with pytest.raises(OutputError, match=re.escape(words)) as caught:
        GradientIndex.open(tmp_path)
    assert "psgrad influence index CONFIG --resume" in str(caught.value)
    assert index.unwritten()[:2] == [(0, 1), (0, None)]


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"fingerprint": {**DESCRIPTION["fingerprint"], "data": "e" * 64}}, "fingerprint.data was"),
        ({"fingerprint": {"data": "d" * 64, "checkpoints": ["a" * 64]}}, "fingerprint.checkpoints was"),
        ({"parameters": {"weight": [3, 4], "bias": [3]}}, "parameters.weight was"),
        ({"dtype": "float16", "projection": "none"}, 'dtype was "float32" and is "float16"; projection was'),
        ({"seed": 3}, "seed was"),
    ],
)
def test_gradient_index_of_another_run_refused(tmp_path: Path, changed: dict[str, Any], named: str) -> None:
    fill(GradientIndex.create(tmp_path, DESCRIPTION))
    index = GradientIndex.open(tmp_path)
    with pytest.raises(OutputError, match=re.escape(f"the index {tmp_path} is of something else: {named}")):
        index.require(changed)
    with pytest.raises(OutputError, match="is of something else"):
        GradientIndex.resume(tmp_path, {**DESCRIPTION, **changed})
    index.require({"fingerprint": DESCRIPTION["fingerprint"]})
    same = {**DESCRIPTION["fingerprint"], "checkpoints": tuple(DESCRIPTION["fingerprint"]["checkpoints"])}
    index.require(DESCRIPTION | {"fingerprint": same})  # JSON has no tuples


def test_gradient_index_create_over_other_folder_refused(tmp_path: Path) -> None:
    fill(GradientIndex.create(tmp_path / "index", DESCRIPTION))
    with pytest.raises(OutputExistsError, match="holds an earlier index"):
        GradientIndex.create(tmp_path / "index", DESCRIPTION)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "index.json").write_text(json.dumps({"rows": 3}))
    for overwrite in (False, True):
        with pytest.raises(OutputExistsError, match="does not hold a psgrad index"):
            GradientIndex.create(tmp_path / "other", DESCRIPTION, overwrite=overwrite)
    with pytest.raises(OutputError, match="can't be read: it is no index's"):
        GradientIndex.resume(tmp_path / "other", DESCRIPTION)
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputExistsError, match="exists and is not a folder"):
        GradientIndex.create(tmp_path / "file", DESCRIPTION)


def test_gradient_index_overwrite(tmp_path: Path) -> None:
    fill(GradientIndex.create(tmp_path, DESCRIPTION))
    (tmp_path / "checkpoint-000" / "notes.txt").write_text("a stranger's")
    index = GradientIndex.create(tmp_path, DESCRIPTION, overwrite=True)
    assert len(index.unwritten()) == 8
    assert [file.name for file in tmp_path.rglob("*") if file.is_file()] == ["index.json", "notes.txt"]


def test_gradient_index_damaged_shard_refused(tmp_path: Path) -> None:
    for name, dtype in (("one", "float32"), ("two", "float16")):
        fill(GradientIndex.create(tmp_path / name, {**DESCRIPTION, "dtype": dtype}))
    first, second = (
        tmp_path / name / "checkpoint-001" / "gradients-00001.safetensors" for name in ("one", "two")
    )
    whole = first.read_bytes()
    first.write_bytes(second.read_bytes())
    with pytest.raises(OutputError, match=r"gradients-00001.safetensors is of another index"):
        GradientIndex.open(tmp_path / "one")
    first.write_bytes(whole[:-3])
    with pytest.raises(OutputError, match=r"gradients-00001.safetensors can't be read"):
        GradientIndex.open(tmp_path / "one")
    flipped = bytearray(whole)
    flipped[-3] ^= 1  # among the numbers, which stand at the end
    first.write_bytes(flipped)
    with pytest.raises(OutputError, match="holds other numbers than were written") as refusal:
        GradientIndex.open(tmp_path / "one")
    assert "delete it, then psgrad influence index CONFIG --resume" in str(refusal.value)
    first.write_bytes(whole)
    GradientIndex.open(tmp_path / "one")
    with pytest.raises(OutputError, match="there is no index in"):
        GradientIndex.open(tmp_path)


def test_gradient_index_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index = GradientIndex.create(tmp_path, DESCRIPTION)

    def full(descriptor: int, data: bytes) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(durable_files, "write_all", full)
        with pytest.raises(OutputError, match="No space left on device") as caught:
            index.write(0, 0, arrays(0, index.shards[0]))
    assert "free some space, then psgrad influence index CONFIG --resume" in str(caught.value)
    assert len(index.unwritten()) == 8
    assert not list(tmp_path.rglob("*.tmp"))


def test_gradient_index_other_format_refused(tmp_path: Path) -> None:
    GradientIndex.create(tmp_path, DESCRIPTION)
    content = json.loads((tmp_path / "index.json").read_text())
    (tmp_path / "index.json").write_text(json.dumps({**content, "format": 99}))
    with pytest.raises(OutputError, match="was built by another version of psgrad"):
        GradientIndex.open(tmp_path)
