"""From `transformers.Trainer` to psgrad, in an empty folder: its checkpoints as the model, and as the
checkpoints of one training run.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import yaml

import psgrad
from psgrad.commands.influence_inputs import fresh_models
from psgrad.config import AnalyzeConfig, InfluenceConfig, load_config
from psgrad.errors import CheckpointError, ConfigError
from tests.hugging_face import TEXTS, tiny_model, tiny_tokenizer, transformers
from tests.workplace import Workplace

peft = pytest.importorskip("peft", reason="the extra hugging-face is not installed")
ROWS = [(text, place % 2) for place, text in enumerate((*TEXTS, "the cat", "a fine day", "dull"))]


def train(folder: Path, model: Any, tokenizer: Any) -> None:
    """One epoch of four steps, with a checkpoint after every second one."""

    class Rows(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return len(ROWS)

        def __getitem__(self, row: int) -> Any:
            return {**tokenizer(ROWS[row][0]), "labels": ROWS[row][1]}

    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=2,
        num_train_epochs=1,
        save_steps=2,
        logging_steps=1,
        learning_rate=0.01,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    transformers.Trainer(
        model=model,
        args=arguments,
        train_dataset=Rows(),
        processing_class=tokenizer,
        data_collator=transformers.DataCollatorWithPadding(tokenizer),
    ).train()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run, a LoRA run of the same base, and the rows."""
    folder = tmp_path_factory.mktemp("trainer")
    tokenizer = tiny_tokenizer(folder / "base")
    model = tiny_model("sequence-classification", folder / "base")
    lora = peft.LoraConfig(r=2, target_modules=["query"], task_type="SEQ_CLS")
    train(folder / "run", model, tokenizer)
    base = transformers.AutoModelForSequenceClassification.from_pretrained(folder / "base")
    train(folder / "lora", peft.get_peft_model(base, lora), tokenizer)
    rows = [json.dumps({"text": text, "label": label}) for text, label in ROWS]
    (folder / "rows.jsonl").write_text("\n".join(rows) + "\n")
    return folder


CONFIG: dict[str, Any] = {
    "version": 1,
    "model": {"pretrained": "base", "task": "sequence-classification"},
    "data": {"path": "rows.jsonl", "text": "text", "target": "label"},
    "engine": {"verify": 0},
}


def write(folder: Path, output: Path, **sections: Any) -> Path:
    path = folder / f"{output.name}.yaml"
    path.write_text(yaml.safe_dump({**CONFIG, "output": str(output), **sections}))
    return path


