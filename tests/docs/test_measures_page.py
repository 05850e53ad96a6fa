"""The page on measures: the part that is made from the code, and the example of a measure of one's own."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from psgrad.commands.analyze import analyze
from psgrad.commands.measure_setup import RESERVED
from psgrad.config import load_config
from psgrad.plugins import MEASURES, own_classes
from tests.commands.same_runs import assert_same_runs
from tests.docs.pages import ROOT, block
from tests.forked_ranks import run_ranks
from tools import measures_page

TEXT = measures_page.PAGE.read_text(encoding="utf-8")


def module_at(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, from which the page's configs find the digits."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "digits").symlink_to(ROOT / "configs" / "digits")
    return tmp_path


def test_the_page_is_what_the_code_says() -> None:
    assert measures_page.page(TEXT) == TEXT, "run python -m tools.pages"


@pytest.mark.parametrize("name", list(own_classes(MEASURES)))
def test_every_measure_says_what_it_is(name: str) -> None:
    kind = own_classes(MEASURES)[name]
    for what in (kind.title, kind.formula, kind.unit, kind.source, kind.cost, kind.__doc__):
        assert what
    for column, meaning in kind.meanings.items():
        assert meaning, f"{name}: {column}"
        assert column not in RESERVED
    assert re.fullmatch("[a-z0-9_]+", name)


def test_the_config_of_the_page_runs(folder: Path) -> None:
    (folder / "config.yaml").write_text(block(TEXT, "yaml", "version: 1"), encoding="utf-8")
    result = analyze(load_config(folder / "config.yaml"), limit=200, report=False)
    assert {"margin", "cosine_to_class_mean"} <= set(result.samples)
    assert result.measures["noise_scale"].numbers["resamples"] == 500


def write_measure_of_the_page(folder: Path) -> None:
    """The module, and a config that uses it."""
    (folder / "measures_of_mine.py").write_text(block(TEXT, "python", "WeightDecayPull"), encoding="utf-8")
    config = (
        block(TEXT, "yaml", "version: 1").partition("analyze:")[0]
        + block(TEXT, "yaml", "measures_of_mine")
        + "output: run\n"
    )
    (folder / "config.yaml").write_text(config, encoding="utf-8")


@pytest.mark.long
@pytest.mark.parametrize("count", [2, pytest.param(3, marks=pytest.mark.sweep)])
def test_the_measure_of_the_page_by_ranks_is_that_of_one_process(folder: Path, count: int) -> None:
    write_measure_of_the_page(folder)
    options = ("--no-report", "--limit", "40", "--set", "engine.chunk_size=8")
    analyze(load_config(folder / "config.yaml", ["engine.chunk_size=8"]), limit=40, report=False)
    ended = run_ranks(folder, count, "analyze", "config.yaml", *options, "--output", "ranks")
    assert [each.code for each in ended] == [0] * count, ended
    assert_same_runs(folder / "run", folder / "ranks")


def test_the_measure_of_the_page_runs_and_is_what_it_says(folder: Path) -> None:
    write_measure_of_the_page(folder)
    result = analyze(load_config(folder / "config.yaml"), limit=40, report=False)
    model = module_at(folder / "digits" / "model.py").build().double()
    model.load_state_dict(
        {key: value.double() for key, value in load_file(folder / "digits" / "model.safetensors").items()}
    )
    data = np.load(folder / "digits" / "digits.npz")
    weights = [parameter for name, parameter in model.named_parameters() if name.endswith("weight")]
    expected = []
    for image, label in zip(
        torch.from_numpy(data["image"][:40]).double(), torch.from_numpy(data["label"][:40]), strict=True
    ):
        gradients = torch.autograd.grad(
            torch.nn.functional.cross_entropy(model(image[None]), label[None]), weights
        )
        expected.append(sum(float((g * w.detach()).sum()) for g, w in zip(gradients, weights, strict=True)))
    found = result.samples["weight_decay_pull"].to_numpy()
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    measure = result.measures["weight_decay_pull"]
    assert measure.numbers["mean"] == pytest.approx(found.mean(), rel=1e-6)
    assert (measure.title, measure.unit) == ("Pull towards zero", "loss")
