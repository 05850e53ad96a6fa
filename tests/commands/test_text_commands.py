"""One short YAML file for texts and a pretrained model, without Python: analyze, influence and dp-step."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest
import torch
from safetensors.torch import load_file

from tests.text_tasks import CASES
from tests.workplace import run_command

QUERIES = "influence: {queries: {rows: [0, 1, 2]}}"
LARGE = ("completion", "seq2seq")
PRIVACY = (
    "privacy: {steps: 1, delta: 1e-5, expected_batch_size: 3, sampling: {scheme: poisson, sample_rate: 0.4},"
    " clipping: {norm: 1.0}, noise: {multiplier: 1.0}, optimizer: {name: SGD, kwargs: {lr: 0.1}}}"
)


def write_adapter(model: Path, folder: Path) -> None:
    """A LoRA adapter with random weights on top of the model, as peft saves it."""
    peft = pytest.importorskip("peft", reason="the extra hugging-face is not installed")
    from transformers import AutoModelForCausalLM

    made = peft.LoraConfig(
        r=2, task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"], init_lora_weights=False
    )
    with torch.random.fork_rng(devices=[]):
        peft.get_peft_model(AutoModelForCausalLM.from_pretrained(model), made).save_pretrained(folder)


def assert_peft_opens(public: Path, model: Path) -> None:
    """The adapter on the base model has the weights of the whole."""
    import peft
    from transformers import AutoModelForCausalLM

    opened = peft.PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(model), str(public / "adapter")
    ).state_dict()
    whole = load_file(public / "model.safetensors")
    assert sum("lora" in name for name in whole) >= 4
    for name, value in whole.items():
        assert torch.equal(opened[name], value), name


@pytest.mark.long
@pytest.mark.every(3)
@pytest.mark.parametrize(
    "name", ["classification", "completion", "seq2seq", pytest.param("tokens", marks=pytest.mark.sweep)]
)
def test_text_task_runs_analyze_influence_and_dp_step_from_one_yaml(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    private = name in ("classification", "completion")
    # Solves of outputs of hundreds of words take long, and are tested elsewhere.
    asked = QUERIES.replace("}}", "}, method: {curvature: fisher}}") if name in LARGE else QUERIES
    path = CASES[name].write(tmp_path, f"{asked}\n{PRIVACY}" if private else asked)
    if name == "completion":
        write_adapter(tmp_path / "model", tmp_path / "lora")
        path.write_text(path.read_text().replace("task: causal-lm", "task: causal-lm, adapter: lora"))
    assert len(path.read_text().splitlines()) <= 12
    count, commands = len(CASES[name].rows), ["analyze", "influence", *(["dp-step"] if private else [])]

    for command in commands:
        options = ["--output", str(tmp_path / command), *(["--no-report"] if command != "dp-step" else [])]
        run_command(monkeypatch, capfd, command, str(path), *options).succeeded()

    samples = pd.read_parquet(tmp_path / "analyze" / "samples.parquet")
    assert len(samples) == count
    assert (samples["status"] == "ok").all()
    scores = pd.read_parquet(tmp_path / "influence" / "scores.parquet")
    assert (scores["query_index"] >= 0).sum() == 3 * count
    assert scores["score"].notna().all()
    manifest = json.loads((tmp_path / "analyze" / "manifest.json").read_text())
    if name == "completion":
        assert manifest["model"]["trainable"] < manifest["model"]["parameters"] / 10
        assert_peft_opens(tmp_path / "dp-step/public", tmp_path / "model")
    if name in ("classification", "tokens"):
        assert manifest["config"]["data"]["class_names"] == ["dull", "fine", "odd"]


@pytest.mark.parametrize("said", [False, True])
def test_multi_label_head_needs_a_loss_of_several_labels(
    said: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    path = CASES["classification"].write(tmp_path, "loss: bce_with_logits" if said else "")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    config["problem_type"] = "multi_label_classification"
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    rows = tmp_path / "rows.jsonl"
    lines = [json.loads(line) for line in rows.read_text().splitlines()]
    rows.write_text("\n".join(json.dumps({**line, "label": [line["label"]]}) for line in lines))
    outcome = run_command(monkeypatch, capfd, "analyze", str(path), "--no-report")
    assert outcome.code == (0 if said else 2), outcome.err
    assert said or "expected loss: bce_with_logits" in outcome.err
