"""`psgrad dp-step` from the command line to the run folder: what is computed, what is said, what is kept,
what is refused.
"""

from __future__ import annotations

import json
import math
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import UUID

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from scipy import stats

from psgrad.commands import private_steps
from psgrad.commands.private_steps import StepFiles
from psgrad.engine.privacy.batches import RecordStreams
from psgrad.engine.privacy.clipping import MARGIN
from psgrad.engine.privacy.rounding import residual_epsilon
from psgrad.engine.privacy.snapshot import Snapshot
from psgrad.errors import DataError
from psgrad.run.results.privacy import STEP_COLUMNS, STEP_KEYS
from tests.oracles import one_sample_gradients
from tests.private_workplace import EXACT, PrivateWorkplace
from tests.workplace import ROWS, Workplace

PUBLIC = {"epsilon.png", "ledger.jsonl", "model.safetensors", "noisy_sum.safetensors", "step.json"}
PRIVATE = {"NOT_PRIVATE_manifest.json", "NOT_PRIVATE_steps.parquet"}


@pytest.fixture
def whole(workplace: Workplace) -> PrivateWorkplace:
    return PrivateWorkplace(workplace)


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def clipped_sum(private: PrivateWorkplace, rows: list[int], bound: float) -> dict[str, torch.Tensor]:
    """name -> the sum of these rows' gradients, each clipped by itself, one backward pass a row, in
    float64.
    """
    arrays = private.workplace.arrays
    model = private.workplace.model.double()
    inputs, target = torch.from_numpy(arrays["x"]).double(), torch.from_numpy(arrays["y"])
    gradients = one_sample_gradients(model, F.cross_entropy, (inputs[rows],), target[rows])
    norms = torch.cat([g.flatten(1) for g in gradients.values()], 1).norm(dim=1)
    factors = (bound * (1 - MARGIN) / norms).clamp(max=1)
    return {name: torch.einsum("n,n...->...", factors, g) for name, g in gradients.items()}


# -- What is computed ----------------------------------------------------------------------------------------


def test_a_step_is_that_of_the_loop_with_the_public_divisor(private: PrivateWorkplace) -> None:
    private.privacy.update(EXACT, expected_batch_size=15)
    private.succeeded()
    before = {name: value.double() for name, value in private.workplace.model.state_dict().items()}
    expected = clipped_sum(private, list(range(ROWS)), 0.5)
    for name, after in private.weights().items():
        torch.testing.assert_close(
            after, before[name] - expected[name] / 15, rtol=1e-6, atol=1e-9
        )  # the bound is kept from within


@pytest.mark.long
def test_rounding_is_stated_and_kept_to(private: PrivateWorkplace) -> None:
    private.config["engine"]["dtype"] = "float32"
    private.privacy["noise"] = {"multiplier": 2.3}
    private.succeeded("--steps", "3")
    step, numbers = private.step(), sum(value.numel() for value in private.weights().values())
    assert step["rounding"] == {
        "grid": 2.0**-12,  # of noise with standard deviation 2.3 * 0.5
        "formula": "2^(floor(log2(noise_std)) - 12)",
        "residual_epsilon": residual_epsilon(3 * numbers, 0.01),
    }
    assert [line["noise_grid"] for line in private.ledger("step")] == [2.0**-12] * 3
    released = load_file(private.run_folder / "public" / "noisy_sum.safetensors")
    for value in released.values():
        steps = value.double() / 2.0**-12
        assert torch.equal(steps, steps.round())
    assert "what is left of floating point adds at most" in step["guarantee"]


def test_the_noise_on_the_weights_is_what_is_stated(private: PrivateWorkplace) -> None:
    # Nobody is drawn (but once in 10^7): the weights move by noise alone, lr * z * C / B times a standard
    # normal number.
    private.privacy.update(
        steps=1,
        sampling={"scheme": "poisson", "sample_rate": 1e-9},
        expected_batch_size=2e-8,
        noise={"multiplier": 4.0},
    )
    private.workplace.use_model(
        "class Model(nn.Linear):\n"
        "    def __init__(self):\n"
        "        super().__init__(4, 20000)\n"
        "        nn.init.zeros_(self.weight)\n"
        "        nn.init.zeros_(self.bias)\n"
    )
    private.succeeded()
    assert private.step()["noise_std"] == 2.0
    moved = torch.cat([value.flatten() for value in private.weights().values()])
    unit = (moved / (0.1 * 2.0 / 2e-8)).numpy()
    assert stats.kstest(unit, "norm").pvalue > 1e-6
    assert stats.kstest(unit * 1.05, "norm").pvalue < 1e-6
    assert stats.kstest(unit / 1.05, "norm").pvalue < 1e-6


