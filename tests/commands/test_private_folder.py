"""A private run's folder that was moved, or that has a part of another run."""

from __future__ import annotations

import json
import os
import platform
import shutil
import sys

import pytest
import yaml

from psgrad.commands.dp_step import dp_step
from psgrad.config import load_config
from tests.private_workplace import PrivateWorkplace


@pytest.mark.long
def test_dp_resume_from_another_folder_or_by_a_link_or_after_touch_is_accepted(
    private: PrivateWorkplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    private.succeeded()
    for path in private.run_folder.rglob("*"):
        os.utime(path, (1, 1))
        path.chmod(0o700)
    (private.folder / "link").symlink_to(private.run_folder)
    private.config["output"] = str(private.folder / "link")
    private.succeeded("--resume")
    elsewhere = private.folder / "elsewhere"
    elsewhere.mkdir()
    private.config["output"] = "../out"
    for name in ("model.py", "model.safetensors", "data.npz"):
        shutil.copy(private.folder / name, elsewhere)
    private.folder = elsewhere
    monkeypatch.chdir(elsewhere)
    private.succeeded("--resume")
    assert private.step()["steps"] == 3


def test_dp_resume_of_an_older_ledger_is_refused(private: PrivateWorkplace) -> None:
    private.succeeded()
    path = private.run_folder / "public" / "ledger.jsonl"
    header, *_ = path.read_bytes().splitlines(keepends=True)
    old = {key: value for key, value in json.loads(header).items() if key != "run"}
    path.write_text(json.dumps(old) + "\n")
    (private.run_folder / "checkpoint.pt").unlink()
    private.refused(2, "begun by an older psgrad", "--output", options=("--resume",))


@pytest.mark.sweep
def test_dp_resume_with_the_private_folder_of_another_run_is_refused(private: PrivateWorkplace) -> None:
    private.succeeded()
    private.config["output"] = "other"
    private.succeeded()
    shutil.copy(
        private.folder / "out" / "private" / "NOT_PRIVATE_manifest.json", private.run_folder / "private"
    )
    private.refused(2, "belongs to another run than the ledger", options=("--resume",))


@pytest.mark.long
def test_what_is_public_names_no_path_machine_command_or_commit(
    private: PrivateWorkplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["psgrad", "dp-step", "/home/somebody/secret/config.yaml"])
    (private.folder / "config.yaml").write_text(yaml.safe_dump(private.config))
    for resume in (False, True):
        dp_step(load_config(private.folder / "config.yaml"), resume=resume)
    manifest = (private.run_folder / "manifest.json").read_bytes()
    public = manifest + private.public()
    for secret in ("somebody", str(private.folder), platform.node()):
        assert secret.encode() not in public
    hashes = json.loads((private.run_folder / "private" / "NOT_PRIVATE_manifest.json").read_text())["hashes"]
    assert hashes["data"].encode() not in public
    assert not {"created", "command_line"} & set(json.loads(manifest))
