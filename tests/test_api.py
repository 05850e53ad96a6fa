"""psgrad from Python: the names it has, configs in every form, and the page's examples."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
import yaml

import psgrad
import psgrad.api
from tests.workplace import ROWS, Workplace

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "reference" / "api.md").read_text(encoding="utf-8")
# Classes of a library that may be absent; their guide shows them.
CALLBACKS = {"GradientMonitor", "LightningMonitor"}
FUNCTIONS = sorted(
    name
    for name in {*psgrad.__all__} - CALLBACKS
    if inspect.isfunction(getattr(psgrad, name)) or getattr(psgrad, name) is psgrad.RunCheckpoints
)


@pytest.mark.long
def test_import_is_light_and_names_come_when_asked_for() -> None:
    script = (
        "import sys, psgrad; print([m for m in ('torch', 'pandas', 'pydantic') if m in sys.modules],"
        " psgrad.analyze.__name__)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "[] analyze\n"
    assert set(psgrad.__all__) <= set(dir(psgrad))
    with pytest.raises(AttributeError, match="no attribute 'analyse'"):
        psgrad.analyse  # type: ignore[attr-defined] # noqa: B018


def test_every_function_is_in_the_page_with_its_arguments() -> None:
    shown = dict(re.findall(r"^- `(\w+)\((.*?)\)`", PAGE, flags=re.MULTILINE))
    assert sorted(shown) == FUNCTIONS
    for name, arguments in shown.items():
        theirs = list(inspect.signature(getattr(psgrad, name)).parameters)
        ours = [part.partition("=")[0].strip() for part in re.sub(r"\(\)", "", arguments).split(",")]
        assert len(ours) == len(theirs), name
        assert [each for each in ours if each not in ("path", "folder")] == [
            each for each in theirs if each in ours and each != "folder"
        ], name


def as_object(content: dict[str, Any]) -> Any:
    return psgrad.load_config(content)


def as_file(content: dict[str, Any]) -> Any:
    Path("config.yaml").write_text(yaml.safe_dump(content))
    return "config.yaml"


@pytest.mark.parametrize("form", [dict, as_object, as_file, lambda content: Path(as_file(content))])
def test_a_config_in_every_form_gives_the_same_run(workplace: Workplace, form: Any) -> None:
    run = psgrad.analyze(form(workplace.config), report=False)
    inputs, target = torch.from_numpy(workplace.arrays["x"]), torch.from_numpy(workplace.arrays["y"])
    losses = torch.nn.functional.cross_entropy(workplace.model(inputs), target, reduction="none")
    assert run.samples["loss"].to_numpy() == pytest.approx(losses.detach().numpy(), rel=1e-5)
    pd.testing.assert_frame_equal(psgrad.load_run("out").samples, run.samples)
    assert psgrad.check("out").exit_code == 0


def test_mistakes_raise_with_all_that_is_wrong(workplace: Workplace) -> None:
    workplace.config["engine"] = {"chunksize": 3, "verify": -1}
    with pytest.raises(psgrad.PsgradError, match="the config has 2 problems") as caught:
        psgrad.analyze(workplace.config)
    assert caught.value.exit_code == 2
    found = psgrad.validate(as_file(workplace.config))
    assert len(found.problems) == 2
    assert found.exit_code == 2


def test_settings_change_a_file_as_they_do_on_the_command_line(workplace: Workplace) -> None:
    assert psgrad.load_config(as_file(workplace.config), ["engine.verify=0"]).engine.verify == 0
    assert psgrad.load_config(workplace.config, ["engine.verify=0"]).engine.verify == 0


def test_progress_is_reported(workplace: Workplace) -> None:
    told: list[int] = []
    psgrad.analyze(workplace.config, report=False, progress=lambda progress: told.append(progress.done))
    assert told[-1] == ROWS


@pytest.mark.sweep
def test_the_pages_examples_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    subprocess.run([sys.executable, "-m", "psgrad", "init"], cwd=tmp_path, capture_output=True, check=True)
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL):
        exec(block, names)  # our own page
    said = capsys.readouterr().out
    assert "digit-" in said
    assert "holds an earlier run" in said
