"""Whole commands on a GPU, or on the device that is as strict as one, against the CPU. On the strict device,
whose kernels are the CPU's, a tensor or a generator in the wrong place is an error.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import yaml
from safetensors.numpy import load_file
from safetensors.torch import save_file

from psgrad import plugins
from psgrad.user_code import resolve
from tests.device.checked import checked_device
from tests.device.strict_or_gpu import STRICT, named_device, needs_a_device, needs_the_strict_device
from tests.influence_workplace import InfluenceWorkplace
from tests.private_workplace import EXACT, PrivateWorkplace
from tests.workplace import ROWS, Outcome, Workplace, run_command

pytestmark = needs_a_device
# without those that have a test of their own
METHODS = sorted(set(plugins.own_classes(plugins.METHODS)) - {"tracin"})
CNN = """class Model(nn.Sequential):
    def __init__(self):
        torch.manual_seed(0)
        super().__init__(
            nn.Unflatten(1, (1, 2, 2)), nn.Conv2d(1, 3, 2), nn.GroupNorm(1, 3), nn.Flatten(), nn.Linear(3, 3)
        )
"""
LANGUAGE_MODEL = """class Model(nn.Sequential):
    def __init__(self):
        torch.manual_seed(0)
        super().__init__(nn.Embedding(7, 5), nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 7))
