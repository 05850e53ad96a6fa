"""Ranks that have loaded different things: a machine with a copy of its own, or a file that was changed in
between. The run ends with an error that names what differs; it has no number.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import yaml
from safetensors.torch import save_file

from psgrad.engine.execution.ranks import spread_rows
from tests.forked_ranks import EndedRank, run_ranks
from tests.influence_workplace import InfluenceWorkplace

Change = Callable[[InfluenceWorkplace, Path], None]


@pytest.fixture
def place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> InfluenceWorkplace:
    (tmp_path / "first").mkdir()
    found = InfluenceWorkplace(tmp_path / "first", monkeypatch, capfd)
    found.prepare()
    found.config["engine"] = {"chunk_size": 4}
    found.config["output"] = str(tmp_path / "out")
    found.config["influence"] |= {"index": None}
    return found


def other_row(place: InfluenceWorkplace, folder: Path) -> None:
    """The last row is another one."""
    arrays = dict(place.arrays)
    arrays["x"] = arrays["x"].copy()
    arrays["x"][-1, 0] += 1
    np.savez(folder / "data.npz", **arrays)


def other_weights(place: InfluenceWorkplace, folder: Path) -> None:
    weights = {name: value + 0.001 for name, value in place.model.state_dict().items()}
    save_file(weights, folder / "model.safetensors")


def other_code(place: InfluenceWorkplace, folder: Path) -> None:
    source = (folder / "model.py").read_text()
    (folder / "model.py").write_text(source.replace("nn.Tanh()", "nn.ReLU()"))


def other_config(place: InfluenceWorkplace, folder: Path) -> None:
    config = {**place.config, "loss": {"name": "cross_entropy", "label_smoothing": 0.1}}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))


def other_queries(place: InfluenceWorkplace, folder: Path) -> None:
    np.savez(folder / "queries.npz", **{**place.queries, "x": place.queries["x"] + 1})


CHANGES: dict[str, tuple[Change, str]] = {
    "data": (other_row, "data (its content)"),
    "weights": (other_weights, "model (its weights)"),
    "code": (other_code, "model (its modules)"),
    "config": (other_config, "loss"),
}


def ranks_that_differ(place: InfluenceWorkplace, change: Change, *words: str) -> list[EndedRank]:
    """The command in two ranks, of which the second has a copy of the folder that is changed so."""
    (place.folder / "config.yaml").write_text(yaml.safe_dump(place.config))
    copied = place.folder.parent / "second"
    shutil.copytree(place.folder, copied)
    change(place, copied)
    return run_ranks(
        place.folder, 2, *words, "config.yaml", plant=lambda rank: os.chdir(copied) if rank else None
    )


def assert_refused(ended: list[EndedRank], *words: str) -> None:
    """The rank that differs says so, and the first one ends with its error; neither has a number."""
    first, other = ended
    assert (first.code, other.code) == (3, 3), (first.err, other.err)
    for word in ("rank 1 on ", "has loaded something else than rank 0", *words):
        assert word in other.err
    assert "Traceback" not in first.err + other.err
    assert (first.out, other.out) == ("", "")


@pytest.mark.long
@pytest.mark.every(4)
@pytest.mark.parametrize("name", CHANGES)
def test_analyze_by_ranks_that_differ_is_refused(place: InfluenceWorkplace, name: str) -> None:
    change, words = CHANGES[name]
    assert_refused(ranks_that_differ(place, change, "analyze"), words)
    assert not (place.folder.parent / "out" / "samples.parquet").exists()


FACTORY = """
import os
import numpy as np
import torch

class Rows:
    def __init__(self):
        found = np.load("data.npz")
        self.x, self.y = torch.from_numpy(found["x"]), torch.from_numpy(found["y"])

    def __len__(self):
        return len(self.y)

    def __getitem__(self, row):
        apart = row in {rows} and os.environ.get("RANK") == "1"
        return self.x[row] + apart, self.y[row]
"""


@pytest.mark.long
@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("rows", "words"),
    [
        pytest.param("range(24)", ("data (a sample of 16 rows)",), id="all"),
        pytest.param(
            "(2, 5, 8, 11, 14, 17, 20)", ("rank 1 has other rows than rank 0: among the rows",), id="some"
        ),
    ],
)
def test_analyze_by_ranks_whose_factory_gives_other_rows_is_refused(
    place: InfluenceWorkplace, rows: str, words: tuple[str, ...]
) -> None:
    """Rows that are not in the sample which is compared first are compared before they are computed."""
    assert not {2, 5, 8, 11, 14, 17, 20} & set(spread_rows(24, 16))
    (place.folder / "rows.py").write_text(FACTORY.replace("{rows}", rows))
    place.config["data"] = {"factory": "rows.py:Rows"}
    (place.folder / "config.yaml").write_text(yaml.safe_dump(place.config))

    ended = run_ranks(place.folder, 2, "analyze", "config.yaml")
    assert [rank.code for rank in ended] == [3, 3], ended
    for word in words:
        assert word in ended[0].err + ended[1].err
    assert "Traceback" not in ended[0].err + ended[1].err
    assert not list((place.folder.parent / "out").rglob("samples.parquet"))
    assert not list((place.folder.parent / "out").rglob("rank-1/*.parquet"))


@pytest.mark.long
@pytest.mark.every(4)
@pytest.mark.parametrize("name", [*CHANGES, "queries"])
def test_influence_by_ranks_that_differ_is_refused(place: InfluenceWorkplace, name: str) -> None:
    change, words = {**CHANGES, "queries": (other_queries, "queries (their content)")}[name]
    assert_refused(ranks_that_differ(place, change, "influence"), words)
    assert not (place.folder.parent / "out" / "scores.parquet").exists()