def test_a_record_that_is_no_number_adds_nothing(private: PrivateWorkplace) -> None:
    private.privacy.update(EXACT)
    x = private.workplace.arrays["x"].copy()
    x[7] = np.nan
    clean = clipped_sum(private, [row for row in range(ROWS) if row != 7], 0.5)
    private.workplace.save(x=x)
    private.succeeded()
    before = private.workplace.model.state_dict()
    for name, after in private.weights().items():
        torch.testing.assert_close(after, before[name].double() - clean[name] / 24, rtol=1e-6, atol=1e-9)
    steps = private.step_table()
    assert steps["nonfinite"].tolist() == [1]


def test_frozen_parameters_stay_and_get_no_noise(private: PrivateWorkplace) -> None:
    private.privacy["trainable"] = ["2.*"]
    private.succeeded("--steps", "3")
    before = private.workplace.model.state_dict()
    after = private.weights()
    assert all(torch.equal(after[name], before[name].double()) for name in ("0.weight", "0.bias"))
    assert all(not torch.equal(after[name], before[name].double()) for name in ("2.weight", "2.bias"))
    assert private.step()["trainable"] == {"tensors": 2, "parameters": 18, "of_parameters": 43}


@pytest.mark.long
@pytest.mark.every(4)
@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "NAdam", "Adafactor"])
def test_a_resumed_optimiser_goes_on_as_one_that_never_stopped(private: PrivateWorkplace, name: str) -> None:
    private.privacy.update(EXACT, optimizer={"name": name, "kwargs": {"lr": 0.01}})
    if name == "SGD":
        private.privacy["optimizer"]["kwargs"]["momentum"] = 0.9
    private.succeeded("--steps", "4")
    at_once = private.weights()
    shutil.rmtree(private.run_folder)
    private.succeeded("--steps", "1")
    private.succeeded("--steps", "3", "--resume")
    for key, value in private.weights().items():
        torch.testing.assert_close(
            value, at_once[key], rtol=1e-10, atol=1e-12
        )  # chunks of other sizes round otherwise


# -- What is said --------------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_run_leaves_what_is_public_apart_from_what_is_not(whole: PrivateWorkplace) -> None:
    outcome = whole.succeeded("--steps", "3")
    assert names(whole.run_folder) == {"manifest.json", "checkpoint.pt", "public", "private"}
    assert names(whole.run_folder / "public") == PUBLIC
    assert names(whole.run_folder / "private") == PRIVATE
    step = whole.step()
    assert tuple(step) == STEP_KEYS
    assert (step["steps"], step["planned_steps"]) == (3, 20)
    assert step["epsilon_pld"] < step["epsilon_rdp"]
    assert step["model_sha256"] is not None
    assert "clip" not in outcome.err
    steps = whole.step_table()
    assert steps.columns.tolist() == list(STEP_COLUMNS)
    assert steps["step"].tolist() == [1, 2, 3]


@pytest.mark.long
def test_neighbouring_datasets_have_the_same_public_values(
    private: PrivateWorkplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "psgrad.commands.dp_step.uuid4", lambda: UUID(int=7)
    )  # a run's number is drawn without the data
    private.privacy["noise"]["seed"] = 7
    arrays = dict(private.workplace.arrays)
    said: list[Any] = []
    for rows in (list(range(ROWS)), list(range(ROWS - 1)), [*range(ROWS), 3]):
        private.workplace.save(x=arrays["x"][rows], y=arrays["y"][rows], uid=np.arange(len(rows)))
        private.succeeded("--steps", "3", "--insecure-deterministic")
        step = private.step()
        del step["model_sha256"]
        manifest = json.loads((private.run_folder / "manifest.json").read_text())
        said.append((step, private.ledger(), manifest, names(private.run_folder / "public")))
        shutil.rmtree(private.run_folder)
    assert said[0] == said[1] == said[2]