"""


@pytest.fixture
def checked() -> torch.device:
    return checked_device()


@needs_the_strict_device
def test_tensors_of_two_devices_are_refused(checked: torch.device) -> None:
    x = torch.ones(3, device=checked)
    with pytest.raises(RuntimeError, match="on the same device"):
        x + torch.ones(3)
    with pytest.raises(RuntimeError, match="on the same device"):
        torch.ones(3).add_(x)
    with pytest.raises(RuntimeError, match="device type for generator"):
        torch.rand(3, device=checked, generator=torch.Generator())
    with pytest.raises(TypeError, match="convert"):
        x.numpy()
    assert (x + torch.tensor(1.0)).tolist() == [2.0] * 3  # one number may come from anywhere, as on a GPU


@needs_the_strict_device
def test_views_share_memory_and_derivatives_are_those_of_the_cpu(checked: torch.device) -> None:
    x = torch.arange(6.0, device=checked).reshape(2, 3)
    x.t()[1].mul_(-1)
    assert x.tolist() == [[0, -1, 2], [3, -4, 5]]
    w = torch.randn(4, 3)
    found = torch.func.grad(lambda w: (w @ x.to(w.device).T).tanh().sum())
    torch.testing.assert_close(found(w.to(checked)).cpu(), found(w), rtol=0, atol=0)


Run = Callable[..., list[Path]]


@pytest.fixture
def on_both(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    """Runs a command on the CPU and on the device, and returns both folders."""
    return partial(_on_both, partial(run_command, monkeypatch, capfd))


def _on_both(run: Callable[..., Outcome], place: Any, *command: str) -> list[Path]:
    folders = []
    for device in ("cpu", str(named_device())):
        place.config["engine"] = {**place.config.get("engine", {}), "device": device}
        place.config["output"] = device.partition(":")[0]
        (place.folder / "config.yaml").write_text(yaml.safe_dump(place.config))
        outcome = run(*command)
        assert outcome.code == 0, outcome.err
        folders.append(place.folder / place.config["output"])
    return folders


@pytest.fixture
def place(influence_place: InfluenceWorkplace) -> InfluenceWorkplace:
    return influence_place


SINGLE = 1e-6 if STRICT else 1e-4  # relative difference in float32: a GPU's kernels are not the CPU's


def assert_same_tables(one: Path, other: Path, *patterns: str, rtol: float = 1e-6) -> None:
    for pattern in patterns:
        tables = sorted(one.glob(pattern))
        assert tables, pattern
        for table in tables:
            expected, found = (pd.read_parquet(each / table.relative_to(one)) for each in (one, other))
            pd.testing.assert_frame_equal(found, expected, rtol=rtol, atol=rtol * 1e-3)


@pytest.mark.parametrize("model", ["mlp", "cnn", "tokens"])
def test_measures_have_the_numbers_of_the_cpu(workplace: Workplace, on_both: Run, model: str) -> None:
    """Each measure of psgrad, where it is one of such a model."""
    own = plugins.own_classes(plugins.MEASURES)
    of_tokens = {name for name in own if name.startswith("token_")}
    workplace.config["analyze"] = {"measures": sorted(set(own) - of_tokens)}
    if model == "cnn":
        workplace.use_model(CNN)
    if model == "tokens":
        workplace.use_model(LANGUAGE_MODEL)
        workplace.config["loss"] = "token_cross_entropy"
        ids = np.random.default_rng(0).integers(0, 7, (ROWS, 6))
        workplace.save(x=ids[:, :-1], y=ids[:, 1:])
        workplace.config["analyze"] = {"measures": sorted(of_tokens | {"noise_scale", "cosine_to_mean"})}
    else:
        network = resolve("model.py:Model" if model == "cnn" else "model.py:mlp", workplace.folder)()
        for number in range(3):
            values = {name: value * (number + 1) for name, value in network.state_dict().items()}
            save_file(values, workplace.folder / f"step-{number}.safetensors")
        workplace.config["analyze"]["checkpoints"] = "step-*.safetensors"
    workplace.config["engine"] = {"chunk_size": 5, "verify": 2, "dtype": "float64"}
    assert_same_tables(*on_both(workplace, "analyze", "config.yaml", "--no-report"), "samples.parquet")


@pytest.mark.parametrize("chunk", ["auto", 7])
def test_analyze_has_the_tables_of_the_cpu(workplace: Workplace, on_both: Run, chunk: Any) -> None:
    workplace.config["engine"] = {"chunk_size": chunk}
    folders = on_both(workplace, "analyze", "config.yaml")
    assert_same_tables(*folders, "samples.parquet", "parameters.parquet", rtol=SINGLE)


@pytest.mark.parametrize("method", METHODS)
def test_influence_method_has_the_scores_of_the_cpu(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    on_both: Run,
    method: str,
) -> None:
    place = InfluenceWorkplace(tmp_path, monkeypatch, capfd)
    place.prepare()
    place.config["engine"] = {"chunk_size": 4, "dtype": "float64"}
    place.config["influence"] |= {"method": method, "queries": {"worst": 3}}
    one, other = on_both(place, "influence", "config.yaml", "--no-report", "--matrix")
    assert_same_tables(one, other, "scores.parquet")
    matrices = [load_file(each / "matrix.safetensors")["scores"] for each in (one, other)]
    np.testing.assert_allclose(matrices[1], matrices[0], rtol=1e-5, atol=1e-9)


def test_scores_over_checkpoints_are_those_of_the_cpu(place: InfluenceWorkplace, on_both: Run) -> None:
    files = [f"step-{seed}.safetensors" for seed in range(2)]
    for seed, file in enumerate(files):
        place.save_checkpoint(file, seed)
    checkpoints = [{"path": file, "learning_rate": 0.1} for file in files]
    place.config["influence"] |= {"method": "tracin", "queries": {"worst": 3}, "checkpoints": checkpoints}
    folders = on_both(place, "influence", "config.yaml", "--no-report")
    assert_same_tables(*folders, "scores.parquet", rtol=SINGLE)


def test_private_step_without_noise_takes_the_step_of_the_cpu(workplace: Workplace, on_both: Run) -> None:
    place = PrivateWorkplace(workplace)
    place.config["privacy"] |= EXACT | {"steps": 2}
    one, other = on_both(place, "dp-step", "config.yaml")
    models = [load_file(each / "public/model.safetensors") for each in (one, other)]
    for name, expected in models[0].items():
        np.testing.assert_allclose(models[1][name], expected, rtol=SINGLE, atol=SINGLE * 1e-3)


def test_private_step_with_noise_ends_well(workplace: Workplace) -> None:
    place = PrivateWorkplace(workplace)
    place.config["engine"] = {"device": str(named_device())}
    place.config["privacy"] |= {"steps": 2, "noise": {"multiplier": 2.0}}
    place.succeeded()
