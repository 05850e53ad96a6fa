"""`engine.dtype: auto`: a pretrained model computes in the precision in which its base is saved."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from psgrad.commands.setup import Setup, set_up
from psgrad.config import load_config
from tests.text_tasks import CASES
from tests.workplace import Outcome

CASE = CASES["classification"]


def write(folder: Path, saved: str, dtype: str = "auto", *, pickled: bool = False) -> Path:
    """The config of a folder whose model is saved in a precision."""
    import transformers

    path = CASE.write(folder, dtype=dtype)
    kind = transformers.AutoModelForSequenceClassification
    model = kind.from_pretrained(folder / "model").to(getattr(torch, saved))
    if pickled:
        (folder / "model" / "model.safetensors").unlink()
        torch.save(model.state_dict(), folder / "model" / "pytorch_model.bin")
    else:
        model.save_pretrained(folder / "model")
    return path


def loaded(path: Path) -> Setup:
    return set_up(load_config(path))


@pytest.mark.parametrize(
    ("saved", "computed"),
    [("float32", "float32"), ("bfloat16", "bfloat16"), ("float16", "float32"), ("float64", "float64")],
)
def test_auto_is_the_precision_of_the_base(saved: str, computed: str, tmp_path: Path) -> None:
    run = loaded(write(tmp_path, saved))
    assert run.config.engine.dtype == computed
    assert run.autocast == (torch.bfloat16 if computed == "bfloat16" else None)
    wide = torch.float64 if computed == "float64" else torch.float32
    assert {each.dtype for each in run.objective.params.values()} == {wide}


def test_a_precision_that_the_config_names_is_kept(tmp_path: Path) -> None:
    run = loaded(write(tmp_path, "bfloat16", "float32"))
    assert (run.config.engine.dtype, run.autocast) == ("float32", None)


@pytest.mark.long
def test_manifest_and_page_say_what_bfloat16_costs(tmp_path: Path, run: Callable[..., Outcome]) -> None:
    path = write(tmp_path, "bfloat16")
    count = len(CASE.rows)
    outcome = run("analyze", path, "--set", f"engine.verify={count}").succeeded()
    exact = CASE.norms(tmp_path).numpy()  # in float64, by transformers
    apart = np.abs(pd.read_parquet(tmp_path / "run" / "samples.parquet")["grad_norm"] / exact - 1).max()
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    said = manifest["self_check"]["worst_norm_error_of_autocast"]
    assert said > 1e-4  # halves are what has run
    assert said == pytest.approx(apart, rel=1e-2)
    assert manifest["engine"]["dtype"] == manifest["config"]["engine"]["dtype"] == "bfloat16"
    assert f"norms by up to {said:.4g}" in outcome.err
    page = (tmp_path / "run" / "report.html").read_text()
    assert page.count(f"bfloat16; on {count} samples norms differ") == 1
