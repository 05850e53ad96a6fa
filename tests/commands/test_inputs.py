"""Runs on data as people have them: images of which one is broken, weights, names of classes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import yaml
from PIL import Image
from safetensors.numpy import save_file

from psgrad.data.sources.table_samples import TableSamples
from psgrad.engine.measures.mean_gradient import MeanGradient
from psgrad.engine.privacy.step import PrivateTraining
from tests.private_workplace import PRIVACY
from tests.workplace import Workplace

IMAGES = """
def Model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(72, 2))
"""


@pytest.fixture
def images(workplace: Workplace) -> Workplace:
    generator = np.random.default_rng(0)
    for row in range(12):
        path = workplace.folder / "images" / ("cat" if row % 2 else "dog") / f"{row:02d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(generator.integers(0, 256, (8, 8, 3), dtype=np.uint8)).save(path)
    workplace.use_model(IMAGES)
    workplace.config["data"] = {"images": "images"}
    return workplace


@pytest.mark.long
def test_analyze_goes_on_at_a_broken_image(images: Workplace) -> None:
    images.succeeded()
    before = images.samples()
    path = images.folder / "images" / "dog" / "04.png"
    path.write_bytes(path.read_bytes()[:90])
    outcome = images.succeeded("--overwrite")
    samples = images.samples()
    broken = samples["id"] == "dog/04.png"
    assert samples["status"].tolist() == ["nonfinite" if each else "ok" for each in broken]
    np.testing.assert_allclose(samples["grad_norm"][~broken], before["grad_norm"][~broken], rtol=1e-5)
    assert "row 8 is not finite: the image " in outcome.err
    assert "dog/04.png in row 8 can't be read: " in outcome.err


@pytest.mark.long
def test_influence_refuses_a_broken_image(images: Workplace) -> None:
    path = images.folder / "images" / "dog" / "04.png"
    path.write_bytes(path.read_bytes()[:90])
    images.config["influence"] = {"queries": {"rows": [0]}}
    images.analyze()  # writes the config
    outcome = images.command("influence", "config.yaml", "--overwrite")
    outcome.refused(3, "dog/04.png in row 8 can't be read")


def _after(change: Callable[[], None], run: Callable[..., Any]) -> Callable[..., Any]:
    """What is called before the second pass, after a change."""

    def changed(self: MeanGradient, *arguments: Any) -> Any:
        change()
        return run(self, *arguments)

    return changed


@pytest.mark.parametrize("suffix", ["arrow", "safetensors", "parquet"])
def test_a_file_that_is_changed_between_passes(
    workplace: Workplace, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    path = workplace.folder / f"data.{suffix}"
    frame = pd.DataFrame({"a": workplace.arrays["x"][:, 0], "y": workplace.arrays["y"]})
    arrays = {name: frame[name].to_numpy(copy=True) for name in frame}
    write = {
        "arrow": lambda: frame.to_feather(path, compression="uncompressed"),
        "safetensors": lambda: save_file(arrays, path),
        "parquet": lambda: frame.to_parquet(path),
    }[suffix]
    write()
    workplace.use_model("def Model():\n    torch.manual_seed(0)\n    return nn.Sequential(nn.Linear(1, 3))\n")
    workplace.config["data"] = {"path": path.name, "inputs": ["a"], "target": "y"}
    workplace.config["analyze"] = {"measures": ["cosine_to_mean"]}
    monkeypatch.setattr(MeanGradient, "between", _after(write, MeanGradient.between))
    outcome = workplace.analyze("--no-report")
    if suffix == "parquet":  # its rows are in a copy
        assert outcome.code == 0, outcome.err
        return
    outcome.refused(3, f"data.{suffix} was changed while the run read it", "go on with --resume")
    assert workplace.manifest()["state"] == "failed"
    monkeypatch.undo()
    monkeypatch.chdir(workplace.folder)
    assert workplace.analyze("--no-report", "--resume").code == 0  # it holds the same rows


@pytest.mark.parametrize("command", ["index", "dp-step"])
def test_a_file_that_is_changed_while_other_commands_read_it(
    workplace: Workplace, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    """The rows that were read since are in no result."""
    path = workplace.folder / "data.safetensors"
    arrays = {"a": workplace.arrays["x"][:, :1].copy(), "y": workplace.arrays["y"]}
    save_file(arrays, path)
    workplace.use_model("def Model():\n    torch.manual_seed(0)\n    return nn.Sequential(nn.Linear(1, 3))\n")
    workplace.config["data"] = {"path": path.name, "inputs": "a", "target": "y"}
    workplace.config["engine"] = {"chunk_size": 4, "verify": 0}
    workplace.config["influence"] = {"index": {"path": "index", "rows_per_shard": 8, "dimension": 4}}
    workplace.config["privacy"] = dict(PRIVACY)
    (workplace.folder / "config.yaml").write_text(yaml.safe_dump(workplace.config))
    arguments = ["influence", "index"] if command == "index" else ["dp-step"]
    kind: Any = TableSamples if command == "index" else PrivateTraining
    name = "take" if command == "index" else "clipped"
    original, calls = getattr(kind, name), 0

    def changing(self: Any, *arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == (6 if command == "index" else 1):
            save_file({**arrays, "y": arrays["y"] * 0}, path)
        return original(self, *arguments, **options)

    monkeypatch.setattr(kind, name, changing)
    outcome = workplace.command(*arguments, "config.yaml")
    outcome.refused(3, "data.safetensors was changed while the run read it")
    if command == "index":
        assert len(list((workplace.folder / "index").rglob("gradients*"))) == 1
    else:
        assert len((workplace.folder / "out/public/ledger.jsonl").read_text().splitlines()) == 1  # its header


@pytest.mark.long
def test_weights_multiply_losses_and_gradients(workplace: Workplace, tmp_path: Path) -> None:
    weights = np.linspace(0, 3, len(workplace.arrays["y"])).astype(np.float32)
    workplace.save(w=weights)
    workplace.succeeded()
    before = workplace.samples()
    workplace.config["data"]["weight"] = "w"
    workplace.succeeded("--overwrite")
    after = workplace.samples()
    np.testing.assert_allclose(after["loss"], weights * before["loss"], rtol=1e-5)
    np.testing.assert_allclose(after["grad_norm"], weights * before["grad_norm"], rtol=1e-5, atol=1e-7)