def test_no_public_file_tells_how_many_records_there_are(private: PrivateWorkplace) -> None:
    rows = 1237  # a number that nothing else is
    random = np.random.default_rng(0)
    private.workplace.save(
        x=random.normal(size=(rows, 4)).astype(np.float32), y=random.integers(0, 3, rows), uid=np.arange(rows)
    )
    private.privacy.update(delta=1e-5, expected_batch_size=600)
    outcome = private.succeeded("--steps", "2")
    texts = [path.read_text() for path in (private.run_folder / "public").glob("*.json*")]
    texts += [(private.run_folder / "manifest.json").read_text(), outcome.out, outcome.err]
    manifest = json.loads((private.run_folder / "manifest.json").read_text())
    del manifest["config"]  # it is public beforehand, with the names of all its keys
    said = json.dumps([manifest, private.step(), *private.ledger()]).replace('"records": "together"', "")
    keys = {"batch_size", "records", "rows", "count", "losses", "seconds", "timings", "time", "fingerprint"}
    assert not {*keys, "chunk_size"} & set(re.findall(r'"(\w+)":', said))
    number_of_rows = re.compile(r"(?<![\w.])1,?237(?!\w|\.\d)")  # and not digits of a hash or of a time
    assert number_of_rows.search('"rows": 1237.')
    assert not any(number_of_rows.search(text) for text in texts)


def test_a_seed_is_reported_everywhere(private: PrivateWorkplace) -> None:
    private.privacy["noise"]["seed"] = 3
    private.refused(
        2, "privacy.noise.seed is set, and with a seed nothing is private", "--insecure-deterministic"
    )
    outcome = private.succeeded("--insecure-deterministic")
    assert private.step()["insecure_deterministic"]
    assert private.step()["generator"] == "aes-256-ctr, insecure: seed 3"
    assert private.ledger("step")[0]["secure"] is False
    assert "seed" in outcome.out


# -- What is kept --------------------------------------------------------------------------------------------


def test_a_resumed_run_counts_all_its_steps_and_draws_other_noise(private: PrivateWorkplace) -> None:
    private.privacy["noise"]["seed"] = 7
    private.privacy["sampling"] = {"scheme": "poisson", "sample_rate": 1.0}
    private.privacy["expected_batch_size"] = 24
    private.succeeded("--insecure-deterministic")
    first = private.weights()
    private.succeeded("--insecure-deterministic", "--resume")
    second = private.weights()
    before = private.workplace.model.state_dict()
    assert private.step()["steps"] == 2
    assert [line["kind"] for line in private.ledger()] == ["header", "step", "resume", "step"]
    # The gradient hardly changes in a step this small; the noise, three times as large, does.
    moves = (
        [(first[name] - before[name].double()).flatten() for name in first],
        [(second[name] - first[name]).flatten() for name in first],
    )
    apart = torch.cat(moves[0]) - torch.cat(moves[1])
    assert apart.std() > 0.5 * 0.1 * 2.0 * 0.5 / 24


@pytest.mark.long
def test_steps_beyond_the_plan_are_refused_before_any_is_taken(private: PrivateWorkplace) -> None:
    private.refused(
        2, "21 steps were asked for, and 20 of the 20 planned ones are left", options=("--steps", "21")
    )
    assert not private.run_folder.exists()
    private.succeeded("--steps", "18")
    private.refused(
        2,
        "3 steps were asked for, and 2 of the 20 planned ones are left",
        "--steps 2",
        options=("--steps", "3", "--resume"),
    )
    private.succeeded("--steps", "2", "--resume")
    private.refused(2, "0 of the 20 planned ones are left", options=("--resume",))
    assert private.step()["steps"] == 20


def public_bytes(private: PrivateWorkplace) -> dict[str, bytes]:
    """name -> content, of the public files that tell of the steps; the ledger notes each resume."""
    files = (private.run_folder / "public").iterdir()
    return {file.name: file.read_bytes() for file in files if file.suffix == ".safetensors"}


@pytest.mark.long
def test_dp_resume_of_a_finished_run_with_all_steps_ends_well_and_releases_nothing_new(
    private: PrivateWorkplace,
) -> None:
    private.privacy["steps"] = 2
    private.succeeded("--steps", "all")
    before, step = public_bytes(private), private.step()
    assert "noisy_sum.safetensors" in before
    outcome = private.succeeded("--steps", "all", "--resume")
    assert public_bytes(private) == before
    assert private.step()["epsilon_rdp"] == step["epsilon_rdp"]
    assert len(private.ledger("step")) == 2
    assert "noisy_sum" not in outcome.err


