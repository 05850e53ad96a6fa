"""The budget of a dataset: what several runs, copies and restored folders spend is composed in one file."""

from __future__ import annotations

import json
import os
import random
import shutil
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dp_accounting as dpa
import numpy as np
import pytest
import yaml
from dp_accounting import pld

from psgrad.commands.dp_budget import read_budget
from psgrad.commands.dp_step import dp_step
from psgrad.config import load_config
from psgrad.engine.privacy.accounting.budgets import accounts_of, composed
from psgrad.engine.privacy.sampling import Sampling
from psgrad.errors import LedgerError
from psgrad.run.ledger import Ledger
from psgrad.run.ledger_lines import has_begun
from tests.crashes import Go, Tell, kill_and_resume, points_of
from tests.private_workplace import PrivateWorkplace

BUDGET = {"file": "budget.jsonl", "epsilon": 100.0, "delta": 0.01}


@pytest.fixture
def private(private: PrivateWorkplace) -> PrivateWorkplace:
    private.privacy["budget"] = dict(BUDGET)
    return private


def lines_of(private: PrivateWorkplace, kind: str | None = None) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (private.folder / "budget.jsonl").read_text().splitlines()]
    return [line for line in lines if kind is None or line["kind"] == kind]


def spent_by_library(steps: list[dict[str, Any]], delta: float) -> float:
    """Epsilon of the lines of steps, by dp-accounting alone."""
    accountant = pld.PLDAccountant()
    for (rate, noise), count in Counter(
        (line["sample_rate"], line["noise_multiplier"]) for line in steps
    ).items():
        accountant.compose(dpa.PoissonSampledDpEvent(rate, dpa.GaussianDpEvent(noise)), count)
    return float(accountant.get_epsilon(delta))


# -- composition ---------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("seed", [0, *(pytest.param(each, marks=pytest.mark.sweep) for each in range(1, 10))])
def test_budget_composes_what_dp_accounting_composes(tmp_path: Path, seed: int) -> None:
    """Sixty random sequences of runs, entered as runs enter them; a tenth of them by default."""
    draw = random.Random(seed)
    for sequence in range(6):
        path, steps = tmp_path / f"{sequence}.jsonl", []
        file = Ledger.shared(path, {"command": "budget", "epsilon": 8, "delta": 1e-5})
        for run in range(draw.randint(1, 3)):
            event = {
                "noise_multiplier": draw.choice([0.7, 1.0, 1.6, 3.0]),
                "scheme": "poisson",
                "sample_rate": draw.choice([0.01, 0.1, 1.0]),
                "relation": "add_or_remove_one",
                "mechanism": "gaussian",
            }
            taken, asked = draw.randint(0, 6), draw.randint(6, 9)
            with file.held():
                file.append({"run": f"{run}", "reserved": [{**event, "steps": asked}]}, "note")
                for step in range(taken):
                    file.append({"run": f"{run}", "step": step + 1, "ledger_sha256": "", **event})
                if draw.random() < 0.5:  # it ended, and gave back what it did not take
                    file.append({"run": f"{run}", "reserved": []}, "note")
                    asked = taken
            steps += [event] * asked
            paid = sum(accounts_of(file.lines)[f"{run}"].paid.values())
            assert paid == taken
        found = composed(accounts_of(read_budget(path).lines), 1e-5).value
        assert found is not None
        truth = spent_by_library(steps, 1e-5) if steps else 0.0
        assert truth * (1 - 1e-6) <= found <= truth * 1.01 + 1e-9


# -- refusals ------------------------------------------------------------------------------------------------


