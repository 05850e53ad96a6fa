"""The built-in examples: what is shipped fits together and is what the README says of it."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from sklearn.datasets import load_digits

import psgrad
from psgrad.config import Config, config_from
from psgrad.errors import ConfigError
from psgrad.yaml12 import parse

CONFIGS = Path(__file__).parents[2] / "configs"


def load_model(folder: Path) -> torch.nn.Module:
    model: torch.nn.Module = runpy.run_path(str(folder / "model.py"))["build"]()
    model.load_state_dict(load_file(folder / "model.safetensors"))
    return model.eval()


def passages(**arguments: int) -> Any:
    return runpy.run_path(str(CONFIGS / "text" / "data.py"))["passages"](**arguments)


def test_shipped_files_stay_under_a_megabyte() -> None:
    shipped = [path for path in CONFIGS.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert sum(path.stat().st_size for path in shipped) < 1_000_000


def test_the_digits_differ_from_the_original_in_the_flipped_labels_alone() -> None:
    original = load_digits()
    with np.load(CONFIGS / "digits" / "digits.npz") as data:
        images, labels, ids = data["image"], data["label"], data["id"]
    np.testing.assert_array_equal(images[:, 0], (original.images / 16).astype(np.float32))

    flipped = json.loads((CONFIGS / "digits" / "flipped.json").read_text(encoding="utf-8"))
    changed = np.flatnonzero(labels != original.target)
    assert len(flipped) == round(0.03 * len(labels))
    assert flipped == [{"id": ids[i], "true": original.target[i], "given": labels[i]} for i in changed]


def test_the_digits_network_has_learnt_the_true_labels() -> None:
    with np.load(CONFIGS / "digits" / "digits.npz") as data:
        images = torch.from_numpy(data["image"])
    predictions = load_model(CONFIGS / "digits")(images).argmax(1).numpy()
    assert (predictions == load_digits().target).mean() > 0.98


def test_passages_are_the_same_each_time_and_have_one_id_each() -> None:
    first, second = passages(), passages()
    assert len(first) == 512
    assert len({first[index]["passage"] for index in range(512)}) == 512
    torch.testing.assert_close(first[100]["bytes"], second[100]["bytes"])
    torch.testing.assert_close(first[100]["bytes"][1:], first[100]["next_bytes"][:-1])


def test_more_passages_than_there_are_is_refused() -> None:
    with pytest.raises(ValueError, match="1000000 passages of 128 bytes were asked for"):
        passages(count=1_000_000)


def test_the_text_network_has_learnt_something() -> None:
    data = passages()
    items = [data[index] for index in range(0, 512, 16)]
    logits = load_model(CONFIGS / "text")(torch.stack([item["bytes"] for item in items]))
    loss = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), torch.stack([item["next_bytes"] for item in items]).flatten()
    )
    assert loss.item() < 2  # nats a byte; all bytes alike would be 5.5


PART = ", a part"


# -- Every config that is shown ------------------------------------------------------------------------------


def shown_configs() -> Iterator[tuple[str, dict[str, Any]]]:
    """(name, content) of each config in configs/ and of each YAML block of a page that has a config's keys;
    parts of a config are laid over that of the digits. Files that they name are relative to configs/, those
    of the README to a folder of `psgrad init`.
    """
    digits = parse((CONFIGS / "digits.yaml").read_text(encoding="utf-8"), "digits").content
    for path in sorted(CONFIGS.glob("*.yaml")):
        yield path.name, parse(path.read_text(encoding="utf-8"), path.name).content
    for page in [CONFIGS.parent / "README.md", *sorted((CONFIGS.parent / "docs").rglob("*.md"))]:
        for number, block in enumerate(
            re.findall(r"```yaml\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)
        ):
            try:
                content = parse(block, page.name).content
            except ConfigError:
                continue  # of another tool, with more than YAML 1.2's plain values
            if isinstance(content, dict) and "pretrained" in content.get("model", {}):
                continue  # test_task_guides and test_models_page run these on models that they make
            if isinstance(content, dict) and set(content) <= set(Config.model_fields):
                yield (
                    f"{page.relative_to(CONFIGS.parent)} {number}{'' if 'version' in content else PART}",
                    {
                        **digits,
                        **content,
                    },
                )


SHOWN = dict(shown_configs())
WHOLE = [name for name, content in SHOWN.items() if not name.endswith(PART)]


@pytest.mark.parametrize("name", SHOWN)
def test_every_config_that_is_shown_is_valid(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a folder with the checkpoints of a run, which patterns of a page name."""
    monkeypatch.chdir(tmp_path)
    Path("run").mkdir()
    for epoch in (1, 2):
        save_file({"weight": torch.zeros(1)}, f"run/epoch-{epoch}.safetensors")
    psgrad.load_config(SHOWN[name])


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that `psgrad init` has filled."""
    folder = tmp_path_factory.mktemp("begun")
    subprocess.run([sys.executable, "-m", "psgrad", "init"], cwd=folder, capture_output=True, check=True)
    return folder


@pytest.mark.long
@pytest.mark.parametrize("name", WHOLE)
def test_every_config_that_is_shown_runs(name: str, tmp_path: Path, begun: Path) -> None:
    """On a few of its rows, without a report. What parts of configs do, their pages' own tests show."""
    base = begun if name.startswith("README.md") else CONFIGS
    config = config_from({**SHOWN[name], "output": str(tmp_path / "run")}, base=base)
    run = psgrad.analyze(config, limit=48, report=False)
    assert len(run.samples) == 48
    assert set(run.measures) >= {measure.name for measure in config.analyze.measures}


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.name)
def test_every_config_passes_validate(path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    found = psgrad.validate(path)
    assert found.problems == []
    assert found.facts["model"]