def norms_alone(model: Any, folder: Path) -> torch.Tensor:
    """Of each row by itself, with the library's tokenizer and loss and PyTorch's autograd."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    found = []
    for text, label in ROWS:
        logits = model(**tokenizer(text, return_tensors="pt")).logits
        loss = F.cross_entropy(logits, torch.tensor([label]))
        gradients = torch.autograd.grad(loss, parameters, materialize_grads=True)
        found.append(sum(gradient.square().sum() for gradient in gradients).sqrt())
    return torch.stack(found).double()


@pytest.mark.long
def test_analyze_a_trainers_checkpoint_from_an_empty_folder(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    workplace = Workplace(tmp_path, monkeypatch, capfd)
    data = {**CONFIG["data"], "path": str(trained / "rows.jsonl")}
    workplace.config = {**CONFIG, "data": data, "output": "out"}
    checkpoint = trained / "run" / "checkpoint-4"
    workplace.succeeded("--no-report", "--set", f"model.pretrained={checkpoint}")

    model = transformers.AutoModelForSequenceClassification.from_pretrained(checkpoint).eval()
    found = torch.from_numpy(workplace.samples().sort_values("index")["grad_norm"].to_numpy(copy=True))
    torch.testing.assert_close(found.double(), norms_alone(model, checkpoint), rtol=1e-4, atol=0)
    facts = workplace.manifest()["model"]
    assert facts["origin"]["pretrained"] == str(checkpoint)
    assert facts["origin"]["task"] == "sequence-classification"
    assert workplace.manifest()["hashes"]["packages"] == {"transformers": transformers.__version__}


@pytest.mark.long
def test_analyze_an_adapter_that_a_trainer_saved(trained: Path, tmp_path: Path) -> None:
    model = {**CONFIG["model"], "adapter": "lora/checkpoint-4"}
    found = psgrad.analyze(write(trained, tmp_path / "adapter", model=model), report=False)

    base = transformers.AutoModelForSequenceClassification.from_pretrained(trained / "base")
    adapted = peft.PeftModel.from_pretrained(
        base, trained / "lora" / "checkpoint-4", is_trainable=True
    ).eval()
    expected = norms_alone(adapted, trained / "base")
    norms = found.samples.sort_values("index")["grad_norm"].to_numpy(copy=True)
    torch.testing.assert_close(torch.from_numpy(norms).double(), expected, rtol=1e-4, atol=0)


@pytest.mark.long
@pytest.mark.every(2)
@pytest.mark.parametrize("kind", ["run", "lora"])
def test_influence_sums_over_a_trainers_checkpoints(kind: str, trained: Path, tmp_path: Path) -> None:
    model = CONFIG["model"] if kind == "run" else {**CONFIG["model"], "adapter": "lora/checkpoint-2"}
    influence = {"method": "tracin", "checkpoints": f"{kind}/checkpoint-*", "queries": {"rows": [0, 1]}}
    found = psgrad.influence(write(trained, tmp_path / kind, model=model, influence=influence), report=False)
    manifest = json.loads((tmp_path / kind / "manifest.json").read_text())
    listed = manifest["config"]["influence"]["checkpoints"]
    assert [each["path"] for each in listed] == [f"{kind}/checkpoint-2", f"{kind}/checkpoint-4"]
    assert all(0 < each["learning_rate"] <= 0.01 for each in listed)
    assert found is not None


@pytest.mark.long
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_tracin_of_plain_steps_says_that_a_trainer_took_steps_of_adam(
    optimizer: str, trained: Path, tmp_path: Path
) -> None:
    method = {"name": "tracin", "optimizer": optimizer}
    influence = {"method": method, "checkpoints": "run/checkpoint-*", "queries": {"rows": [0]}}
    found = psgrad.influence(load_config(write(trained, tmp_path / "out", influence=influence)), report=False)
    said = [each for each in found.warnings if "optimizer.pt has the state of Adam" in each]
    assert len(said) == (optimizer == "sgd")
    step = "plain gradient step" if optimizer == "sgd" else "step of Adam"
    assert f"if one {step} on the training example were undone" in found.unit
    if said:
        assert said[0].startswith("run/checkpoint-2/optimizer.pt has")
        assert "influence.method: {name: tracin, optimizer: adam}" in said[0]


def adam_of(checkpoint: Path, model: Any, folder: Path) -> Any:
    """The optimiser of a trainer that goes on from a checkpoint."""
    arguments = transformers.TrainingArguments(output_dir=str(folder), report_to=[], use_cpu=True)
    optimizer = transformers.Trainer(model=model, args=arguments).create_optimizer()
    optimizer.load_state_dict(torch.load(checkpoint / "optimizer.pt", weights_only=True))
    return optimizer


@pytest.mark.long
def test_influence_undoes_the_steps_of_a_trainers_adam(trained: Path, tmp_path: Path) -> None:
    influence = {
        "method": {"name": "tracin", "optimizer": "adam"},
        "checkpoints": "run/checkpoint-*",
        "queries": {"rows": [0]},
        "self_influence": "never",
    }
    found = psgrad.influence(write(trained, tmp_path / "out", influence=influence), report=False)
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    rates = [each["learning_rate"] for each in manifest["config"]["influence"]["checkpoints"]]
    assert [each["second_moments"] for each in found.facts] == [
        "the optimiser's state beside the checkpoint"
    ] * 2
    expected = torch.zeros(len(ROWS), dtype=torch.float64)
    for step, rate in zip((2, 4), rates, strict=True):
        folder = trained / "run" / f"checkpoint-{step}"
        model = transformers.AutoModelForSequenceClassification.from_pretrained(folder)
        model.train(False)
        optimizer = adam_of(folder, model, tmp_path)
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        rows = []
        for text, label in ROWS:
            loss = F.cross_entropy(
                model(**tokenizer(text, return_tensors="pt")).logits, torch.tensor([label])
            )
            gradients = torch.autograd.grad(loss, list(model.parameters()), materialize_grads=True)
            rows.append(torch.cat([each.flatten() for each in gradients]).double())
        squares = torch.cat([optimizer.state[each]["exp_avg_sq"].flatten() for each in model.parameters()])
        scales = (squares.double() / (1 - 0.999**step)).sqrt() + 1e-8
        expected += rate * (torch.stack(rows) / scales @ rows[0])
    pairs = found.scores[found.scores["query_index"] == 0].drop_duplicates("train_index")
    assert len(pairs) == len(ROWS)
    truth = expected[torch.tensor(pairs["train_index"].to_numpy(copy=True))]
    size = float(truth.abs().max())
    torch.testing.assert_close(
        torch.tensor(pairs["score"].to_numpy(copy=True)), truth, rtol=1e-3, atol=1e-3 * size
    )


@pytest.mark.long
def test_influence_reads_the_adam_of_an_adapter(trained: Path, tmp_path: Path) -> None:
    model = {**CONFIG["model"], "adapter": "lora/checkpoint-2"}
    influence = {"method": {"name": "tracin", "optimizer": "adam"}, "checkpoints": "lora/checkpoint-*"}
    found = psgrad.influence(write(trained, tmp_path / "out", model=model, influence=influence), report=False)
    assert {each["second_moments"] for each in found.facts} == {"the optimiser's state beside the checkpoint"}


@pytest.mark.long
def test_analyze_checkpoints_of_another_model(trained: Path, tmp_path: Path) -> None:
    config = write(
        trained,
        tmp_path / "out",
        analyze={"measures": ["grand"], "checkpoints": ["run/checkpoint-2", "lora/checkpoint-2"]},
    )
    with pytest.raises(CheckpointError, match="has other parameters than the config's model"):
        psgrad.analyze(config, report=False)


@pytest.mark.long
def test_influence_evaluation_of_a_model_without_the_weights_that_training_began_with(
    trained: Path, tmp_path: Path
) -> None:
    config = load_config(write(trained, tmp_path / "out"))
    with pytest.raises(ConfigError, match="would be trained again from the trained weights"):
        fresh_models(config, None)  # type: ignore[arg-type]
    sections = {"analyze": {"folds": 2}, "influence": {"evaluate": {"train": {"epochs": 2}}}}
    model = {**CONFIG["model"], "checkpoint": "run/checkpoint-4"}
    found = psgrad.analyze(write(trained, tmp_path / "folds", model=model, **sections), report=False)
    assert "out of sample" in str(found.issue_summary)


# -- The order of steps --------------------------------------------------------------------------------------


def listed(folder: Path, pattern: Any) -> list[str]:
    config = AnalyzeConfig.model_validate({"checkpoints": pattern}, context={"base": folder})
    return [str(path) for path in config.checkpoints or []]


def test_a_pattern_is_in_order_of_steps(tmp_path: Path) -> None:
    for name in ("step-9.pt", "step-10.pt", "step-100.pt", "other.txt"):
        (tmp_path / name).touch()
    assert listed(tmp_path, "step-*.pt") == ["step-9.pt", "step-10.pt", "step-100.pt"]
    assert listed(tmp_path, ["first.pt", "step-1*.pt"]) == ["first.pt", "step-10.pt", "step-100.pt"]


def test_a_trainers_own_step_goes_before_the_name(tmp_path: Path) -> None:
    for name, step in (("a", 20), ("b", 3)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    assert listed(tmp_path, "*") == ["b", "a"]


def test_names_that_do_not_tell_the_order(tmp_path: Path) -> None:
    for name in ("best.pt", "last.pt"):
        (tmp_path / name).touch()
    with pytest.raises(ValueError, match="their names do not tell which step came first"):
        listed(tmp_path, "*.pt")


def test_a_pattern_without_a_match(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no checkpoint matches 'run/\*\.pt'"):
        listed(tmp_path, "run/*.pt")


@pytest.mark.long
def test_a_learning_rate_that_is_said_goes_before_the_trainers(trained: Path) -> None:
    content = {"checkpoints": [{"path": "run/checkpoint-*", "learning_rate": 0.5}]}
    found = InfluenceConfig.model_validate(content, context={"base": trained}).checkpoints
    assert found is not None
    assert [each.learning_rate for each in found] == [0.5, 0.5]
