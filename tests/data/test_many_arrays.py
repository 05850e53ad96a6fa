"""Arrays of several npz or safetensors files are one dataset, beside numpy's own concatenation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from psgrad.config import DataConfig
from psgrad.data.rows import Samples
from psgrad.data.sources.load import load_data
from psgrad.errors import ConfigError, DataError, PsgradError

SIZES = (3, 1, 4)


def write(path: Path, arrays: dict[str, np.ndarray[Any, Any]]) -> None:
    if path.suffix == ".npz":
        np.savez(path, **arrays)
    else:
        save_file(arrays, path)


def parts() -> list[dict[str, np.ndarray[Any, Any]]]:
    """Fractions, labels and ids, the types of which differ between files."""
    random, found, first = np.random.default_rng(0), [], 0
    for number, size in enumerate(SIZES):
        x = random.integers(0, 9, (size, 2)) if number == 1 else random.random((size, 2), np.float32)
        y = random.integers(0, 3, size, np.int32 if number else np.int64)
        found.append({"x": x, "y": y, "uid": np.arange(first, first + size)})
        first += size
    return found


def loaded(folder: Path, name: Any, **options: Any) -> Samples:
    return load_data(DataConfig(path=name, **{"inputs": "x", "target": "y", **options}), folder)


def refused(folder: Path, name: Any, kind: type[PsgradError] = DataError, **options: Any) -> str:
    with pytest.raises(kind) as caught:
        loaded(folder, name, **options)
    return str(caught.value)


@pytest.mark.parametrize("suffix", ["npz", "safetensors"])
def test_several_files_of_arrays_are_one_dataset(tmp_path: Path, suffix: str) -> None:
    for number, arrays in enumerate(parts()):
        write(tmp_path / f"{number}.{suffix}", arrays)
    listed = [Path(f"{number}.{suffix}") for number in (2, 0)]
    for name, places in ((Path(f"*.{suffix}"), (0, 1, 2)), (listed, (2, 0))):
        x, y, uid = (np.concatenate([parts()[place][key] for place in places]) for key in ("x", "y", "uid"))
        samples = loaded(tmp_path, name, id="uid")
        assert samples.ids.tolist() == uid.tolist()
        for start in range(len(x)):
            block = samples.read(start, min(start + 5, len(x)))
            assert torch.equal(block.inputs[0], torch.from_numpy(x[start : start + 5].astype("f4")))
            assert block.target is not None
            assert block.target.tolist() == y[start : start + 5].tolist()
        rows = np.array([len(x) - 1, 0, 3, 0])
        assert torch.equal(samples.take(rows).inputs[0], torch.from_numpy(x[rows].astype("f4")))


def test_ids_of_several_widths_in_several_files(tmp_path: Path) -> None:
    write(tmp_path / "0.npz", {"x": np.zeros(2), "uid": np.array(["a", "b"])})
    write(tmp_path / "1.npz", {"x": np.zeros(1), "uid": np.array(["longer"])})
    write(tmp_path / "2.npz", {"x": np.zeros(0), "uid": np.array([], dtype="U1")})
    assert loaded(tmp_path, Path("*.npz"), target=None, id="uid").ids.tolist() == ["a", "b", "longer"]


def test_the_fingerprint_of_several_files_of_arrays(tmp_path: Path) -> None:
    for number, arrays in enumerate(parts()):
        write(tmp_path / f"{number}.npz", arrays)
    names = [Path(f"{number}.npz") for number in range(3)]
    before = loaded(tmp_path, names).fingerprint
    assert loaded(tmp_path, Path("*.npz")).fingerprint == before
    assert loaded(tmp_path, names[::-1]).fingerprint != before
    write(tmp_path / "1.npz", {**parts()[1], "x": np.ones((1, 2))})
    assert loaded(tmp_path, names).fingerprint != before


@pytest.mark.parametrize(
    ("second", "expected"),
    [
        (
            {"x": np.zeros((2, 3)), "y": np.zeros(2)},
            "'x' has mixed types: fixed_size_list<item: double>[2] in ",
        ),
        ({"x": np.array([["a"] * 2] * 2), "y": np.zeros(2)}, "'x' has mixed types: fixed_size_list<item: "),
        ({"x": np.zeros((2, 2)), "y": np.zeros(3)}, "have different numbers of rows: x has 2, y has 3"),
        ({"x": np.zeros((2, 2), np.uint64), "y": np.zeros(2)}, "'x' has mixed types: fixed_size_list<item: "),
    ],
)
def test_files_of_arrays_that_do_not_go_together(tmp_path: Path, second: Any, expected: str) -> None:
    write(tmp_path / "0.npz", {"x": np.zeros((3, 2)), "y": np.zeros(3)})
    write(tmp_path / "1.npz", second)
    message = refused(tmp_path, Path("*.npz"))
    assert expected in message
    assert "1.npz" in message or "uint64" in message


def test_a_file_of_arrays_amid_others_that_can_not_be_read(tmp_path: Path) -> None:
    for number, arrays in enumerate(parts()):
        write(tmp_path / f"{number}.npz", arrays)
    write(tmp_path / "1.npz", {"y": np.zeros(1)})
    assert "1.npz has no column 'x'" in refused(tmp_path, Path("*.npz"), ConfigError)
    (tmp_path / "1.npz").write_bytes((tmp_path / "0.npz").read_bytes()[:200])
    assert "1.npz is damaged: " in refused(tmp_path, Path("*.npz"))
    for number in range(3):
        write(tmp_path / f"{number}.npz", {"x": np.zeros((0, 2)), "y": np.zeros(0)})
    message = refused(tmp_path, Path("*.npz"))
    assert "0.npz and 2 more has no rows" in message
