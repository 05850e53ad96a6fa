"""A base in bfloat16 whose layers are kept in 4 bits, under an adapter, from a short YAML to each command."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
import torch
from safetensors.torch import load_file

from tests.hugging_face import quantise, save_lora
from tests.text_tasks import CASES
from tests.workplace import Outcome

pytest.importorskip("accelerate", reason="the extra quantised is not installed")
pytest.importorskip("bitsandbytes", reason="the extra quantised is not installed")

CASE = replace(CASES["completion"], config={"hidden_size": 64, "intermediate_size": 128})
SECTIONS = """\
influence: {queries: {rows: [0, 1]}, method: gradient_dot, index: {path: FOLDER/index, dimension: 32}}
privacy: {steps: 2, delta: 1e-5, expected_batch_size: 3, sampling: {scheme: poisson, sample_rate: 0.4}, \
clipping: {norm: 1.0}, noise: {multiplier: 1.0}, optimizer: {name: SGD, kwargs: {lr: 0.1}}}"""


@pytest.mark.long
def test_each_command_takes_layers_of_4_bits(tmp_path: Path, run: Callable[..., Outcome]) -> None:
    path = CASE.write(tmp_path, SECTIONS.replace("FOLDER", str(tmp_path)), dtype="auto")
    save_lora(tmp_path / "lora", tmp_path / "model", ["q_proj", "v_proj"])
    quantise(tmp_path / "model", "4bit", torch.bfloat16)
    path.write_text(path.read_text().replace("task: causal-lm", "task: causal-lm, adapter: lora"))

    run("analyze", path, "--set", "engine.verify=3", "--output", tmp_path / "analyze").succeeded()
    manifest = json.loads((tmp_path / "analyze" / "manifest.json").read_text())
    assert manifest["engine"]["dtype"] == "bfloat16"
    assert manifest["self_check"]["worst_norm_error_of_autocast"] < 0.05
    assert "bitsandbytes keeps 14 layers in 4 bits (nf4)" in manifest["model"]["notes"]
    assert (pd.read_parquet(tmp_path / "analyze" / "samples.parquet")["status"] == "ok").all()

    run("influence", "index", path).succeeded()
    run("influence", path, "--output", tmp_path / "influence", "--no-report").succeeded()
    scores = pd.read_parquet(tmp_path / "influence" / "scores.parquet")
    assert (scores["query_index"] >= 0).sum() == 2 * len(CASE.rows)

    for options in (("--steps", 1), ("--resume",)):
        run("dp-step", path, "--output", tmp_path / "private", *options).succeeded()
    public = load_file(tmp_path / "private" / "public" / "model.safetensors")
    assert {value.dtype for value in public.values()} == {torch.float32, torch.bfloat16}
    assert not [name for name in public if name.endswith("base_layer.weight")]
    adapters = load_file(tmp_path / "private" / "public" / "adapter" / "adapter_model.safetensors")
    assert any(bool(value.any()) for name, value in adapters.items() if "lora_B" in name)  # it began at 0