class Killed(BaseException):
    """The process ends where it is: no handler writes anything more."""


@pytest.mark.long
@pytest.mark.parametrize("steps", [1, 2])
def test_dp_resume_after_the_last_payment_names_the_noisy_sum_that_is_lost(
    private: PrivateWorkplace, monkeypatch: pytest.MonkeyPatch, steps: int
) -> None:
    """Noise is not drawn again for a step that was paid for: the sum of an earlier step stays as it is."""
    private.privacy["steps"] = steps
    if steps > 1:
        private.succeeded()
    before = public_bytes(private) if steps > 1 else {}

    def killed(self: StepFiles) -> None:
        pay(self)
        raise Killed

    pay = StepFiles.pay
    with monkeypatch.context() as patched:
        patched.setattr(StepFiles, "pay", killed)
        with pytest.raises(Killed):
            private.dp_step(*(["--resume"] if steps > 1 else []))
    said = private.succeeded("--resume", "--steps", "all").err
    found = "is that of step 1" if steps > 1 else "is missing"
    assert f"public/noisy_sum.safetensors {found}" in said
    assert f"paid for step {steps} ended before" in said
    assert "1 steps of an earlier process were paid for and lost" in said
    assert public_bytes(private).get("noisy_sum.safetensors") == before.get("noisy_sum.safetensors")
    assert len(private.ledger("step")) == steps


@pytest.mark.long
def test_dp_resume_after_the_last_checkpoint_has_the_noisy_sum(
    private: PrivateWorkplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    private.privacy["steps"] = 1

    def killed(*_: Any, **__: Any) -> bytes:
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr("psgrad.commands.private_steps.published_tensors", killed)
        with pytest.raises(Killed):
            private.dp_step()
    assert not (private.run_folder / "public" / "model.safetensors").exists()
    said = private.succeeded("--resume", "--steps", "all").err
    assert "noisy_sum" not in said
    assert "lost" not in said
    released = load_file(private.run_folder / "public" / "noisy_sum.safetensors")
    before = private.workplace.model.state_dict()
    for name, after in private.weights().items():
        torch.testing.assert_close(after, before[name] - 0.1 * released[name] / 12)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"sampling": {"scheme": "poisson", "sample_rate": 0.4}}, "sampl"),
        ({"clipping": {"norm": 0.6}}, "clipping"),
        ({"noise": {"multiplier": 1.0}}, "noise_multiplier"),
        ({"expected_batch_size": 11}, "expected_batch_size"),
        ({"delta": 0.001}, "delta"),
        ({"steps": 30}, "planned_steps"),
        ({"records": "alone"}, 'records was "together" and is'),
    ],
)
def test_a_resume_under_other_terms_is_refused(
    private: PrivateWorkplace, change: dict[str, Any], words: str
) -> None:
    private.succeeded()
    before = (private.run_folder / "public" / "ledger.jsonl").read_bytes()
    private.privacy.update(change)
    private.refused(2, words, options=("--resume",))
    assert (private.run_folder / "public" / "ledger.jsonl").read_bytes() == before


def test_a_resume_on_other_data_or_another_model_is_refused(private: PrivateWorkplace) -> None:
    private.succeeded()
    ledger = (private.run_folder / "public" / "ledger.jsonl").read_bytes()
    x = private.workplace.arrays["x"]
    private.workplace.save(x=x[::-1].copy())
    private.refused(2, "the dataset is not the one that the run in out began with", options=("--resume",))
    private.workplace.save(x=x)
    private.workplace.config["data"]["class_names"] = ["a", "b", "c"]
    private.refused(2, "the dataset is not the one", "target, id, class_names", options=("--resume",))
    del private.workplace.config["data"]["class_names"]
    private.workplace.use_model("def Model():\n    return mlp(6)\n")
    private.refused(
        3,
        "does not fit: 0.weight is float64 [5, 4] in it and float64 [6, 4] in the model",
        options=("--resume",),
    )
    assert (private.run_folder / "public" / "ledger.jsonl").read_bytes() == ledger


def test_a_ledger_is_never_replaced(private: PrivateWorkplace) -> None:
    private.succeeded()
    private.refused(2, "holds the ledger of a private run")
    private.refused(2, "holds the ledger of a private run", options=("--overwrite",))
    assert private.step()["steps"] == 1


