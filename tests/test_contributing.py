"""CONTRIBUTING.md: its worked examples are added to psgrad for a test, and run."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from psgrad.engine.influence import methods
from psgrad.engine.measures import builtin as known
from psgrad.engine.transforms import grad, vmap
from psgrad.engine.transforms.rules import registry
from psgrad.quality import detectors
from tests.workplace import Workplace

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


def block(page: str, words: str) -> str:
    """The one Python block of a page with these words."""
    (found,) = (each for each in re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL) if words in each)
    return str(found)


def put_into(package: Any, name: str, source: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module of this source in a package of psgrad, until the test ends."""
    (folder / f"{name}.py").write_text(source, encoding="utf-8")
    monkeypatch.setattr(package, "__path__", [*package.__path__, str(folder)])
    monkeypatch.setitem(sys.modules, f"{package.__name__}.{name}", None)
    del sys.modules[f"{package.__name__}.{name}"]  # monkeypatch takes it out again at the end
    monkeypatch.setattr(package, name, None, raising=False)


def test_the_operator_has_per_sample_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_derivatives", dict(registry._derivatives))
    monkeypatch.setattr(registry, "_batchings", dict(registry._batchings))
    names: dict[str, Any] = {}
    exec(block(PAGE, "log_cosh"), names)
    weight, samples = torch.randn(3, dtype=torch.float64), torch.randn(5, 3, dtype=torch.float64)
    log_cosh = torch.ops.contributing.log_cosh.default
    found = vmap(grad(lambda w, x: log_cosh(w * x).sum()), in_dims=(None, 0))(weight, samples)
    leaf = weight.clone().requires_grad_()
    expected = [torch.autograd.grad(torch.log(torch.cosh(leaf * x)).sum(), leaf)[0] for x in samples]
    torch.testing.assert_close(found, torch.stack(expected))


def test_the_measure_is_found_by_its_file(
    workplace: Workplace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "measures"
    folder.mkdir()
    known.known_measures.cache_clear()
    put_into(known, "loss_per_norm", block(PAGE, "LossPerNorm"), folder, monkeypatch)
    try:
        workplace.config["analyze"] = {"measures": ["loss_per_norm"]}
        workplace.succeeded()
        samples = workplace.samples()
        np.testing.assert_allclose(
            samples["loss_per_norm"], samples["loss"] / samples["grad_norm"], rtol=1e-5
        )
    finally:
        known.known_measures.cache_clear()


def test_the_influence_method_is_found_by_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    guide = (ROOT / "docs" / "guides" / "influence.md").read_text(encoding="utf-8")
    methods.known_methods.cache_clear()
    put_into(methods, "diagonal_fisher", block(guide, "DiagonalFisher(Method)"), tmp_path, monkeypatch)
    try:
        assert methods.known_methods()["diagonal_fisher"].__name__ == "DiagonalFisher"
    finally:
        methods.known_methods.cache_clear()


def test_the_detector_scores_by_the_distance_to_the_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    names: dict[str, Any] = {"__name__": __name__}
    exec(block(PAGE, "DistanceToMean"), names)
    kind = names["DistanceToMean"]
    monkeypatch.setattr(detectors, "DETECTORS", {**detectors.DETECTORS, kind.name: kind})
    rows, reference = np.arange(8.0).reshape(4, 2), np.zeros((3, 2))
    found = detectors.detect("distance_to_mean", {}, rows, reference, seed=0)
    np.testing.assert_allclose(found, np.linalg.norm(rows, axis=1))
