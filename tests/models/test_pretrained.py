"""Pretrained models: a folder of save_pretrained gives the library's own numbers, and what can't be used is
told with its cause.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from psgrad.config import ModelConfig
from psgrad.errors import CheckpointError, ConfigError, ModelError, PsgradError
from psgrad.models.factory import LoadedModel, load_model
from psgrad.run.input_files import sha256_of
from psgrad.run.results.manifest import content_of
from tests.hugging_face import AUTO, tiny_model


def load(folder: Path, task: str = "sequence-classification", **options: Any) -> LoadedModel:
    config = ModelConfig.model_validate({"pretrained": folder.name, "task": task, **options})
    return load_model(config, folder.parent)


def refusal(
    kind: type[PsgradError], folder: Path, task: str = "sequence-classification", **options: Any
) -> str:
    with pytest.raises(kind) as caught:
        load(folder, task, **options)
    return str(caught.value)


def inputs_of(task: str) -> dict[str, torch.Tensor]:
    if task == "image-classification":
        return {"pixel_values": torch.randn(3, 3, 8, 8, generator=torch.Generator().manual_seed(0))}
    ids = torch.randint(7, 90, (3, 9))
    return {"input_ids": ids, **({"decoder_input_ids": ids[:, :5]} if task == "seq2seq-lm" else {})}


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Kernels with several threads round by how rows are divided, which may differ from call to call."""
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.sweep
@pytest.mark.parametrize("task", AUTO)
def test_each_task_gives_the_outputs_of_transformers(task: str, tmp_path: Path) -> None:
    expected = tiny_model(task, tmp_path / "model")(**(inputs := inputs_of(task)))
    loaded = load(tmp_path / "model", task)

    assert loaded.pick is not None
    found = loaded.pick(loaded.model(**inputs))
    if task == "question-answering":
        assert found.shape == (3, 9, 2)
        assert_close(found[..., 0], expected.start_logits)
        assert_close(found[..., 1], expected.end_logits)
    else:
        assert_close(found, expected.logits[:, 0] if task == "regression" else expected.logits)
    assert not loaded.model.training
    assert loaded.pretrained is not None
    assert (loaded.pretrained.folder, loaded.pretrained.task) == (tmp_path / "model", task)
    assert loaded.pretrained.config.model_type == loaded.model.config.model_type
    assert loaded.notes == []


@pytest.mark.sweep
def test_keys_and_values_are_not_kept(tmp_path: Path) -> None:
    tiny_model("causal-lm", tmp_path / "model")
    loaded = load(tmp_path / "model", "causal-lm")
    assert loaded.model(**inputs_of("causal-lm")).past_key_values is None


def test_sharded_weights(tmp_path: Path) -> None:
    model = tiny_model("causal-lm", tmp_path / "whole")
    model.save_pretrained(tmp_path / "model", max_shard_size="8KB")
    assert (tmp_path / "model" / "model.safetensors.index.json").exists()
    loaded, whole = load(tmp_path / "model", "causal-lm"), load(tmp_path / "whole", "causal-lm")

    assert all(
        torch.equal(value, whole.model.state_dict()[name])
        for name, value in loaded.model.state_dict().items()
    )
    assert loaded.sha256 != whole.sha256


def test_tied_weights_are_one_parameter(tmp_path: Path) -> None:
    tiny_model("causal-lm", tmp_path / "model", architecture="gpt2")
    loaded = load(tmp_path / "model", "causal-lm")
    names = dict(loaded.model.named_parameters())
    assert "lm_head.weight" not in names
    assert loaded.model.lm_head.weight is names["transformer.wte.weight"]


@pytest.mark.long
def test_the_type_of_the_weights_and_not_of_the_config(tmp_path: Path) -> None:
    tiny_model("causal-lm", tmp_path / "model").to(torch.bfloat16).save_pretrained(tmp_path / "model")
    settings = tmp_path / "model" / "config.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "dtype": "float16"}))
    assert {p.dtype for p in load(tmp_path / "model", "causal-lm").model.parameters()} == {torch.bfloat16}


