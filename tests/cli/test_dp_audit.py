"""`psgrad dp-audit` as a user meets it: the verdict and its exit code, what is written where, mistakes
planted in the run's parts.
"""

from __future__ import annotations

import json
import os
import re
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from psgrad.commands import audit_neighbours, dp_audit
from psgrad.config import PrivacyConfig
from psgrad.engine.privacy.clipping import Clipping
from psgrad.engine.privacy.generators import Generator, make_generator
from psgrad.engine.privacy.unchanged import Unchanged
from tests.forked_ranks import run_ranks
from tests.workplace import Outcome, Workplace

PRIVACY: dict[str, Any] = {
    "steps": 12,
    "delta": 1e-3,
    "expected_batch_size": 24,
    "sampling": {"scheme": "poisson", "sample_rate": 1.0},  # the accountants are at once done
    "clipping": {"norm": 0.7},
    "noise": {"multiplier": 1.0},
    "optimizer": {"name": "SGD", "kwargs": {"lr": 0.1}},
}
WIDE = {"factory": "model.py:mlp", "kwargs": {"hidden": 100}}  # 803 coordinates


@pytest.fixture
def private(workplace: Workplace) -> Workplace:
    """A private run of the workplace's data."""
    workplace.config |= {"model": WIDE, "privacy": json.loads(json.dumps(PRIVACY))}
    return workplace


