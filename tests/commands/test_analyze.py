"""`psgrad analyze` from a config to a run folder: every kind of data, model and precision, interrupted runs,
and the two examples.
"""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F
import yaml

import psgrad.run.durable_files
from psgrad.config import ModelConfig
from psgrad.models.factory import load_model
from psgrad.run.results import PARAMETER_COLUMNS, SAMPLE_COLUMNS
from tests.oracles import Loss, one_sample_gradients
from tests.workplace import ROWS, Workplace

ROOT = Path(__file__).parents[2]
FILES = {
    *(
        "manifest.json",
        "samples.parquet",
        "samples.csv",
        "parameters.parquet",
        "measures.json",
    ),
    *("findings.jsonl", "check.json", "report.html", "inputs/inputs.json"),
    *("issues.parquet", "issue_summary.parquet"),
}


def files_of(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def norms_by_loop(
    model: torch.nn.Module, loss: Loss, inputs: torch.Tensor, target: torch.Tensor
) -> np.ndarray[Any, Any]:
    """[n]: the gradient norms, one backward pass a sample."""
    gradients = one_sample_gradients(model, loss, (inputs,), target)
    norms: np.ndarray[Any, Any] = (
        torch.cat([g.flatten(1).double() for g in gradients.values()], 1).norm(dim=1).numpy()
    )
    return norms


@pytest.fixture
def quick(workplace: Workplace, monkeypatch: pytest.MonkeyPatch) -> Workplace:
    """The same without the plots and the report, which take longest."""
    monkeypatch.setattr(
        "psgrad.reports.analyze_page.write_report", lambda result, write: write("report.html", b"")
    )
    return workplace


# -- A run that goes well ------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_run_leaves_a_whole_folder_and_prints_its_table(workplace: Workplace) -> None:
    outcome = workplace.succeeded()
    folder = workplace.folder / "out"
    assert {name for name in files_of(folder) if not name.startswith("plots/")} == FILES
    assert any(name.startswith("plots/") for name in files_of(folder))
    assert outcome.out.splitlines()[-1] == "out"
    assert len(outcome.out.splitlines()) == 22
    assert "self-check: worst relative error" in outcome.err
    assert "24/24 samples" in outcome.err

    frame = workplace.samples()
    assert frame["id"].tolist() == workplace.arrays["uid"].tolist()
    assert frame["target"].tolist() == workplace.arrays["y"].tolist()
    assert frame.columns.tolist() == [name for name in SAMPLE_COLUMNS if name != "dataset_row"]
    undefined = {column: [""] for column in ("p_value", "q_value")}  # as there is no reference
    written = pd.read_csv(folder / "samples.csv", keep_default_na=False, na_values=undefined)
    pd.testing.assert_frame_equal(written, frame, check_dtype=False)
    inputs, target = torch.from_numpy(workplace.arrays["x"]), torch.from_numpy(workplace.arrays["y"])
    np.testing.assert_allclose(
        frame["grad_norm"], norms_by_loop(workplace.model, F.cross_entropy, inputs, target), rtol=1e-5
    )
    logits = workplace.model(inputs)
    np.testing.assert_allclose(
        frame["loss"], F.cross_entropy(logits, target, reduction="none").detach(), rtol=1e-5
    )
    assert frame["prediction"].tolist() == logits.argmax(1).tolist()
    np.testing.assert_allclose(frame["confidence"], logits.softmax(1).amax(1).detach(), rtol=1e-5)

    parameters = pd.read_parquet(folder / "parameters.parquet")
    assert parameters.columns.tolist() == list(PARAMETER_COLUMNS)
    assert parameters["parameter"].tolist() == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert parameters["share"].sum() == pytest.approx(1)

    manifest = workplace.manifest()
    assert manifest["state"] == "finished"
    assert manifest["counts"] == {"samples": ROWS, "nonfinite": 0, "in_dataset": ROWS}
    assert manifest["self_check"]["rows"] == [0, 8, 16]
    assert manifest["self_check"]["worst_relative_error"] < 1e-5
    assert manifest["model"]["trainable"] == 43
    assert set(manifest["timings"]) == {"load", "self-check", "gradients", "tables", "report"}


@pytest.mark.long
def test_chunks_are_replayed_unless_capture_is_off(quick: Workplace) -> None:
    shown = quick.succeeded("--set", "engine.chunk_size=2").out
    engine = quick.manifest()["engine"]
    assert (engine["chunks_replayed"], engine["replayed_by"]) == (ROWS // 2 - 3, "kernel by kernel")
    plain = quick.succeeded("--overwrite", "--set", "engine.chunk_size=2", "--set", "engine.capture=off").out
    engine = quick.manifest()["engine"]
    assert (engine["chunks_replayed"], engine.get("replayed_by")) == (0, None)
    assert plain == shown


def test_debug_shows_where_the_model_failed(quick: Workplace) -> None:
    quick.use_model("class Model(nn.Linear):\n    def forward(self, x):\n        return 1 / 0\n")
    quick.config["model"]["kwargs"] = {"in_features": 4, "out_features": 3}
    outcome = quick.analyze("--debug")
    assert outcome.code == 3
    assert "Traceback" in outcome.err
    assert "return 1 / 0" in outcome.err
    assert outcome.err.rstrip().endswith("--debug shows the line of the model")


@pytest.mark.parametrize(("dtype", "error"), [("float64", 1e-12), ("bfloat16", 2e-2)])
def test_other_precisions(quick: Workplace, dtype: str, error: float) -> None:
    outcome = quick.succeeded("--set", f"engine.dtype={dtype}")
    assert ("mixed precision: gradients differ from float32's by up to " in outcome.err) == (
        dtype != "float64"
    )
    frame = quick.samples()
    inputs, target = torch.from_numpy(quick.arrays["x"]), torch.from_numpy(quick.arrays["y"])
    exact = norms_by_loop(quick.model.double(), F.cross_entropy, inputs.double(), target)
    apart = np.abs(frame["grad_norm"] / exact - 1).max()
    assert apart <= error
    assert (frame["status"] == "ok").all()
    manifest = quick.manifest()
    assert manifest["engine"]["dtype"] == dtype
    if dtype == "bfloat16":
        assert apart > 1e-4  # it is what has run
        assert 1e-4 < manifest["self_check"]["worst_error_of_autocast"] < error


def test_parameters_whose_gradients_are_materialised_are_named(quick: Workplace) -> None:
    outcome = quick.succeeded()
    assert quick.manifest()["engine"]["materialised"] == []
    assert "written out" not in outcome.err
    quick.use_model(
        textwrap.dedent("""
            class Model(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.first, self.weight = nn.Linear(4, 5), nn.Parameter(torch.randn(3, 5))

                def forward(self, x):
                    return F.linear(self.first(x), self.weight.cumsum(0))
        """)
    )
    outcome = quick.succeeded("--overwrite")
    assert quick.manifest()["engine"]["materialised"] == ["weight"]
    assert (
        outcome.err.count(
            "materialised sample by sample, which takes more time and memory: the gradients of weight"
        )
        == 1
    )


@pytest.mark.long
def test_retries_are_said_and_counted(quick: Workplace) -> None:
    quick.use_loss(
        textwrap.dedent("""
            calls = []


            def loss(output, target):
                calls.append(1)
                if len(calls) in (2, 3):
                    raise torch.OutOfMemoryError("CUDA out of memory")
                return torch.nn.functional.cross_entropy(output, target)
        """)
    )
    outcome = quick.succeeded("--set", "engine.verify=0", "--set", "engine.chunk_size=8")
    assert "out of memory on rows 8 to 15; trying them in halves" in outcome.err
    assert "out of memory on rows 8 to 11; trying them in halves" in outcome.err
    engine = quick.manifest()["engine"]
    assert (engine["chunk_size"], engine["out_of_memory_retries"]) == (8, 2)
    assert quick.samples()["index"].tolist() == list(range(ROWS))


def test_without_a_check_the_manifest_says_so(quick: Workplace) -> None:
    quick.succeeded("--set", "engine.verify=0")
    assert quick.manifest()["self_check"]["samples"] == 0


# -- Rows that are not finite --------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("chunk_size", [1, 7, "auto"])
def test_a_row_that_is_not_finite_stays_and_touches_no_other(
    quick: Workplace, value: float, chunk_size: Any
) -> None:
    options = (
        "--set",
        f"engine.chunk_size={chunk_size}",
        "--set",
        "model.factory=model.py:Model",
        "--set",
        "model.checkpoint=null",
    )
    quick.use_model(
        "def Model():\n    torch.manual_seed(0)\n    return nn.Sequential(nn.Linear(4, 5), nn.ReLU(),"
        " nn.Linear(5, 3))\n"
    )
    quick.succeeded(*options)
    spoilt = quick.arrays["x"].copy()
    spoilt[8] = value  # a row that the self-check looks at, too
    quick.save(x=spoilt)
    quick.succeeded(*options, "--output", "spoilt")
    healthy, frame = quick.samples(), quick.samples("spoilt")
    assert frame.loc[8, ["status", "reasons"]].tolist() == ["nonfinite", "loss or gradient is not finite"]
    assert frame.loc[8, "is_outlier_issue"]
    assert pd.isna(frame.loc[8, "rank"])
    others = frame.index != 8
    columns = ["id", "index", "target", "prediction", "confidence", "loss", "grad_norm", "status"]
    pd.testing.assert_frame_equal(frame.loc[others, columns], healthy.loc[others, columns], check_exact=True)
    assert sorted(frame.loc[others, "rank"]) == list(range(1, ROWS))
    assert quick.manifest("spoilt")["counts"] == {"samples": ROWS, "nonfinite": 1, "in_dataset": ROWS}
    parameters = pd.read_parquet(quick.folder / "spoilt" / "parameters.parquet")
    assert np.isfinite(parameters[["mean_norm", "std_norm", "max_norm", "share"]]).all(axis=None)


def test_an_infinite_loss_with_a_finite_gradient_is_not_finite(quick: Workplace) -> None:
    quick.use_loss(
        "def loss(output, target):\n    return output.sum() + torch.where(target == 1, float('inf'), 0.0)\n"
    )
    quick.succeeded()
    frame = quick.samples()
    assert (frame["status"] == np.where(quick.arrays["y"] == 1, "nonfinite", "ok")).all()


def test_a_run_without_a_finite_row_still_ends_well_and_says_so(workplace: Workplace) -> None:
    workplace.save(x=np.full((ROWS, 4), np.nan, dtype=np.float32))
    outcome = workplace.succeeded()
    assert "24 with a loss or gradient that is not finite" in outcome.err
    assert "nan" not in outcome.err.lower().replace("finite", "")
    assert workplace.manifest()["self_check"]["worst_relative_error"] is None
    assert (workplace.folder / "out" / "report.html").stat().st_size > 1000


# -- All kinds of data, models and losses --------------------------------------------------------------------


def test_no_target_with_a_loss_of_ones_own(quick: Workplace) -> None:
    quick.use_loss(
        "def loss(output, target):\n    assert target is None\n    return output.square().mean()\n"
    )
    del quick.config["data"]["target"]
    quick.succeeded()
    assert "target" not in quick.samples()


DROPOUT = {
    "layer": "def Model():\n    return nn.Sequential(nn.Linear(4, 50), nn.Dropout(), nn.Linear(50, 3))\n",
    "function": textwrap.dedent("""
        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.one, self.two = nn.Linear(4, 50), nn.Linear(50, 3)

            def forward(self, x):
                return self.two(F.dropout(self.one(x), training=self.training))
    """),
}


@pytest.mark.parametrize("kind", DROPOUT)
def test_dropout_in_train_mode_runs_unchecked_and_says_why(quick: Workplace, kind: str) -> None:
    quick.use_model(DROPOUT[kind])
    quick.config["model"]["mode"] = "train"
    outcome = quick.succeeded()
    assert "self-check: skipped, as the model draws at random" in outcome.err
    assert quick.manifest()["self_check"] == {
        "samples": 0,
        "reason": "the model draws at random in train mode",
    }


def test_labels_to_ignore_and_class_weights(quick: Workplace) -> None:
    labels = quick.arrays["y"].copy()
    labels[4] = -1
    quick.save(y=labels)
    quick.config["loss"] = {
        "name": "cross_entropy",
        "ignore_index": -1,
        "weight": [1.0, 2.0, 0.5],
        "label_smoothing": 0.1,
    }
    quick.succeeded()
    frame = quick.samples()
    assert frame.loc[4, ["loss", "grad_norm"]].tolist() == [0, 0]
    assert frame.loc[4, ["status", "reasons"]].tolist() == [
        "skipped",
        "not judged: the loss ignores its label",
    ]
    assert frame["rank"].notna().sum() == len(frame) - 1


@pytest.mark.sweep
def test_peak_memory_does_not_grow_with_the_dataset(workplace: Workplace) -> None:
    width, count = 16384, 250  # wide, as the tables grow with the rows, too
    (workplace.folder / "data.py").write_text(
        textwrap.dedent(f"""
            import numpy as np


            class Rows:
                def __init__(self, count):
                    self.count = count

                def __len__(self):
                    return self.count

                def __getitem__(self, row):
                    return np.full({width}, row, dtype=np.float32), row % 3
        """)
    )
    workplace.config |= {
        "model": {"factory": "model.py:Model"},
        "data": {"factory": "data.py:Rows"},
        "engine": {"chunk_size": 50},
    }
    workplace.use_model(f"def Model():\n    return nn.Linear({width}, 3)\n")
    (workplace.folder / "config.yaml").write_text(yaml.safe_dump(workplace.config))
    script = f"""
        from pathlib import Path
        import psgrad.reports.analyze_page
        import psgrad.commands.analyze
        from psgrad.config import load_config

        psgrad.reports.analyze_page.write_report = lambda result, write: None
        for count in ({count}, {count}, {10 * count}):  # what a first run alone takes is not of the rows
            config = load_config(Path("config.yaml"), [f"data.kwargs={{{{count: {{count}}}}}}"])
            psgrad.commands.analyze.analyze(config, overwrite=True)
            status = dict(line.split(":", 1) for line in open("/proc/self/status"))
            print(int(status["VmHWM"].split()[0]) * 1024)  # getrusage counts the parent, too
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=workplace.folder, timeout=100
    )
    assert done.returncode == 0, done.stderr
    _, small, large = map(int, done.stdout.split())
    assert len(workplace.samples()) == 10 * count
    assert large - small < 10 * count * width * 4 / 4  # a quarter of what the large dataset's rows take


# -- Runs that end early -------------------------------------------------------------------------------------


def test_a_full_disk_keeps_the_finished_rows(quick: Workplace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("psgrad.commands.analyze_passes._ROWS_PER_SHARD", 8)
    honest = psgrad.run.durable_files.write_atomically

    def full(target: Path, data: Any, *mode: int | None) -> None:
        if target.name == "00002.parquet":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        honest(target, data, *mode)

    monkeypatch.setattr("psgrad.run.durable_files.write_atomically", full)
    quick.refused(
        3,
        "the disk is full",
        "16 finished samples stay in out/parts",
        options=("--set", "engine.chunk_size=4"),
    )
    shards = pd.read_parquet(quick.folder / "out" / "parts" / "samples")
    assert shards["id"].tolist() == quick.arrays["uid"][:16].tolist()
    manifest = quick.manifest()
    assert manifest["state"] == "failed"
    assert "disk is full" in manifest["error"]
    assert manifest["counts"]["finished_samples"] == 16


# -- The built-in examples -----------------------------------------------------------------------------------


def run_example(folder: Path, config: str, *options: str) -> Path:
    command = [
        sys.executable,
        "-m",
        "psgrad",
        "analyze",
        f"configs/{config}.yaml",
        "--output",
        str(folder),
        *options,
    ]
    subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    return folder


@pytest.fixture(scope="session")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of configs/digits.yaml."""
    return run_example(tmp_path_factory.mktemp("examples") / "digits", "digits")


def test_the_digits_norms_are_those_of_one_sample_at_a_time(digits: Path) -> None:
    rows = slice(0, 1797, 36)
    with np.load(ROOT / "configs" / "digits" / "digits.npz") as data:
        images, labels, ids = (
            torch.from_numpy(data["image"][rows]),
            torch.from_numpy(data["label"][rows]),
            data["id"][rows],
        )
    model = load_model(
        ModelConfig(factory="digits/model.py:build", checkpoint="digits/model.safetensors"), ROOT / "configs"
    ).model
    frame = pd.read_parquet(digits / "samples.parquet").iloc[rows]
    assert frame["id"].tolist() == ids.tolist()
    assert len(frame) == 50
    # In float32 alone the oracle's own p - 1 is off by 1e-4 for confident rows.
    expected = norms_by_loop(
        model, lambda output, target: F.cross_entropy(output.double(), target), images, labels
    )
    np.testing.assert_allclose(frame["grad_norm"], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("score", ["grad_norm", "loss"])
def test_the_flipped_digits_are_near_the_top(digits: Path, score: str) -> None:
    records = json.loads((ROOT / "configs" / "digits" / "flipped.json").read_text(encoding="utf-8"))
    flipped = {record["id"] for record in records}
    assert len(flipped) == 54
    ranked = pd.read_parquet(digits / "samples.parquet").sort_values(score, ascending=False)["id"]
    found = {share: len(flipped & set(ranked.head(round(share * len(ranked))))) for share in (0.03, 0.1)}
    assert found[0.03] >= 45
    assert found[0.1] >= 52
