"""Files that a config names and that are no ordinary ones: pipes, lines without an end, deep nests, paths out
of a folder. And ids, which keep their spelling.
"""

from __future__ import annotations

import gzip
import os
from pathlib import Path

import pytest

from psgrad.config.data import DataConfig
from psgrad.data.columns import ColumnRoles
from psgrad.data.image_files import BrokenImage, content_of
from psgrad.data.sources import json_files
from psgrad.data.sources.files import read_file
from psgrad.data.sources.load import load_data
from psgrad.errors import CheckpointError, ConfigError, DataError
from psgrad.quality.baselines import read_baseline
from psgrad.quality.findings import read_ignore_list
from psgrad.run.input_files import require_file
from psgrad.user_code import call_factory


@pytest.fixture
def pipe(tmp_path: Path) -> Path:
    """A pipe that nobody writes to: whoever opens it waits without an end."""
    path = tmp_path / "pipe.py"
    os.mkfifo(path)
    return path


def test_pipe_is_refused_as_data_or_checkpoint_or_list_or_code(pipe: Path) -> None:
    with pytest.raises(ConfigError, match=r"the dataset .*pipe.py is no regular file, but a pipe"):
        require_file(pipe, "dataset", DataError)
    with pytest.raises(ConfigError, match="the checkpoint"):
        require_file(pipe, "checkpoint", CheckpointError)
    with pytest.raises(ConfigError, match="the ignore list"):
        read_ignore_list(pipe)
    with pytest.raises(ConfigError, match="the baseline"):
        read_baseline(pipe)
    with pytest.raises(ConfigError, match="the code"):
        call_factory("pipe.py:build", pipe.parent, {}, raises=ConfigError)
    with pytest.raises(BrokenImage, match=r"row 3: the image .* is no regular file"):
        content_of("pipe.py", pipe.parent, "row 3")


def test_device_is_refused_as_data() -> None:
    with pytest.raises(ConfigError, match="no regular file"):
        require_file(Path("/dev/zero"), "dataset", DataError)


NEST = '{"a": ' + "[" * 100_000 + "]" * 100_000 + "}"


@pytest.mark.parametrize(("name", "text"), [("x.json", f"[{NEST}]"), ("x.jsonl", NEST)])
def test_json_nested_deeply_is_an_error_of_the_data(tmp_path: Path, name: str, text: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(DataError, match=r"x\.jsonl?.* is no JSON: .*nested too deeply"):
        read_file(path, ColumnRoles(numbers=("a",)))


@pytest.mark.parametrize("name", ["x.csv", "x.tsv"])
def test_csv_ids_keep_their_spelling(tmp_path: Path, name: str) -> None:
    mark = "," if name.endswith("csv") else "\t"
    ids = [" a", "a ", "a", " 7", "007", "\u00a0b"]
    path = tmp_path / name
    path.write_text("".join(f"{x}{mark}{y}\n" for x, y in [("n", "id"), *((" 1 ", each) for each in ids)]))
    rows = read_file(path, ColumnRoles(numbers=("n",), ids=("id",)))
    assert rows.column("id").to_pylist() == ids
    assert rows.column("n").to_pylist() == [1] * len(ids)


def test_csv_ids_of_blanks_are_missing(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text("n,id\n1,  \n2,b\n")
    rows = read_file(path, ColumnRoles(numbers=("n",), ids=("id",)))
    assert rows.column("id").to_pylist() == ["  ", "b"]
    with pytest.raises(DataError, match="row 0 of the column 'id' is empty"):
        load_data(DataConfig(path=Path("x.csv"), inputs="n", id="id"), tmp_path)


@pytest.mark.parametrize("name", ["x.jsonl.gz", "x.txt.gz", "x.jsonl"])
def test_line_that_is_too_long_is_refused_before_it_is_read(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_files, "LONGEST_LINE", 1000)
    path = tmp_path / name
    content = b'{"text": "' + b"a" * 990 + b'"}\n'
    packed = gzip.compress if name.endswith(".gz") else bytes
    path.write_bytes(packed(content))
    wanted = ColumnRoles(texts=("text",))
    with pytest.raises(DataError, match=rf"line 1 of .*{name} has more than 1,000 characters"):
        read_file(path, wanted)
    monkeypatch.setattr(json_files, "LONGEST_LINE", len(content))
    assert len(read_file(path, wanted)) == 1
