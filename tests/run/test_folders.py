"""Run folders: nothing half-written, nothing of a stranger's removed, finished work stays when the disk is
full.
"""

from __future__ import annotations

import csv
import errno
import json
import math
import os
import signal
import subprocess
import sys
import textwrap
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from psgrad.errors import OutputError, OutputExistsError
from psgrad.run import RunFolder
from psgrad.run.shards import Shards
from tests.nasty import NASTY, NOT_IN_PARQUET

ROWS = pd.DataFrame({"id": ["a", "b"], "loss": [0.5, np.nan], "rank": pd.array([1, None], dtype="Int64")})


def append(run: RunFolder) -> None:
    Shards(run, "samples", counted=True).append(0, ROWS, {}, {})


def _names(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_run_folder_from_shards_to_tables(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path / "deep" / "run")
    shards = Shards(run, "samples", counted=True)
    for end in (2.0, 4.0):
        shards.append(int(end) - 2, ROWS, {}, {"sum": np.array(end)})
    assert _names(run.path) == {
        "manifest.json",
        *(f"parts/samples/{name}" for name in ("00000.parquet", "00001.parquet", "_00001.state.safetensors")),
        *(f"parts/samples/_0000{number}.arrays.safetensors" for number in (0, 1)),
    }
    run.finish_samples(pd.concat([ROWS, ROWS]))
    run.drop_shards()
    run.write_table("parameters.parquet", ROWS)
    run.write_bytes("plots/norms.png", b"png")
    run.write_manifest({"state": "complete"})
    tables = ("samples.parquet", "samples.csv", "parameters.parquet")
    assert _names(run.path) == {"manifest.json", *tables, "plots/norms.png"}
    pd.testing.assert_frame_equal(pd.read_parquet(run.path / "parameters.parquet"), ROWS)
    assert len(pd.read_csv(run.path / "samples.csv")) == 4
    assert json.loads((run.path / "manifest.json").read_text()) == {"tool": "psgrad", "state": "complete"}


def test_run_folder_of_a_run_killed_before_its_manifest(tmp_path: Path) -> None:
    (tmp_path / ".manifest.json.123.tmp").write_text('{"too')
    RunFolder.require_free(tmp_path)
    assert _names(RunFolder.create(tmp_path).path) == {"manifest.json"}


def test_run_folder_overwrite(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path / "run")
    append(run)
    with pytest.raises(OutputExistsError, match="holds an earlier run") as refusal:
        RunFolder.create(run.path)
    assert refusal.value.exit_code == 2
    assert "--overwrite" in str(refusal.value)
    assert "parts/samples/00000.parquet" in _names(run.path)
    RunFolder.create(run.path, overwrite=True)
    assert _names(run.path) == {"manifest.json"}


@pytest.mark.parametrize("manifest", [None, "{}", '{"name": "an app"}', "[1]", "not JSON"])
def test_run_folder_overwrite_of_other_folder_refused(tmp_path: Path, manifest: str | None) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    if manifest is not None:
        (tmp_path / "manifest.json").write_text(manifest)
    before = _names(tmp_path)
    with pytest.raises(OutputExistsError, match="does not hold a psgrad run"):
        RunFolder.create(tmp_path, overwrite=True)
    with pytest.raises(OutputExistsError, match="does not hold a psgrad run"):  # at once
        RunFolder.join(tmp_path, lambda: None, lambda: RunFolder.create(tmp_path))
    assert _names(tmp_path) == before


def test_run_folder_overwrite_keeps_other_files(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path / "run")
    treasure = tmp_path / "treasure"
    treasure.mkdir()
    (treasure / "gold").write_text("gold")
    (run.path / "parts").symlink_to(treasure)
    (run.path / "notes.txt").write_text("mine")
    (run.path / ".samples.csv.123.tmp").write_text("left by a crash")
    (run.path / ".manifest.json.123.tmp").write_text("left by a crash")
    RunFolder.create(run.path, overwrite=True)
    assert _names(run.path) == {"manifest.json", "notes.txt"}
    assert (treasure / "gold").exists()


def test_run_folder_without_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def closed(self: Path) -> Any:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(Path, "iterdir", closed)
    with pytest.raises(OutputError, match="can't be made: Permission denied"):
        RunFolder.require_free(tmp_path)


def test_run_folder_path_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file")
    with pytest.raises(OutputExistsError, match="not a folder"):
        RunFolder.create(tmp_path / "run", overwrite=True)
    with pytest.raises(OutputError, match="can't be made"):
        RunFolder.create(tmp_path / "run" / "below")


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_run_folder_full_disk_keeps_shards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    run = RunFolder.create(tmp_path / "run")
    append(run)
    before = _names(run.path)

    def full(descriptor: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OutputError) as failure:
        run.write_bytes("samples.csv", b"x" * 12_345)
    monkeypatch.undo()
    assert "12,345 free bytes" in str(failure.value)
    assert "2 finished samples stay" in str(failure.value)
    assert failure.value.exit_code == 3
    assert _names(run.path) == before
    assert len(pd.read_parquet(run.path / "parts" / "samples" / "00000.parquet")) == 2


@pytest.mark.parametrize("call", ["write", "fsync", "replace"])
@pytest.mark.parametrize("kind", [OSError, KeyboardInterrupt])
def test_run_folder_failed_write_keeps_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, kind: type[BaseException]
) -> None:
    run = RunFolder.create(tmp_path / "run")
    run.write_bytes("report.html", b"old")

    def broken(*_: Any) -> Any:
        raise kind(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, call, broken)
    with pytest.raises(OutputError if kind is OSError else kind, match="Input/output error"):
        run.write_bytes("report.html", b"new")
    assert (run.path / "report.html").read_bytes() == b"old"
    assert _names(run.path) == {"manifest.json", "report.html"}