def test_an_interrupt_waits_for_the_step_and_loses_none(
    private: PrivateWorkplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    from psgrad.engine.privacy.step import PrivateTraining

    update = PrivateTraining.update

    def interrupted(self: PrivateTraining, noisy: Any) -> None:
        if self.taken == 2:
            signal.raise_signal(signal.SIGINT)
        update(self, noisy)

    monkeypatch.setattr(PrivateTraining, "update", interrupted)
    outcome = private.dp_step("--steps", "10")
    assert outcome.code == 130
    assert private.step()["steps"] == 3
    monkeypatch.setattr(PrivateTraining, "update", update)
    resumed = private.succeeded("--steps", "1", "--resume")
    assert private.step()["steps"] == 4
    assert "lost" not in resumed.err


@pytest.mark.parametrize("written", [False, True])
def test_an_error_in_a_step_saves_the_steps_before_it_unless_the_model_was_written_into(
    private: PrivateWorkplace, monkeypatch: pytest.MonkeyPatch, written: bool
) -> None:
    private.privacy["checkpoint_every"] = "1h"
    plain = RecordStreams.source

    def failing(self: RecordStreams, records: Any, *place: int) -> Any:
        def source(clipping: Any) -> Any:
            if written:
                next(iter(self.params.values())).data.add_(1.0)  # what a pass over records may leave
            raise DataError("a record can't be read")

        return source if place[0] == 2 else plain(self, records, *place)

    monkeypatch.setattr(RecordStreams, "source", failing)
    private.refused(3, "a record can't be read", options=("--steps", "5"))
    monkeypatch.setattr(RecordStreams, "source", plain)
    assert len(private.ledger("step")) == 2
    found = Snapshot.from_bytes((private.run_folder / "checkpoint.pt").read_bytes(), "it")
    assert found.metadata["step"] == (0 if written else 2)
    assert ("lost" in private.succeeded("--steps", "1", "--resume").err) == written


def test_a_failed_payment_releases_nothing(
    private: PrivateWorkplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    private.succeeded()
    weights = private.weights()
    checkpoint = (private.run_folder / "checkpoint.pt").read_bytes()

    def full(descriptor: int, data: bytes) -> None:
        raise OSError(28, "No space left on device")

    from psgrad.run.ledger import Ledger

    append = Ledger.append

    def failing(self: Ledger, content: Any, kind: str = "step") -> None:
        monkeypatch.setattr("psgrad.run.durable_files.write_all", full)
        append(self, content, kind)

    monkeypatch.setattr(Ledger, "append", failing)
    private.refused(3, "the disk is full or over quota", options=("--resume",))
    assert (private.run_folder / "checkpoint.pt").read_bytes() == checkpoint
    assert all(torch.equal(value, weights[name]) for name, value in private.weights().items())


# -- What is refused -----------------------------------------------------------------------------------------


def test_nothing_to_resume(private: PrivateWorkplace) -> None:
    private.refused(2, "there is no run to resume in out", options=("--resume",))


# -- What goes wrong leaves nothing half begun ---------------------------------------------------------------


def sgd(**kwargs: Any) -> dict[str, Any]:
    return {"optimizer": {"name": "SGD", "kwargs": kwargs}}


# what is refused -> (keys of the section, None for one that is left out, and words of the refusal)
REFUSED: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "no expected batch size": ({"expected_batch_size": None}, ("expected_batch_size", "missing")),
    "optimiser": (
        {"optimizer": {"name": "Adamw"}},
        ("torch.optim has no optimiser 'Adamw'; did you mean AdamW?",),
    ),
    "argument": (sgd(learning_rate=0.1), ("SGD does not take {'learning_rate': 0.1}",)),
    "huge rate": (sgd(lr=1e300), ("SGD does not take {'lr': 1e+300}",)),
    "infinite rate": (sgd(lr=math.inf), ("SGD does not take {'lr': inf}: a number is NaN or infinite",)),
    "differentiable": (sgd(lr=0.1, differentiable=True), ("SGD does not take",)),
    "NaN in a list": (
        {"optimizer": {"name": "Adam", "kwargs": {"betas": [0.9, math.nan]}}},
        ("a number is NaN or infinite",),
    ),
    "batch": (
        {"sampling": {"scheme": "fixed", "batch_size": 100}, "expected_batch_size": 100},
        ("batch_size is 100, and the dataset has 24",),
    ),
    "tail that ends too early": (
        {"noise": {"multiplier": 0.005}},
        (
            "the noise multiplier is 0.005: a record may move the sum by 200 standard deviations",
            "set a larger privacy.noise.multiplier",
        ),
    ),
    "much noise": ({"noise": {"multiplier": 1e160}}, ("the noise multiplier is 1e+160",)),
    "little noise": ({"noise": {"multiplier": 1e-160}}, ("the noise multiplier is 1e-160",)),
    "delta": ({"delta": 0.05}, ("privacy.delta is 0.05, and the dataset has 24 records",)),
    "expected batch size": (
        {"expected_batch_size": 200},
        ("privacy.expected_batch_size is 200, and batches will have about",),
    ),
    "trainable": ({"trainable": ["heads.*"]}, ("privacy.trainable: no parameter matches 'heads.*'",)),
    "unit": ({"unit": {"column": "uids"}}, ("has no column 'uids'; did you mean uid?",)),
    "on error": ({"on_error": "skip"}, ("on_error",)),
    "moments": (
        {"individual_every": 1, "relation": "replace_one"},
        ("individual_every", "not known for poisson sampling under replace_one"),
    ),
}


@pytest.mark.every(1)
@pytest.mark.parametrize("what", REFUSED)
def test_what_no_step_can_be_taken_with_is_refused_before_there_is_a_ledger(
    private: PrivateWorkplace, what: str
) -> None:
    private.config["engine"]["dtype"] = "float32"
    changes, words = REFUSED[what]
    whole = private.privacy | changes
    private.config["privacy"] = {key: value for key, value in whole.items() if value is not None}
    private.refused(2, *words)
    assert not private.run_folder.exists()


def test_no_private_section(private: PrivateWorkplace) -> None:
    del private.config["privacy"]
    private.refused(2, "the config has no section privacy", "configs/digits-dp.yaml")


def a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


# what was done to which file of a run -> words of the refusal to go on
CHECKPOINT, LEDGER, MANIFEST = "checkpoint.pt", "public/ledger.jsonl", "NOT_PRIVATE_manifest.json"
LOST = ("ledger.jsonl is gone", "no privacy guarantee")
DAMAGES: dict[str, tuple[str, Callable[[Path], object], tuple[str, ...]]] = {
    "no checkpoint": (CHECKPOINT, Path.unlink, (f"{CHECKPOINT} can't be read: No such file", "has 1 steps")),
    "a folder": (CHECKPOINT, a_folder, (f"{CHECKPOINT} can't be read: Is a directory", "has 1 steps")),
    "no ledger": (LEDGER, Path.unlink, LOST),
    "an empty ledger": (LEDGER, lambda path: path.write_bytes(b""), LOST),
    "a list": (
        f"private/{MANIFEST}",
        lambda path: path.write_text("[]"),
        (f"{MANIFEST} can't be read: it is no JSON object",),
    ),
}


@pytest.mark.parametrize("what", DAMAGES)
def test_a_run_whose_file_is_lost_or_damaged_does_not_go_on_nor_is_replaced_without_a_ledger(
    private: PrivateWorkplace, what: str
) -> None:
    private.succeeded()
    name, damage, words = DAMAGES[what]
    damage(private.run_folder / name)
    private.refused(3, *words, options=("--resume",))
    for options in ((), ("--overwrite",)) if name == LEDGER else ():
        private.refused(2, "the ledger that paid for it is gone", options=options)


@pytest.mark.long
def test_a_damaged_private_table_is_reported_and_begun_anew(private: PrivateWorkplace) -> None:
    private.succeeded()
    (private.run_folder / "private" / "NOT_PRIVATE_steps.parquet").write_bytes(b"no table")
    assert "NOT_PRIVATE_steps.parquet could not be read" in private.succeeded("--resume").err
    assert len(private.step_table()) == 1


@pytest.mark.long
def test_weights_that_are_no_numbers_any_more_are_reported(private: PrivateWorkplace) -> None:
    private.privacy["optimizer"]["kwargs"]["lr"] = 1e-3
    assert "NaN or infinite" not in private.succeeded().err
    private.config["output"] = "exploded"
    private.config["engine"]["dtype"] = "float32"
    private.privacy["optimizer"]["kwargs"] = {"lr": 3e38, "momentum": 0.9}
    assert "of 4 trained parameters, " in private.succeeded("--steps", "20").err


@pytest.mark.long
def test_an_interrupted_process_leaves_the_private_table_of_its_steps(
    private: PrivateWorkplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    private.succeeded("--steps", "1")
    note = private_steps.StepFiles._note

    def interrupted(run: Any, noisy: Any) -> None:
        note(run, noisy)
        if run.training.taken == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(private_steps.StepFiles, "_note", interrupted)
    assert private.dp_step("--steps", "5", "--resume").code == 130
    monkeypatch.setattr(private_steps.StepFiles, "_note", note)
    private.succeeded("--resume")
    table = private.step_table()
    assert table["step"].tolist() == [1, 2, 3, 4]


# -- State that the model keeps ------------------------------------------------------------------------------

KEEPS = """\
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.last = nn.Linear(4, 3)
        self.frozen = nn.Parameter(torch.zeros(2), requires_grad=False)
        self.register_buffer("largest", torch.zeros(2))
        self.known = [0.0]

    def forward(self, x):
        factor = 1 + self.known[0]
        for place in range(40, 64):  # the largest input, to an eighth: above those of stand-ins
            if x[0, 0] > place / 8:
                {write}
        return self.last(x) * factor
"""


def keeping(private: PrivateWorkplace, write: str) -> None:
    inputs = np.clip(private.workplace.arrays["x"], -0.9, 0.9)
    inputs[[5, 9, 14], 0] = 5.5, 6.7, 7.3
    private.workplace.save(x=inputs)
    private.workplace.use_model(KEEPS.format(write=write))
    private.privacy.update(sampling={"scheme": "poisson", "sample_rate": 1.0}, expected_batch_size=24)


@pytest.mark.parametrize(
    ("write", "where"),
    [
        ("self.largest = torch.full((2,), place / 8)", "largest"),
        ("self.known[0] = place", "known[0]"),
        ("self.frozen.data.numpy()[0] = place / 8", "frozen"),
    ],
)
def test_state_written_under_a_branch_ends_the_run_unpaid(
    private: PrivateWorkplace, write: str, where: str
) -> None:
    keeping(private, write)
    private.config["engine"] |= {"chunk_size": 5, "verify": 0}
    private.refused(3, f"wrote into {where} while records were computed", options=("--steps", "2"))
    assert private.ledger("step") == []
    assert not (private.run_folder / "public" / "model.safetensors").exists()


@pytest.mark.parametrize("flag", ["self.known", "KNOWN"])
def test_parameter_that_the_first_row_sets_up_is_refused(private: PrivateWorkplace, flag: str) -> None:
    """Data-dependent initialisation: the first pass, on a row of the data, would be published in the
    weights.
    """
    private.workplace.use_model(f"""\
KNOWN = []


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.last, self.scale, self.known = nn.Linear(4, 3), nn.Parameter(torch.ones(4)), []

    def forward(self, x):
        if not {flag}:
            {flag}.append(True)
            with torch.no_grad():
                self.scale.copy_(1 / x.abs().mean(0))
        return self.last(x * self.scale)
""")
    private.refused(
        3,
        "a forward pass changes scale",
        "what the data writes into them is published without noise",
    )
    assert not private.run_folder.exists()


@pytest.mark.long
@pytest.mark.parametrize("alias", ["detach()", "detach().numpy()", "data[1:]"])
def test_parameter_that_the_model_has_under_another_name_is_trained_as_without(
    private: PrivateWorkplace, alias: str
) -> None:
    """What the optimiser changed under one name is no change under another."""
    private.privacy["noise"]["seed"] = 3
    private.config["engine"]["dtype"] = (
        "float32"  # in another type the alias would be of the memory of before
    )
    trained = []
    for name, kept in (("out", "None"), ("other", f"self.weight.{alias}")):
        private.workplace.use_model(
            "class Model(nn.Linear):\n    def __init__(self):\n        torch.manual_seed(0)\n       "
            f" super().__init__(4, 3)\n        self.kept = {kept}\n"
        )
        private.config["output"] = name
        private.succeeded("--steps", "3", "--insecure-deterministic")
        trained.append(private.weights()["weight"])
    assert torch.equal(*trained)
