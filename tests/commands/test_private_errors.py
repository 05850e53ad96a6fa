"""`privacy.on_error`: a record on which the model, the loss or its label fails ends a run before the step is
paid for, or counts as zero; and how many such records there are is nowhere to be seen.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file

from psgrad.commands.private_setup import set_up_privately
from psgrad.config import load_config
from psgrad.engine.execution.streaming import Stream
from psgrad.engine.privacy.batches import RecordStreams
from psgrad.engine.privacy.clipping import Clipping
from psgrad.engine.privacy.records import Records
from psgrad.ragged import Block
from tests.private_workplace import EXACT, PrivateWorkplace

RAISING = """\
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.last = nn.Linear(4, 3)

    def forward(self, x):
        if not x.isfinite().all() or x.abs().max() > 1000:
            raise ValueError("an input of the model")
        return self.last(x)
"""
HOSTILE = 10


@pytest.fixture
def private(private: PrivateWorkplace) -> PrivateWorkplace:
    private.workplace.use_model(RAISING)
    private.privacy.update(EXACT)
    return private


def raising_input(private: PrivateWorkplace, *rows: int) -> None:
    inputs = private.workplace.arrays["x"].copy()
    inputs[list(rows)] = 5000.0
    private.workplace.save(x=inputs)


def invalid_label(private: PrivateWorkplace, *rows: int) -> None:
    labels = private.workplace.arrays["y"].copy()
    labels[list(rows)] = 99
    private.workplace.save(y=labels)


def infinite_input(private: PrivateWorkplace, *rows: int) -> None:
    """What adds zero without raising, too, in another model: the oracle of the others."""
    inputs = private.workplace.arrays["x"].copy()
    inputs[list(rows)] = np.inf
    private.workplace.save(x=inputs)
    private.workplace.use_model(RAISING.replace("        if not", "        if False and not"))


Spoil = Callable[..., None]


def released(private: PrivateWorkplace) -> dict[str, torch.Tensor]:
    return load_file(private.run_folder / "public" / "noisy_sum.safetensors")


def public_text(folder: Path) -> str:
    """All that may be published."""
    files = [path for path in folder.rglob("*") if path.is_file() and "private" not in path.parts]
    return "".join(path.read_bytes().decode("latin-1") for path in files)


@pytest.mark.long
@pytest.mark.parametrize("spoil", [raising_input, invalid_label])
@pytest.mark.parametrize("rows", [(HOSTILE,), (0, 23), (3, 4, 5, HOSTILE)], ids=str)
def test_private_error_counts_as_zero(private: PrivateWorkplace, spoil: Spoil, rows: tuple[int, ...]) -> None:
    private.privacy["on_error"] = "zero"
    clean = {name: value.copy() for name, value in private.workplace.arrays.items()}
    spoil(private, *rows)
    private.succeeded()
    found = released(private)
    assert private.step_table()["nonfinite"].tolist() == [len(rows)]
    private.workplace.save(**clean)
    private.config["output"] = "oracle"
    infinite_input(private, *rows)
    private.succeeded()
    for name, value in released(private).items():
        torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-12)


@pytest.mark.long
def test_private_error_ends_the_run_before_it_pays_and_may_go_on_with_zero(private: PrivateWorkplace) -> None:
    raising_input(private, HOSTILE)
    private.refused(3, f"row {HOSTILE}", "an input of")
    assert not (private.run_folder / "public" / "ledger.jsonl").exists() or not private.ledger("step")
    private.privacy["on_error"] = "zero"
    private.succeeded("--resume")
    assert len(private.ledger("step")) == 1


@pytest.mark.long
def test_private_error_count_is_not_published(private: PrivateWorkplace) -> None:
    """All that is public is the same with five such records and with none, but for the sums themselves."""
    texts: list[list[tuple[str, Any]]] = []
    private.privacy["on_error"] = "zero"
    for name, rows in (("none", ()), ("five", (3, 4, 5, 6, HOSTILE))):
        private.config["output"] = name
        raising_input(private, *rows)
        outcome = private.succeeded("--json")
        step = json.loads(outcome.out)
        ledger = private.ledger()
        for line in (step, step["ledger"], *ledger):
            for digest in ("model_sha256", "ledger_sha256", "previous", "run"):
                line.pop(digest, None)
        texts.append([*step.items(), *(item for line in ledger for item in line.items())])
        texts[-1].append(("stderr", outcome.err.replace(name, "").rpartition(" steps/s")[2]))
        assert "an input of" not in public_text(private.run_folder) + outcome.out + outcome.err
    assert [pair for pair in zip(*texts, strict=True) if pair[0] != pair[1]] == []


@pytest.mark.long
def test_private_error_of_every_record_is_the_models(private: PrivateWorkplace) -> None:
    private.privacy["on_error"] = "zero"
    raising_input(private, *range(24))
    private.refused(3, "an input of")


@pytest.mark.long
def test_private_error_in_a_user_of_several_rows(private: PrivateWorkplace) -> None:
    """One row of a user that fails makes the user's gradient zero, and no one else's."""
    private.workplace.save(user=np.arange(24) // 2)
    private.config["privacy"] |= {"unit": {"column": "user"}, "on_error": "zero", "expected_batch_size": 12}
    raising_input(private, HOSTILE)
    private.succeeded()
    found = released(private)
    private.config["output"] = "oracle"
    infinite_input(private, HOSTILE)
    private.succeeded()
    for name, value in released(private).items():
        torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_private_error_of_a_model_that_draws_computes_each_record_alone(
    private: PrivateWorkplace, mode: str
) -> None:
    """Else a record that fails would have the others of its chunk draw again, and one of them fail or not."""
    private.privacy["on_error"] = "zero"
    private.config["model"]["mode"] = mode
    (private.folder / "config.yaml").write_text(yaml.safe_dump(private.config))
    setup = set_up_privately(load_config(private.folder / "config.yaml"))
    assert setup.streams.alone == (mode == "train")
    assert setup.streams.zero_on_error


@pytest.mark.parametrize("hostile", [(), (1,), (0, 1, 2)], ids=str)
def test_private_error_where_records_draw_leaves_the_others_one_attempt(hostile: tuple[int, ...]) -> None:
    attempts: list[int] = []

    def take(rows: np.ndarray) -> Block:
        attempts.extend(rows.tolist())
        if set(rows.tolist()) & set(hostile):
            raise ValueError("a row")
        return Block((torch.ones(len(rows), 2),), None)

    params = {"w": torch.ones(2)}

    def loss(params: dict[str, torch.Tensor], inputs: Any, target: Any) -> Any:
        return (params["w"] * inputs[0]).sum(), {}

    streams = RecordStreams(
        Records.of_rows(6),
        SimpleNamespace(take=take),  # type: ignore[arg-type]
        loss,
        params,
        lambda loss, read: Stream(loss, params, read),
        alone=True,
        zero_on_error=True,
    )
    source, clipping = streams.source(np.arange(6)), Clipping.flat(params, 1.0)
    source(clipping)  # sizes chunks
    attempts.clear()
    found = source(clipping)
    assert sorted(attempts) == list(range(6))
    assert (~found.records.norms.isfinite()).nonzero().flatten().tolist() == list(hostile)
    expected = (6 - len(hostile)) / 2**0.5
    assert found.sums["w"].tolist() == pytest.approx([expected, expected], rel=1e-5)