def test_code_in_pickled_weights_does_not_run(tmp_path: Path) -> None:
    class Runs:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path.touch, (tmp_path / "it ran",))

    tiny_model("causal-lm", tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").unlink()
    torch.save({"x": Runs()}, tmp_path / "model" / "pytorch_model.bin")
    refusal(CheckpointError, tmp_path / "model", "causal-lm")
    assert not (tmp_path / "it ran").exists()


def test_weights_without_a_place_are_noted(tmp_path: Path) -> None:
    model = tiny_model("causal-lm", tmp_path / "model")
    model.surplus = torch.nn.Linear(2, 2)
    model.save_pretrained(tmp_path / "model")
    (note,) = load(tmp_path / "model", "causal-lm").notes
    assert note == (
        f"left out 2 tensors of {tmp_path / 'model'} for which there is no place:"
        " surplus.bias, surplus.weight"
    )


def test_kwargs_go_into_the_config(tmp_path: Path) -> None:
    tiny_model("sequence-classification", tmp_path / "model")
    loaded = load(tmp_path / "model", kwargs={"hidden_act": "relu"})
    assert loaded.model.config.hidden_act == "relu"


def saved(task: str, **options: Any) -> Callable[[Path], object]:
    """Makes the folder of a model of this task."""
    return lambda folder: tiny_model(task, folder, **options)


def with_file(name: str, content: str | None) -> Callable[[Path], object]:
    """Makes the folder of a language model of which a file has other content; None for one that is gone."""

    def make(folder: Path) -> None:
        tiny_model("causal-lm", folder)
        (folder / name).unlink()
        if content is not None:
            (folder / name).write_text(content)

    return make


CLASSES, LM, SETTINGS = "sequence-classification", "causal-lm", "config.json"
UNREADABLE = "transformers can't read the config"
# (what makes the folder, the task and kwargs of the config, the error, its words)
REFUSED: list[tuple[Callable[[Path], object], str, dict[str, Any], type[PsgradError], list[str]]] = [
    (
        saved("masked-lm"),
        CLASSES,
        {},
        CheckpointError,
        [
            "no weights for",
            "classifier.weight",
            "start with random numbers there",
            "saved as BertForMaskedLM",
        ],
    ),
    (  # classifier.weight is the name of both, with one shape
        saved(CLASSES),
        "token-classification",
        {},
        CheckpointError,
        ["model.task is token-classification", "as BertForSequenceClassification, whose head is another"],
    ),
    (saved(CLASSES), CLASSES, {"num_labels": 5}, CheckpointError, ["other shapes", "num_labels"]),
    (saved(CLASSES), CLASSES, {"hiden_act": "relu"}, ConfigError, ["did you mean hidden_act?"]),
    (Path.mkdir, CLASSES, {}, ConfigError, ["has no config.json"]),
    (
        lambda folder: tiny_model(LM, folder / "checkpoint-4"),
        LM,
        {},
        ConfigError,
        ["name one of the folders of models in it: checkpoint-4"],
    ),
    (
        lambda folder: folder.mkdir() or (folder / "adapter_config.json").write_text("{}"),
        LM,
        {},
        ConfigError,
        ["name the base model in model.pretrained"],
    ),
    (with_file("model.safetensors", None), LM, {}, CheckpointError, ["has no weights"]),
    (with_file("model.safetensors", "damaged"), LM, {}, CheckpointError, ["is damaged"]),
    (with_file(SETTINGS, "{"), LM, {}, ModelError, [UNREADABLE]),
    (with_file(SETTINGS, "[]"), LM, {}, ModelError, [UNREADABLE]),
    (with_file(SETTINGS, '{"model_type": "of the future"}'), LM, {}, ModelError, [UNREADABLE]),
    (
        saved("image-classification"),
        LM,
        {},
        ConfigError,
        ["transformers has no such head for a vit model", "one of image-classification"],
    ),
    (saved("regression"), CLASSES, {}, ConfigError, ["set model.task: regression"]),
    (
        saved(CLASSES, problem_type="single_label_classification"),
        "regression",
        {},
        ConfigError,
        ["problem_type is single_label_classification"],
    ),
]


@pytest.mark.parametrize("case", range(len(REFUSED)))
def test_folder_that_does_not_fit_the_config_refused(case: int, tmp_path: Path) -> None:
    make, task, kwargs, kind, words = REFUSED[case]
    make(tmp_path / "model")
    said = refusal(kind, tmp_path / "model", task, kwargs=kwargs)
    assert all(each in said for each in words), said


def test_no_such_folder(tmp_path: Path) -> None:
    config = ModelConfig(pretrained="./absent", task="causal-lm")
    with pytest.raises(ConfigError, match=r"there is no folder .*absent"):
        load_model(config, tmp_path)


def test_a_file_in_place_of_a_folder(tmp_path: Path) -> None:
    tiny_model("causal-lm", tmp_path / "model")
    config = ModelConfig(pretrained="model/model.safetensors", task="causal-lm")
    with pytest.raises(ConfigError, match="name the folder that the file lies in"):
        load_model(config, tmp_path)


REMOTE = """\
from pathlib import Path
from transformers import LlamaConfig
Path(__file__).with_name("it ran").touch()
class Own(LlamaConfig):
    model_type = "own"
"""


def test_code_of_the_folder_does_not_run(tmp_path: Path) -> None:
    tiny_model("causal-lm", tmp_path / "model")
    settings = tmp_path / "model" / "config.json"
    content = {**json.loads(settings.read_text()), "model_type": "own", "auto_map": {"AutoConfig": "own.Own"}}
    settings.write_text(json.dumps(content))
    (tmp_path / "model" / "own.py").write_text(REMOTE.replace("__file__", repr(str(settings))))

    said = refusal(ConfigError, tmp_path / "model", "causal-lm")
    assert "brings Python code of its own, and it was not run" in said
    assert not (tmp_path / "model" / "it ran").exists()


def test_transformers_writes_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    tiny_model("masked-lm", tmp_path / "model")
    capfd.readouterr()
    load(tmp_path / "model", "masked-lm")
    refusal(CheckpointError, tmp_path / "model")
    assert capfd.readouterr() == ("", "")


# -- Hub ids -------------------------------------------------------------------------------------------------

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A local cache with someone/tiny in it."""
    import huggingface_hub.constants

    folder = tmp_path / "cache"
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(folder))
    repository = folder / "models--someone--tiny"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(COMMIT)
    tiny_model("causal-lm", repository / "snapshots" / COMMIT)
    return repository / "snapshots" / COMMIT


def by_id(tmp_path: Path) -> LoadedModel:
    return load_model(ModelConfig(pretrained="someone/tiny", task="causal-lm"), tmp_path)


def test_an_id_in_the_cache(cache: Path, tmp_path: Path) -> None:
    loaded = by_id(tmp_path)
    assert loaded.pretrained is not None
    assert loaded.pretrained.folder == cache
    assert content_of(loaded.origin) == {
        "pretrained": "someone/tiny",
        "folder": str(cache),
        "commit": COMMIT,
        "task": "causal-lm",
        "adapters": [],
        "dtype": "as-saved",
    }


def test_a_folder_goes_before_an_id(cache: Path, tmp_path: Path) -> None:
    tiny_model("causal-lm", tmp_path / "someone" / "tiny")
    loaded = by_id(tmp_path)
    assert loaded.pretrained is not None
    assert loaded.pretrained.folder == tmp_path / "someone" / "tiny"


@pytest.mark.parametrize("lost", ["everything", "weights"])
def test_an_id_that_is_not_in_the_cache(lost: str, cache: Path, tmp_path: Path) -> None:
    if lost == "everything":
        shutil.rmtree(cache.parent.parent)
    if lost == "weights":
        (cache / "model.safetensors").unlink()
    with pytest.raises(ConfigError) as caught:
        by_id(tmp_path)
    assert "the hub id 'someone/tiny'" in str(caught.value)
    assert "is not in the local cache" in str(caught.value)
    assert "`hf download someone/tiny` fetches it" in str(caught.value)


def test_a_library_that_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_model("causal-lm", tmp_path / "model")
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    said = refusal(ModelError, tmp_path / "model", "causal-lm")
    assert "transformers is not installed" in said
    assert "pip install 'psgrad[hugging-face]'" in said


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_checkpoint_in_place_of_the_weights_of_a_pretrained_model(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    model = tiny_model("causal-lm", tmp_path / "model")
    model.to(torch.bfloat16).save_pretrained(tmp_path / "model")
    trained = {name: torch.randn(value.shape).to(dtype) for name, value in model.state_dict().items()}
    torch.save(trained, tmp_path / "trained.pt")
    found = load(tmp_path / "model", "causal-lm", checkpoint=tmp_path / "trained.pt")
    own = found.model.state_dict()
    assert all(torch.equal(own[name], value) for name, value in trained.items())  # none is rounded
    assert found.sha256 == sha256_of(tmp_path / "trained.pt")