@pytest.mark.long
@pytest.mark.skipif(not hasattr(signal, "SIGXFSZ"), reason="needs RLIMIT_FSIZE")
def test_run_folder_file_size_limit(tmp_path: Path) -> None:
    script = f"""
        import resource, signal
        from pathlib import Path
        import pandas as pd
        from psgrad.errors import OutputError
        from psgrad.run import RunFolder
        from psgrad.run.shards import Shards

        run = RunFolder.create(Path({str(tmp_path / "run")!r}))
        Shards(run, "samples", counted=True).append(0, pd.DataFrame({{"id": range(10)}}), {{}}, {{}})
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
        try:
            run.finish_samples(pd.DataFrame({{"id": [f"{{i * 7919:x}}" for i in range(100_000)]}}))
        except OutputError as error:
            print(error)
    """
    output = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=True
    ).stdout
    assert "disk is full or over quota" in output
    assert "10 finished samples stay" in output
    assert _names(tmp_path / "run") == {
        "manifest.json",
        "parts/samples/00000.parquet",
        *(f"parts/samples/_00000.{kind}.safetensors" for kind in ("arrays", "state")),
    }


def test_run_folder_json_of_any_value(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path / "run")
    content = {
        "a": np.float32(0.5),
        "b": np.arange(2),
        "c": math.nan,
        "d": np.inf,
        "e": Path("x/y"),
        3: (1, "ü"),
        "f": np.bool_(True),
    }
    run.write_json("facts.json", content)
    plain = {"a": 0.5, "b": [0, 1], "c": None, "d": None, "e": "x/y", "3": [1, "ü"], "f": True}
    assert json.loads((run.path / "facts.json").read_text("utf-8")) == plain


def test_run_folder_csv_formulas_escaped(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path / "run")
    ids = ["=1+1", "+1", "-1", "@x", "\tx", "a=b", ""]
    run.finish_samples(pd.DataFrame({"id": ids, "log_norm": [-1.5] * 7}))
    table = pd.read_csv(run.path / "samples.csv", keep_default_na=False)
    assert table["id"].tolist() == ["'=1+1", "'+1", "'-1", "'@x", "'\tx", "a=b", ""]
    assert table["log_norm"].tolist() == [-1.5] * 7
    assert pd.read_parquet(run.path / "samples.parquet")["id"].tolist() == ids


@pytest.mark.parametrize("what", [name for name in NASTY if name not in NOT_IN_PARQUET])
def test_run_folder_csv_nasty_text(tmp_path: Path, what: str) -> None:
    run = RunFolder.create(tmp_path / "run")
    hidden = ("", " ", "\u3000", "\ufeff", "\u200b", "\u202e", "\x00", "\n")
    full_width = {"=": "\uff1d", "+": "\uff0b", "-": "\uff0d", "@": "\uff20"}
    text = NASTY[what]
    wide = full_width.get(text[:1], text[:1]) + text[1:]
    cells = [before + each for before in hidden for each in (text, wide)]
    run.finish_samples(pd.DataFrame({"id": cells}))
    with (run.path / "samples.csv").open(encoding="utf-8", newline="") as file:
        _, *rows = csv.reader(file)
    starts = ("=", "+", "-", "@", *full_width.values())
    for (cell,), before in zip(rows, cells, strict=True):
        assert cell in (before, f"'{before}")
        shown = cell.strip("".join(hidden)).lstrip()
        assert not shown.startswith(starts)
        assert not cell.startswith(("\t", "\r", "\n"))


def test_run_folder_permissions(tmp_path: Path) -> None:
    assert RunFolder.create(tmp_path / "run").path.stat().st_mode & 0o077 == 0
    (tmp_path / "empty").mkdir()
    for path in (tmp_path / "empty", tmp_path / "deep" / "new"):
        joined = RunFolder.join(path, lambda: None, partial(RunFolder.create, path))
        assert joined.path.stat().st_mode & 0o077 == 0