def test_budget_that_a_run_would_exceed_refuses_it_before_it_draws(
    private: PrivateWorkplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    private.privacy["budget"]["epsilon"] = 0.3
    drawn = []
    monkeypatch.setattr(Sampling, "draw", lambda *_: drawn.append(1))
    said = private.refused(2, "to epsilon", "at most 0.3, of which 0 is spent", options=("--steps", "5"))
    assert "dp-budget" in said
    assert not drawn
    assert not (private.run_folder / "public").exists()
    assert not lines_of(private, "note")


@pytest.mark.long
def test_budget_counts_steps_of_earlier_runs_against_a_new_one(private: PrivateWorkplace) -> None:
    two = composed_by_library([2.0] * 2)
    private.privacy["budget"]["epsilon"] = two * 1.01
    private.succeeded("--steps", "2")
    private.config["output"] = "second"
    private.refused(2, "would bring what is spent", f"of which {two:.3g}"[:-1])
    assert not private.run_folder.exists()
    private.config["output"] = "out"
    private.refused(2, "would bring what is spent", options=("--resume",))
    assert private.ledger("resume") == []  # nothing was written


def test_budget_keeps_what_is_reserved_for_another_run(private: PrivateWorkplace) -> None:
    private.privacy["budget"]["epsilon"] = composed_by_library([2.0] * 3) * 1.01
    private.succeeded()
    event = {key: lines_of(private, "step")[0][key] for key in ("noise_multiplier", "scheme", "sample_rate")}
    reserved = {**event, "relation": "add_or_remove_one", "mechanism": "gaussian", "steps": 1}
    file = Ledger.shared(private.folder / "budget.jsonl", {})
    with file.held():
        file.append({"run": "another", "reserved": [reserved]}, "note")
    private.refused(2, "1 step reserved for other runs", options=("--resume", "--steps", "2"))
    private.succeeded("--resume")


def composed_by_library(multipliers: list[float]) -> float:
    return spent_by_library([{"sample_rate": 0.5, "noise_multiplier": each} for each in multipliers], 0.01)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"relation": "zero_out"}, "relation was add_or_remove_one and is zero_out"),
        ({"budget": {**BUDGET, "epsilon": 200.0}}, "epsilon was 100.0 and is 200.0"),
        ({"budget": {**BUDGET, "delta": 0.02}}, "delta was 0.01 and is 0.02"),
        ({"unit": {"column": "user"}, "expected_batch_size": 3}, "unit was one row and is all rows with one"),
    ],
)
def test_budget_refuses_what_does_not_compose(
    private: PrivateWorkplace, change: dict[str, Any], words: str
) -> None:
    private.succeeded()
    if "unit" in change:
        private.workplace.save(user=np.arange(24) // 4)
    private.privacy.update(change)
    private.config["output"] = "second"
    private.refused(2, "is not one of this run", words)


def test_budget_of_other_data_is_refused(private: PrivateWorkplace) -> None:
    private.succeeded()
    header, *_ = (private.folder / "budget.jsonl").read_text().splitlines(keepends=True)
    (private.folder / "budget.jsonl").write_text(json.dumps({**json.loads(header), "data": "0" * 64}) + "\n")
    private.config["output"] = "second"
    private.refused(2, "the data are others")


def test_budget_with_a_delta_above_one_over_the_records_is_refused(private: PrivateWorkplace) -> None:
    private.privacy["budget"]["delta"] = 0.5
    private.refused(2, "privacy.budget.delta is 0.5, and the dataset has 24 records")


def test_budget_that_is_a_folder_is_refused(private: PrivateWorkplace) -> None:
    (private.folder / "budget.jsonl").mkdir()
    private.refused(3, "can't be opened: Is a directory")


@pytest.mark.parametrize(
    ("content", "code", "words"),
    [
        ("no ledger\n", 3, "is damaged: line 1"),
        (
            '{"kind": "header", "position": 0, "previous": null, "tool": "psgrad", "format": 1}\n',
            3,
            "no budget",
        ),
    ],
)
def test_budget_file_that_is_another_file_is_refused(
    private: PrivateWorkplace, content: str, code: int, words: str
) -> None:
    (private.folder / "budget.jsonl").write_text(content)
    private.refused(code, words)
    assert (private.folder / "budget.jsonl").read_text() == content


def test_budget_with_a_seed_is_refused(private: PrivateWorkplace) -> None:
    private.privacy["noise"]["seed"] = 1
    private.refused(2, "protects nothing from who knows noise.seed", options=("--insecure-deterministic",))


# -- copies and backups --------------------------------------------------------------------------------------


def copy_that_stayed_behind(private: PrivateWorkplace) -> None:
    shutil.copytree(private.run_folder, private.folder / "copy")
    private.succeeded("--resume")
    private.config["output"] = "copy"


def original_of_a_copy_that_went_on(private: PrivateWorkplace) -> None:
    shutil.copytree(private.run_folder, private.folder / "copy")
    private.config["output"] = "copy"
    private.succeeded("--resume")
    private.config["output"] = "out"


def restored_from_a_backup_in_place(private: PrivateWorkplace) -> None:
    """Also `cp -r backup/. run/`, which no number of a file tells."""
    kept = {path: path.read_bytes() for path in private.run_folder.rglob("*") if path.is_file()}
    private.succeeded("--resume")
    for path, content in kept.items():
        path.write_bytes(content)


@pytest.mark.long
@pytest.mark.parametrize(
    "happened",
    [copy_that_stayed_behind, original_of_a_copy_that_went_on, restored_from_a_backup_in_place],
)
def test_budget_refuses_a_ledger_that_was_copied_or_rolled_back(
    private: PrivateWorkplace, happened: Callable[[PrivateWorkplace], None]
) -> None:
    private.succeeded("--steps", "2")
    happened(private)
    before = (private.run_folder / "public" / "ledger.jsonl").read_bytes()
    private.refused(
        3, "the budget has paid for 3 steps of this run, and its ledger has 2", options=("--resume",)
    )
    assert (private.run_folder / "public" / "ledger.jsonl").read_bytes() == before
    assert len(lines_of(private, "step")) == 3


@pytest.mark.long
def test_budget_lets_a_moved_folder_go_on(private: PrivateWorkplace) -> None:
    private.succeeded()
    private.run_folder.rename(private.folder / "moved")
    private.config["output"] = "moved"
    private.succeeded("--resume")
    assert [line["step"] for line in lines_of(private, "step")] == [1, 2]


@pytest.mark.long
def test_budget_that_was_rolled_back_is_refused(private: PrivateWorkplace) -> None:
    private.succeeded()
    path = private.folder / "budget.jsonl"
    kept = path.read_bytes()
    private.succeeded("--steps", "2", "--resume")
    path.write_bytes(kept)
    private.refused(3, "lacks lines that it had", options=("--resume",))
    path.unlink()
    private.refused(2, "began with another budget", "in another file", options=("--resume",))


@pytest.mark.long
def test_budget_can_not_be_left_out_when_a_run_goes_on(private: PrivateWorkplace) -> None:
    private.succeeded()
    del private.privacy["budget"]
    private.refused(2, "was epsilon 100 and is none", options=("--resume",))
    private.config["output"] = "second"
    private.succeeded()
    private.privacy["budget"] = dict(BUDGET)
    private.refused(2, "was none and is epsilon 100", options=("--resume",))


# -- what is published ---------------------------------------------------------------------------------------


def test_budget_hides_the_data_from_what_is_published(private: PrivateWorkplace) -> None:
    """The hashes of its lines are published: a secret number keeps a guess of the data from being tested."""
    private.succeeded()
    header = lines_of(private)[0]
    public = private.public()
    assert header["data"].encode() not in public
    assert header["secret"].encode() not in public
    assert len(header["secret"]) == 32
    assert header["id"].encode() in public
    assert (private.folder / "budget.jsonl").stat().st_mode & 0o777 == 0o600
    assert private.step()["budget"] == {"id": header["id"], "epsilon": 100.0, "delta": 0.01}
    assert "stay within epsilon 100 at delta 0.01 together" in private.step()["guarantee"]


# -- order, kills and other processes ------------------------------------------------------------------------


def test_budget_and_ledger_have_a_step_before_noise_is_drawn(
    private: PrivateWorkplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    from psgrad.engine.privacy.noise import Noise

    seen: list[tuple[int, int]] = []
    add = Noise.add

    def looked(self: Noise, *arguments: Any, **named: Any) -> Any:
        seen.append((len(lines_of(private, "step")), len(private.ledger("step"))))
        return add(self, *arguments, **named)

    monkeypatch.setattr(Noise, "add", looked)
    private.succeeded("--steps", "2")
    assert seen == [(1, 1), (2, 2)]


def test_budget_is_not_released_when_its_line_can_not_be_written(
    private: PrivateWorkplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    append = Ledger.append

    def full(self: Ledger, content: Any, kind: str = "step") -> None:
        if self.path.name == "budget.jsonl" and kind == "step":
            raise LedgerError("the disk is full")
        append(self, content, kind)

    with monkeypatch.context() as patch:
        patch.setattr(Ledger, "append", full)
        private.refused(3, "the disk is full")
    assert not (private.run_folder / "public" / "noisy_sum.safetensors").exists()
    assert len(private.ledger("step")) == 1
    assert not lines_of(private, "step")
    account = accounts_of(lines_of(private)).popitem()[1]
    assert sum(account.ahead.values()) == 1, "given back, and then spent by another run"
    private.succeeded("--resume")
    assert [line["step"] for line in lines_of(private, "step")] == [1, 2]


def test_budget_keeps_apart_what_two_runs_write_at_once(tmp_path: Path) -> None:
    path = tmp_path / "budget.jsonl"
    header = {"command": "budget", "epsilon": 8, "delta": 1e-5}
    event = {"noise_multiplier": 1.0, "scheme": "fixed", "batch_size": 5, "relation": "zero_out"}

    def write(run: str) -> None:
        file = Ledger.shared(path, header)
        for step in range(20):
            with file.held():
                line = {"run": run, "step": step + 1, "ledger_sha256": "", **event, "mechanism": "gaussian"}
                file.append(line)

    writers = [threading.Thread(target=write, args=(f"{run}",)) for run in range(4)]
    for each in writers:
        each.start()
    for each in writers:
        each.join()
    accounts = accounts_of(read_budget(path).lines)
    assert {run: sum(account.paid.values()) for run, account in accounts.items()} == dict.fromkeys("0123", 20)


def test_budget_goes_on_after_a_line_that_another_run_was_killed_in(private: PrivateWorkplace) -> None:
    private.succeeded()
    with (private.folder / "budget.jsonl").open("ab") as file:
        file.write(b'{"kind": "step", "posi')
    private.succeeded("--resume")
    found = read_budget(private.folder / "budget.jsonl")
    assert [line["step"] for line in found.steps] == [1, 2]


def check(folder: Path, told: list[Any], finished: bool) -> None:
    """What is released was paid for in both files, and no step twice."""
    ledger, budget = folder / "public" / "ledger.jsonl", folder.parent / f"{folder.name}.jsonl"
    if not has_begun(ledger):
        assert not told
        return
    paid, entered = Ledger.read(ledger), read_budget(budget)
    steps = [line["step"] for line in entered.steps]
    assert steps == list(range(1, len(steps) + 1)), "a step was paid for twice"
    assert max(told, default=0) <= len(steps) <= len(paid.steps) <= len(steps) + 1
    assert [line["ledger_sha256"] for line in entered.steps] == paid.step_digests[: len(steps)]
    for name in ("public/step.json", "checkpoint.pt"):
        if (folder / name).exists() and name.endswith("json"):
            assert json.loads((folder / name).read_bytes())["steps"] <= len(steps)
    if finished:
        assert len(steps) == len(paid.steps)
        assert not any(accounts_of(entered.lines).popitem()[1].ahead.values()), "still reserved"


@pytest.fixture
def go(private: PrivateWorkplace) -> Go:
    private.privacy.update({"steps": 100, "checkpoint_every": 1})

    def go(folder: Path, tell: Tell) -> None:
        private.config["output"] = str(folder)
        private.privacy["budget"]["file"] = str(folder.parent / f"{folder.name}.jsonl")
        path = private.folder / f"config-{os.getpid()}.yaml"
        path.write_text(yaml.safe_dump(private.config))
        begun = has_begun(folder / "public" / "ledger.jsonl")

        def released(progress: Any) -> None:
            if progress.detail:
                tell(progress.done)

        dp_step(load_config(path), resume=begun, overwrite=not begun, progress=released)

    return go


@pytest.mark.long
@pytest.mark.parametrize(
    ("first", "apart"), [(3, 15), *(pytest.param(each, 3, marks=pytest.mark.sweep) for each in (1, 2, 3))]
)
def test_budget_of_a_run_that_is_killed_at_every_operation(
    go: Go, tmp_path: Path, first: int, apart: int
) -> None:
    points = points_of(go, tmp_path / "undisturbed")
    check(tmp_path / "undisturbed", [1], True)
    deaths = 0
    for at in range(first, points + 1, apart):
        deaths += kill_and_resume(go, check, tmp_path / f"run-{at}", [at, 1 + at * 37 % (points // 2)])
    assert deaths >= points // apart
