"""Files that a config names and that are no ordinary ones: pipes, lines without an end, deep nests, paths out
of a folder. And ids, which keep their spelling.
"""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import pytest

from psgrad.config.data import DataConfig
from psgrad.data.columns import ColumnRoles
from psgrad.data.image_files import BrokenImage, content_of, folder_rows
from psgrad.data.sources import text_files
from psgrad.data.sources.load import load_data
from psgrad.data.sources.source import source_for
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
        source_for(path).table(path, ColumnRoles(numbers=("a",)))


@pytest.mark.parametrize("name", ["x.csv", "x.tsv"])
def test_csv_ids_keep_their_spelling(tmp_path: Path, name: str) -> None:
    mark = "," if name.endswith("csv") else "\t"
    ids = [" a", "a ", "a", " 7", "007", "\u00a0b"]
    path = tmp_path / name
    path.write_text("".join(f"{x}{mark}{y}\n" for x, y in [("n", "id"), *((" 1 ", each) for each in ids)]))
    rows = source_for(path).table(path, ColumnRoles(numbers=("n",), ids=("id",)))
    assert rows.column("id").to_pylist() == ids
    assert rows.column("n").to_pylist() == [1] * len(ids)


def test_csv_ids_of_blanks_are_missing(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text("n,id\n1,  \n2,b\n")
    rows = source_for(path).table(path, ColumnRoles(numbers=("n",), ids=("id",)))
    assert rows.column("id").to_pylist() == ["  ", "b"]
    with pytest.raises(DataError, match="row 0 of the column 'id' is empty"):
        load_data(DataConfig(path=Path("x.csv"), inputs="n", id="id"), tmp_path)


@pytest.mark.parametrize("name", ["x.jsonl.gz", "x.txt.gz", "x.jsonl"])
def test_line_that_is_too_long_is_refused_before_it_is_read(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_files, "LONGEST_LINE", 1000)
    path = tmp_path / name
    content = b'{"text": "' + b"a" * 990 + b'"}\n'
    packed = gzip.compress if name.endswith(".gz") else bytes
    path.write_bytes(packed(content))
    source, wanted = source_for(path), ColumnRoles(texts=("text",))
    with pytest.raises(DataError, match=rf"line 1 of .*{name} has more than 1,000 characters"):
        source.table(path, wanted)
    monkeypatch.setattr(text_files, "LONGEST_LINE", len(content))
    assert len(source.table(path, wanted)) == 1


@pytest.fixture
def images(tmp_path: Path) -> Path:
    folder = tmp_path / "images"
    (folder / "sub").mkdir(parents=True)
    for file in (folder / "a.png", folder / "sub" / "b.png", tmp_path / "secret.png"):
        file.write_bytes(b"content")
    (folder / "in.png").symlink_to("sub/b.png")
    (folder / "out.png").symlink_to("../secret.png")
    (folder / "outside").symlink_to("..")
    return folder


def images_named(folder: Path, *names: str) -> DataConfig:
    lines = [json.dumps({"file_name": name, "label": 0}) for name in names]
    (folder / "metadata.jsonl").write_text("\n".join(lines))
    return DataConfig(images=folder.name, target="label")


@pytest.mark.parametrize(
    "name", ["../secret.png", "sub/../../secret.png", "out.png", "outside/secret.png", "/etc/passwd"]
)
def test_metadata_of_images_does_not_lead_out_of_their_folder(images: Path, name: str) -> None:
    config = images_named(images, "a.png", name)
    with pytest.raises(DataError, match=r"row 1 of .*metadata.jsonl names .* leads out of the folder"):
        folder_rows(config, images.parent)


def test_metadata_of_images_inside_of_their_folder_is_read(images: Path) -> None:
    config = images_named(images, "a.png", "sub/b.png", "in.png", "./a.png")
    assert folder_rows(config, images.parent).count == 4
