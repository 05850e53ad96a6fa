"""A private run's folder that was copied, moved or restored: what it spent elsewhere is not in its ledger, so
it is refused until its owner says that there is no other.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from psgrad.engine.privacy.accounting import Epsilon
from psgrad.storage import ledger
from tests.private_workplace import PrivateWorkplace
from tests.workplace import Workplace


@pytest.fixture
def private(workplace: Workplace, monkeypatch: pytest.MonkeyPatch) -> PrivateWorkplace:
    monkeypatch.setattr(
        "psgrad.workflows.private_steps.write_plots", lambda result, public, private, unit: None
    )
    monkeypatch.setattr(
        "psgrad.workflows.private_statement.epsilon_pld", lambda events, delta: Epsilon(None, "not asked for")
    )
    return PrivateWorkplace(workplace)


def copied(private: PrivateWorkplace) -> None:
    shutil.copytree(private.run_folder, private.folder / "copy")
    private.config["output"] = "copy"


def moved(private: PrivateWorkplace) -> None:
    private.run_folder.rename(private.folder / "moved")
    private.config["output"] = "moved"


def replaced_by_a_backup(private: PrivateWorkplace) -> None:
    backup = private.folder / "backup"
    shutil.copytree(private.run_folder, backup)
    private.succeeded("--resume")
    shutil.rmtree(private.run_folder)
    shutil.copytree(backup, private.run_folder)


def ledger_and_checkpoint_restored(private: PrivateWorkplace) -> None:
    """As rsync does: a new file under the old name. Numbers of files are used again, so the time of birth
    tells.
    """
    files = [private.run_folder / "public" / "ledger.jsonl", private.run_folder / "checkpoint.safetensors"]
    old = [(path, path.read_bytes()) for path in files]
    private.succeeded("--resume")
    for path, content in old:
        path.unlink()
        path.write_bytes(content)


def place_file_gone(private: PrivateWorkplace) -> None:
    (private.run_folder / "private" / "NOT_PRIVATE_place.json").unlink()


CASES = [copied, moved, replaced_by_a_backup, ledger_and_checkpoint_restored, place_file_gone]


@pytest.mark.long
@pytest.mark.every(5)
@pytest.mark.parametrize("happened", CASES)
def test_dp_resume_in_a_folder_that_may_be_a_copy_is_refused_until_owned(
    private: PrivateWorkplace, happened: Callable[[PrivateWorkplace], None]
) -> None:
    private.succeeded("--steps", "2")
    happened(private)
    ledger = (private.run_folder / "public" / "ledger.jsonl").read_bytes()
    said = private.refused(3, "is not where the run left it", "composed", "--moved", options=("--resume",))
    assert "traceback" not in said.lower()
    assert (private.run_folder / "public" / "ledger.jsonl").read_bytes() == ledger
    private.succeeded("--resume", "--moved")
    assert private.ledger("resume")[-1]["moved"] is True
    assert private.step()["moved"] == 1
    assert (
        "the run folder was moved 1 time, and that no copy of it went on is its owner's word"
        in private.step()["guarantee"]
    )
    private.succeeded("--resume")  # it is at home there
    assert private.ledger("resume")[-1]["moved"] is False
    assert private.step()["moved"] == 1


@pytest.mark.long
def test_dp_resume_of_a_copy_does_not_stop_the_original(private: PrivateWorkplace) -> None:
    private.succeeded()
    copied(private)
    private.refused(
        3, "is not where the run left it: it was at ", "it is another file", options=("--resume",)
    )
    private.config["output"] = "out"
    private.succeeded("--resume")
    assert private.step()["moved"] == 0
    assert "folder was moved" not in private.step()["guarantee"]


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


@pytest.mark.sweep
def test_dp_resume_on_another_machine_is_reported(
    private: PrivateWorkplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    private.succeeded()
    monkeypatch.setattr(ledger.platform, "node", lambda: "another")
    assert "and is on another now" in private.succeeded("--resume").err
    assert "machine" not in private.succeeded("--resume").err


def test_dp_moved_without_resume_is_refused(private: PrivateWorkplace) -> None:
    private.refused(2, "--moved was given without --resume", options=("--moved",))


def test_dp_resume_of_an_older_ledger_is_refused(private: PrivateWorkplace) -> None:
    private.succeeded()
    path = private.run_folder / "public" / "ledger.jsonl"
    header, *_ = path.read_bytes().splitlines(keepends=True)
    old = {key: value for key, value in json.loads(header).items() if key != "run"}
    path.write_text(json.dumps(old) + "\n")
    (private.run_folder / "checkpoint.safetensors").unlink()
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
def test_public_files_have_no_path_and_no_machine(
    private: PrivateWorkplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger.platform, "node", lambda: "the-name-of-a-machine")
    private.succeeded()
    private.succeeded("--resume")
    public = b"".join(path.read_bytes() for path in (private.run_folder / "public").iterdir())
    assert b"the-name-of-a-machine" not in public
    assert str(private.folder).encode() not in public
    hashes = json.loads((private.run_folder / "private" / "NOT_PRIVATE_manifest.json").read_text())["hashes"]
    assert hashes["data"].encode() not in public


def test_born_is_kept_by_touch_and_new_in_a_copy(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("a")
    first = ledger.birth_time(path)
    if first is None:
        pytest.skip("this file system does not tell when a file was made")
    path.write_text("ab")
    os.utime(path, (1, 1))
    assert ledger.birth_time(path) == first
    shutil.copy2(path, tmp_path / "copy")
    assert ledger.birth_time(tmp_path / "copy") != first
    assert abs(first / 1e9 - path.stat().st_ctime) < 60
