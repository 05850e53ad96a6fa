"""The measures of a config, and what they need."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from safetensors.torch import save_file
from torch import nn

from psgrad.commands.analyze import analyze
from psgrad.config import load_config
from psgrad.errors import MeasureError
from psgrad.run.finished import load_run
from tests.workplace import CLASSES, ROWS, Workplace


def test_a_run_has_the_columns_tables_and_arrays(workplace: Workplace) -> None:
    names = ["neighbour_distance", {"name": "ntk", "samples": 6}]
    content = {**workplace.config, "analyze": {"measures": names}}
    path = workplace.folder / "config.yaml"
    path.write_text(yaml.safe_dump(content))
    analyze(load_config(path), report=False)
    run = load_run(workplace.folder / "out")
    samples = run.samples
    assert samples["neighbour_distance"].notna().all()
    assert samples["nearest_neighbour"].between(0, ROWS - 1).all()
    assert samples["neighbour_label_share"].between(0, 1).all()
    assert run.measures["projected_gradients"].arrays["projected_gradients"].shape == (
        ROWS,
        sum(p.numel() for p in workplace.model.parameters()),
    )
    assert run.measures["ntk"].arrays["trace_kernel"].shape == (6, 6)
    assert len(run.measures["ntk"].tables["outputs"]) == CLASSES


@pytest.mark.parametrize(
    ("measure", "words"),
    [
        ({"name": "neighbour_distance", "neighbours": 0}, "got 0 neighbours, expected at least 1"),
        ({"name": "projected_gradients", "dimension": 0}, "got 0 as dimension, expected at least 1 column"),
        (
            {"name": "projected_gradients", "kind": "two-sided"},
            "expected one of sparse, none",
        ),
        ({"name": "ntk", "samples": 1.5}, "expected a whole number"),
        ({"name": "ntk", "sample": 3}, "did you mean samples?"),
    ],
)
def test_wrong_options_are_reported(workplace: Workplace, measure: dict[str, Any], words: str) -> None:
    workplace.config["analyze"] = {"measures": [measure]}
    workplace.refused(2, words)


@pytest.mark.long
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_a_second_look_is_refused_where_it_would_see_other_draws(workplace: Workplace, mode: str) -> None:
    dropping = (
        "import torch\nfrom torch import nn\n\n\ndef mlp():\n    return nn.Sequential(nn.Linear(4, 5),"
        " nn.Dropout(), nn.Linear(5, 3))\n"
    )
    (workplace.folder / "model.py").write_text(dropping)
    workplace.config["model"] = {"factory": "model.py:mlp", "mode": mode}
    path = workplace.folder / "config.yaml"

    def run(*names: object) -> None:
        path.write_text(yaml.safe_dump({**workplace.config, "analyze": {"measures": list(names)}}))
        analyze(load_config(path), report=False, overwrite=True)

    run("layer_norms", {"name": "noise_scale", "resamples": 0})
    if mode == "eval":
        run("cosine_to_class_mean", "cosine_to_mean")
        return
    with pytest.raises(
        MeasureError, match="cosine_to_class_mean, cosine_to_mean ask for a sample's gradient more than once"
    ):
        run("cosine_to_class_mean", "cosine_to_mean")
    names = [f"step{step}.safetensors" for step in range(3)]
    for name in names:
        model = nn.Sequential(nn.Linear(4, 5), nn.Dropout(), nn.Linear(5, 3))
        save_file(model.state_dict(), workplace.folder / name)
    for measure in ("vog", "grand", "trajectory", "forgetting"):
        section = {"measures": [measure], "checkpoints": names}
        path.write_text(yaml.safe_dump({**workplace.config, "analyze": section}))
        with pytest.raises(
            MeasureError,
            match=f"{measure} asks for a sample's gradient more than once, and the model draws at random",
        ):
            analyze(load_config(path), report=False, overwrite=True)