@pytest.fixture(autouse=True)
def _drawn_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same coins and noise in every run of the tests: a right mechanism is refuted now and then."""
    made = count()

    def seeded() -> Generator:
        return make_generator(seed=1, position=next(made))

    monkeypatch.setattr(dp_audit, "make_generator", seeded)
    monkeypatch.setattr(audit_neighbours, "make_generator", seeded)
    monkeypatch.setattr(dp_audit, "coins", lambda: np.random.default_rng(1))


def audited(workplace: Workplace, *options: str) -> Outcome:
    (workplace.folder / "config.yaml").write_text(yaml.safe_dump(workplace.config))
    return workplace.command("dp-audit", "config.yaml", *options)


def as_json(workplace: Workplace, *options: str) -> dict[str, Any]:
    outcome = audited(workplace, "--json", *options)
    assert outcome.out, outcome.err
    found: dict[str, Any] = json.loads(outcome.out)
    assert outcome.code == (1 if found["violations"] else 0)
    return found


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# -- what is right -------------------------------------------------------------------------------------------


@pytest.mark.long
def test_an_audit_prints_the_bound_beside_the_accounted_epsilon(private: Workplace) -> None:
    outcome = audited(private)
    assert outcome.code == 0, outcome.err + outcome.out
    lines = outcome.out.splitlines()
    assert lines[0] == "audited   2 steps with 803 canaries, records of the dataset beside them"
    assert "differ by one record that is added or removed; a record is one row; poisson sampling" in lines[1]
    assert "with 0.95 confidence, at delta 0.001; accounted for these steps: " in lines[2]
    assert "(PLD)" in lines[2]
    assert lines[3].startswith("from      a threshold that ")
    assert lines[4].startswith("noise     ")
    assert "ALARM" not in lines[4]
    assert "the record with the longest gradient goes" in outcome.out
    assert "VIOLATION" not in outcome.out
    assert "  the steps after the first 2 of 12" in lines[lines.index("not tested") :]
    assert lines[-2] == "consistent: nothing contradicts the declared guarantee, which is no proof of it"
    assert lines[-1] == str(Path("out-audit/private/NOT_PRIVATE_audit.json"))
    assert outcome.err.splitlines()[-1].startswith(
        "NOT PRIVATE: the audit took single records' gradients without noise"
    )
    assert not (private.folder / "out").exists()


@pytest.mark.long
def test_neighbours_are_those_of_the_relation(private: Workplace) -> None:
    pairs = {pair["pair"]: pair for pair in as_json(private)["pairs"]}
    assert len(pairs) >= 6
    for pair in pairs.values():
        assert pair["holds"]
        assert pair["sensitivity"] == pytest.approx(0.7)
        assert pair["ratio"] <= 1 + 1e-5
        assert pair["differing"] == []
    for monster in ("NaN", "infinite"):
        assert pairs[f"a record comes whose inputs are {monster}"]["distance"] == 0
    assert pairs["the record with the longest gradient goes"]["ratio"] > 0.5


def test_canaries_alone_make_a_result_that_may_be_shown(private: Workplace) -> None:
    outcome = audited(private, "--canaries-only", "--canaries", "500", "--steps", "2", "--confidence", "0.9")
    assert outcome.code == 0
    assert "2 steps with 500 canaries, no records beside them" in outcome.out
    assert "neighbours" not in outcome.out
    assert "NOT PRIVATE" not in outcome.out + outcome.err
    found = json.loads((private.folder / "out-audit/public/audit.json").read_text())
    assert (found["confidence"], found["records"], found["pairs"]) == (0.9, 0, [])
    assert "warning" not in found


@pytest.mark.long
def test_audit_by_two_ranks_equals_one_process(private: Workplace) -> None:
    private.config["privacy"]["sampling"]["sample_rate"] = 0.5
    private.config["privacy"]["expected_batch_size"] = 12
    (private.folder / "config.yaml").write_text(yaml.safe_dump(private.config))
    found = []
    for size in (1, 2):
        options = ("--steps", "2", "--json", "--output", f"by-{size}")
        ended = run_ranks(private.folder, size, "dp-audit", "config.yaml", *options)
        assert [rank.code for rank in ended] == [0] * size, [rank.err for rank in ended]
        assert [(rank.out, rank.err) for rank in ended[1:]] == [("", "")] * (size - 1)
        found.append(json.loads((private.folder / f"by-{size}/private/NOT_PRIVATE_audit.json").read_text()))
    one, two = found
    assert [pair["pair"] for pair in two["pairs"]] == [pair["pair"] for pair in one["pairs"]]
    for key in ("verdict", "canaries", "accounted", "evidence"):
        assert two[key] == one[key]
    assert two["noise"]["spread"] == pytest.approx(one["noise"]["spread"], rel=1e-6)


@pytest.mark.sweep
def test_a_run_in_the_output_folder_stays_as_it_is(private: Workplace) -> None:
    (private.folder / "config.yaml").write_text(yaml.safe_dump(private.config))
    assert private.command("dp-step", "config.yaml").code == 0
    before = files_of(private.folder / "out")
    assert audited(private).code == 0
    assert files_of(private.folder / "out") == before
    assert audited(private).code == 2  # the audit's folder is taken
    assert audited(private, "--overwrite").code == 0
    audited(private, "--output", "out", "--overwrite").refused(2, "holds the ledger of a private run")
    assert files_of(private.folder / "out") == before


@pytest.mark.long
@pytest.mark.every(3)
@pytest.mark.parametrize(
    "change",
    [
        {"sampling": {"scheme": "fixed", "batch_size": 12}, "expected_batch_size": 12},
        {
            "relation": "replace_one",
            "sampling": {"scheme": "poisson", "sample_rate": 0.5},
            "expected_batch_size": 12,
        },
        {"clipping": {"norm": 0.7, "groups": "parameter"}},
        {"unit": {"column": "user"}},
    ],
    ids=["fixed", "replace", "groups", "user"],
)
def test_every_kind_of_run_can_be_audited(private: Workplace, change: dict[str, Any]) -> None:
    private.save(user=np.arange(24) // 2)
    private.config["privacy"] |= change
    if "unit" in change:
        private.config["privacy"] |= {"expected_batch_size": 12}
    found = as_json(private, "--steps", "2" if "noise" in change else "1")
    assert found["violations"] == []
    assert found["pairs"]
    assert all(pair["holds"] for pair in found["pairs"])
    if change.get("relation") == "replace_one" or "fixed" in str(change):
        assert any("becomes another" in pair["pair"] for pair in found["pairs"])
        assert found["pairs"][0]["sensitivity"] == pytest.approx(1.4)
    if "groups" in change.get("clipping", {}):
        assert found["canaries"] == 400
        assert found["reach"] < 1


DRAWING = """\
def Model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 60), nn.Tanh(), nn.Dropout(0.5), nn.Linear(60, 3))
"""


@pytest.mark.long
def test_audit_compares_neighbours_of_models_that_draw(private: Workplace) -> None:
    """A model with dropout, whose factory seeds PyTorch."""
    private.use_model(DRAWING)
    private.config["model"]["mode"] = "train"
    found = as_json(private, "--steps", "1")
    assert (found["violations"], found["notes"]) == ([], [])
    assert len(found["pairs"]) >= 6
    assert all(pair["holds"] for pair in found["pairs"])
    assert max(pair["ratio"] for pair in found["pairs"]) > 0.9


# -- what is wrong -------------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_bound_that_is_not_kept_to_is_a_violation(
    private: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Clipping, "factors", lambda self, norms, *_, **__: torch.ones_like(norms))
    found = as_json(private)
    assert found["violations"][0].startswith(
        "canaries are told apart better than the declared steps allow: epsilon is at least "
    )
    broken = next(
        pair for pair in found["pairs"] if pair["pair"] == "the record with the longest gradient goes"
    )
    assert not broken["holds"]
    assert broken["ratio"] > 1


# -- how many ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sampling", "planned", "alone", "steps"),
    [
        ({"scheme": "poisson", "sample_rate": 0.1}, 150, False, 20),
        ({"scheme": "poisson", "sample_rate": 0.1}, 7, False, 7),
        ({"scheme": "poisson", "sample_rate": 0.001}, 9000, False, 50),
        ({"scheme": "poisson", "sample_rate": 0.001}, 9000, True, 500),
        ({"scheme": "fixed", "batch_size": 12}, 150, False, 2),
        ({"scheme": "fixed", "batch_size": 12}, 1, False, 1),
    ],
)
def test_steps_are_as_many_as_say_something(
    sampling: dict[str, Any], planned: int, alone: bool, steps: int
) -> None:
    size = 12.0 if sampling["scheme"] == "fixed" else 100.0
    privacy = PrivacyConfig.model_validate(
        PRIVACY | {"sampling": sampling, "steps": planned, "expected_batch_size": size}
    )
    assert dp_audit.steps_for(privacy, alone) == steps


# -- refusals ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--steps", "13"), "an audit of 13 steps was asked for, and 12 are planned"),
        (("--confidence", "1"), "the confidence of the audit is 1.0"),
        (("--canaries", "804"), "at most 803 canaries"),
    ],
)
def test_what_can_not_be_audited_is_refused(private: Workplace, options: tuple[str, ...], words: str) -> None:
    audited(private, *options).refused(2, words)
    assert not os.path.lexists(private.folder / "out-audit")


# -- state that the model keeps, and rounding ----------------------------------------------------------------

KEEPS = """\
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.last = nn.Linear(4, 300)
        self.register_buffer("largest", torch.zeros(()))
        self.known = 0.0

    def forward(self, x):
        if x[0, 0] > 1000.0:  # of the stand-ins that are looked at beforehand none is so
            %s
        return self.last(x)[:, :3] * (1 + self.known)
"""
WRITES = {
    "buffer": "self.largest = torch.full((), 1.5)",
    "attribute": "self.known = 1.5",
}


@pytest.mark.long
@pytest.mark.every(2)
@pytest.mark.parametrize("write", WRITES)
def test_audit_finds_state_that_is_kept(
    private: Workplace, monkeypatch: pytest.MonkeyPatch, write: str
) -> None:
    """Also where the check of the run itself does not see it."""
    inputs = np.clip(private.arrays["x"], -0.9, 0.9)
    inputs[10, 0] = 1500.0
    private.save(x=inputs)
    private.use_model(KEEPS % WRITES[write])
    outcome = audited(private, "--steps", "1")
    assert outcome.code == 3, outcome.err + outcome.out
    assert re.search(r"(wrote into|changes) (known|largest)", outcome.err)
    monkeypatch.setattr(Unchanged, "require", lambda self, by_bits=False: None)
    found = as_json(private, "--steps", "1", "--overwrite")
    name = {"buffer": "largest", "attribute": "known"}[write]
    words = f"what is published differs in the state of the model and the loss ({name})"
    said = [each.startswith(f"a record again, after the others: {words}") for each in found["violations"]]
    assert any(said)
