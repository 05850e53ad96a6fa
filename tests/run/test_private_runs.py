"""The folder of a private run: what may be published is apart from what may not, and a ledger is never
cleared away.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from psgrad.errors import ConfigError, OutputError, OutputExistsError
from psgrad.run import RunFolder, durable_files
from psgrad.run.ledger import Ledger
from psgrad.run.private_runs import WARNING, PrivateRunFolder

FACTS = {
    "version": 1,
    "command": "dp-step",
    "config": {"output": "x"},
    "versions": {"psgrad": "1"},
    "data": {"fingerprint": "abc"},
    "counts": {"samples": 1797},
    "timings": {"load": 0.5},
    "engine": {"out_of_memory_retries": 2},
}


def a_run(path: Path) -> PrivateRunFolder:
    folder = PrivateRunFolder.create(path)
    folder.write_manifest({**FACTS, "state": "running"})
    with Ledger.create(folder.ledger, {"delta": 1e-5}) as ledger:
        ledger.append({"step": 0})
    return folder


def names(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_private_run_public_and_private_files(tmp_path: Path) -> None:
    folder = a_run(tmp_path / "run")
    folder.write_checkpoint(b"tensors")
    folder.write_public_json("step.json", {"steps": 1})
    folder.write_public_bytes("model.safetensors", b"weights")
    folder.write_private_json("step.json", {"clip_fraction": 0.5, "warning": "none"})
    folder.write_private_table("norms.parquet", pd.DataFrame({"norm": [0.5, np.nan]}))
    folder.write_private_bytes("norms.png", b"picture")
    folder.write_manifest({**FACTS, "state": "failed", "error": "row 17 has a NaN"})
    assert names(folder.path) == {
        "manifest.json",
        "checkpoint.pt",
        "public/ledger.jsonl",
        "public/step.json",
        "public/model.safetensors",
        "private/NOT_PRIVATE_manifest.json",
        "private/NOT_PRIVATE_step.json",
        "private/NOT_PRIVATE_norms.parquet",
        "private/NOT_PRIVATE_norms.png",
    }
    assert folder.checkpoint.read_bytes() == b"tensors"


def test_private_run_manifest_halves(tmp_path: Path) -> None:
    folder = a_run(tmp_path / "run")
    folder.write_manifest({**FACTS, "state": "failed", "error": "row 17 has a NaN", "invented later": 3})
    public = json.loads((folder.path / "manifest.json").read_text())
    assert public == {
        "tool": "psgrad",
        **{key: FACTS[key] for key in ("version", "command", "config", "versions")},
        "state": "failed",
    }
    private = folder.private_manifest()
    assert private == {
        "warning": WARNING,
        **{key: FACTS[key] for key in ("data", "counts", "timings", "engine")},
        "error": "row 17 has a NaN",
        "invented later": 3,
    }


def test_private_run_private_file_names(tmp_path: Path) -> None:
    folder = a_run(tmp_path / "run")
    folder.write_private_json("step.json", {"clip_fraction": 0.5, "warning": "none"})
    assert next(
        iter(json.loads((folder.path / "private" / "NOT_PRIVATE_step.json").read_text()).items())
    ) == ("warning", WARNING)
    frame = pd.DataFrame({"norm": [0.5]})
    folder.write_private_table("norms.parquet", frame)
    kept = pd.read_parquet(folder.path / "private" / "NOT_PRIVATE_norms.parquet")
    assert kept.attrs["warning"] == WARNING
    pd.testing.assert_frame_equal(kept, frame)
    assert frame.attrs == {}
    assert WARNING.startswith("NOT PRIVATE: ")
    with pytest.raises(
        ValueError, match=r"private/norms.json: a private file's name begins with NOT_PRIVATE_"
    ):
        folder.write_json("private/norms.json", {})
    with pytest.raises(ValueError, match="begins with NOT_PRIVATE_"):
        folder.write_bytes("private/NOT_PRIVATE_plots/norms.png", b"")


@pytest.mark.parametrize("private_too", [False, True])
def test_private_run_permissions_in_a_folder_that_was_open_to_all(tmp_path: Path, private_too: bool) -> None:
    """Whatever the folders were, and whatever the umask."""
    before = os.umask(0)
    try:
        (tmp_path / "run").mkdir(0o777)
        folder = a_run(tmp_path / "run")
        if private_too:
            shutil.rmtree(folder.path / "private")
            (folder.path / "private").mkdir(0o777)
            durable_files.temporary_for(folder.path / "private" / "NOT_PRIVATE_x.json").touch(0o666)
        folder.write_private_json("x.json", {})
        folder.write_private_table("t.parquet", pd.DataFrame({"norm": [1.0]}))
        folder.write_public_json("step.json", {})
    finally:
        os.umask(before)
    private = folder.path / "private"
    assert private.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in private.iterdir()} == {0o600}
    assert (folder.path / "public" / "step.json").stat().st_mode & 0o777 == 0o666


@pytest.mark.parametrize("kind", [RunFolder, PrivateRunFolder])
@pytest.mark.parametrize("overwrite", [False, True])
def test_private_run_overwrite_keeps_ledger(tmp_path: Path, kind: type[RunFolder], overwrite: bool) -> None:
    folder = a_run(tmp_path / "run")
    before = names(folder.path)
    with pytest.raises(OutputExistsError, match="holds the ledger of a private run") as refusal:
        kind.create(folder.path, overwrite)
    assert refusal.value.exit_code == 2
    assert "--overwrite never removes one" in str(refusal.value)
    assert "--resume" in str(refusal.value)
    assert names(folder.path) == before


def test_private_run_overwrite_before_first_step(tmp_path: Path) -> None:
    folder = PrivateRunFolder.create(tmp_path / "run")
    folder.write_manifest(FACTS)
    folder.write_private_json("x.json", {})
    (folder.path / "public").mkdir()
    folder.ledger.write_bytes(b'{"kind": "hea')
    with pytest.raises(ConfigError, match=r"killed before its first step, so that nothing was spent"):
        PrivateRunFolder.open(folder.path)
    with pytest.raises(OutputExistsError, match="holds an earlier run"):
        PrivateRunFolder.create(folder.path)
    assert names(PrivateRunFolder.create(folder.path, overwrite=True).path) == {"manifest.json"}


def test_private_run_resume_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no run to resume in") as refusal:
        PrivateRunFolder.open(tmp_path / "nowhere")
    assert refusal.value.exit_code == 2
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(ConfigError, match="there is no run to resume"):
        PrivateRunFolder.open(tmp_path)
    analysis = RunFolder.create(tmp_path / "run")
    analysis.write_manifest({"command": "analyze"})
    with pytest.raises(ConfigError, match="it is one of `psgrad analyze`, which is no private run"):
        PrivateRunFolder.open(analysis.path)
    assert (
        PrivateRunFolder.open(a_run(tmp_path / "private").path).checkpoint
        == tmp_path / "private" / "checkpoint.pt"
    )


def test_private_run_removes_temporary_files(tmp_path: Path) -> None:
    folder = a_run(tmp_path / "run")
    kept = names(folder.path) | {".mine.1.tmp"}
    leftovers = [
        ".manifest.json.9.tmp",
        ".checkpoint.pt.9.tmp",
        "public/.step.json.9.tmp",
        "private/.NOT_PRIVATE_x.json.9.tmp",
    ]
    for name in [*leftovers, ".mine.1.tmp"]:
        (folder.path / name).write_text("half")
    folder.remove_leftovers()
    assert names(folder.path) == kept


def test_private_run_resume_without_private_manifest_refused(tmp_path: Path) -> None:
    folder = a_run(tmp_path / "run")
    (folder.path / "private" / "NOT_PRIVATE_manifest.json").write_text("{")
    with pytest.raises(OutputError, match=r"NOT_PRIVATE_manifest.json can't be read: Expecting"):
        folder.private_manifest()
    (folder.path / "private" / "NOT_PRIVATE_manifest.json").unlink()
    with pytest.raises(OutputError, match=r"can't be read: No such file") as refusal:
        folder.private_manifest()
    assert "by which they are known again" in str(refusal.value)


def test_private_run_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = a_run(tmp_path / "run")
    folder.write_checkpoint(b"old")

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OutputError, match="the disk is full") as failure:
            folder.write_checkpoint(b"new")
    assert "hint: the ledger and the last checkpoint" in str(failure.value)
    assert "go on with --resume" in str(failure.value)
    assert folder.checkpoint.read_bytes() == b"old"
