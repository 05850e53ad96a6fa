"""Adapters: read from peft's folders, they give peft's own outputs, and only their parameters are
differentiated.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from psgrad.config import ModelConfig
from psgrad.engine.gradients import per_sample_gradients
from psgrad.engine.transforms import functional_call
from psgrad.errors import CheckpointError, ConfigError, ModelError, PsgradError
from psgrad.models.factory import LoadedModel, load_model
from tests.hugging_face import tiny_model

peft = pytest.importorskip("peft", reason="the extra hugging-face is not installed")

CAUSAL = {"task_type": "CAUSAL_LM"}
KINDS: dict[str, Any] = {
    "lora": lambda: peft.LoraConfig(r=3, lora_alpha=6, target_modules=["q_proj", "v_proj"], **CAUSAL),
    "rslora": lambda: peft.LoraConfig(r=3, use_rslora=True, target_modules=["down_proj"], **CAUSAL),
    "embedding": lambda: peft.LoraConfig(r=3, target_modules=["embed_tokens", "q_proj"], **CAUSAL),
    "dora": lambda: peft.LoraConfig(r=3, use_dora=True, target_modules=["q_proj", "v_proj"], **CAUSAL),
    "ia3": lambda: peft.IA3Config(
        target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"], **CAUSAL
    ),
}


def make_adapter(folder: Path, base: Path, settings: Any, seed: int = 0, task: str = "causal-lm") -> Any:
    """An adapter of the model in `base` with random weights, written by peft; the model with it in."""
    import transformers

    kinds = {
        "causal-lm": "AutoModelForCausalLM",
        "sequence-classification": "AutoModelForSequenceClassification",
    }
    model = getattr(transformers, kinds[task]).from_pretrained(base)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        adapted = peft.get_peft_model(model, settings)
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.data = torch.randn_like(parameter) / 4
    adapted.save_pretrained(folder)
    return adapted.eval()


@pytest.fixture
def base(tmp_path: Path) -> Path:
    tiny_model("causal-lm", tmp_path / "base")
    return tmp_path / "base"


def load(base: Path, adapter: Any, trainable: list[str] | None = None, **options: Any) -> LoadedModel:
    content = {"pretrained": base.name, "task": "causal-lm", "adapter": adapter, **options}
    return load_model(ModelConfig.model_validate(content), base.parent, trainable)


def refusal(kind: type[PsgradError], base: Path, adapter: Any, **options: Any) -> str:
    with pytest.raises(kind) as caught:
        load(base, adapter, **options)
    return str(caught.value)


IDS = torch.randint(7, 300, (3, 9), generator=torch.Generator().manual_seed(0))


def trained(loaded: LoadedModel) -> list[str]:
    return [name for name, parameter in loaded.model.named_parameters() if parameter.requires_grad]


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_has_the_outputs_and_gradients_of_peft(kind: str, base: Path) -> None:
    expected = make_adapter(base.parent / "adapter", base, KINDS[kind]())
    loaded = load(base, "adapter")

    assert loaded.pick is not None
    found = loaded.pick(loaded.model(input_ids=IDS))
    assert found.shape == (3, 9, 400)
    assert torch.equal(found, expected(input_ids=IDS).logits)
    own = {name for name, parameter in expected.named_parameters() if parameter.requires_grad}
    assert set(trained(loaded)) == own

    def loss(params: dict[str, torch.Tensor], ids: torch.Tensor) -> torch.Tensor:
        logits = loaded.pick(functional_call(loaded.model, params, (), {"input_ids": ids[None]}))  # type: ignore
        return torch.nn.functional.cross_entropy(logits[0, :-1], ids[1:])

    params = {name: p.detach() for name, p in loaded.model.named_parameters() if p.requires_grad}
    gradients = per_sample_gradients(loss, params, IDS).materialise()
    for row, ids in enumerate(IDS):
        logits = expected(input_ids=ids[None]).logits[0]
        value = torch.nn.functional.cross_entropy(logits[:-1], ids[1:])
        named = {name: p for name, p in expected.named_parameters() if p.requires_grad}
        oracle = torch.autograd.grad(value, list(named.values()), materialize_grads=True)
        for name, gradient in zip(named, oracle, strict=True):
            torch.testing.assert_close(gradients[name][row], gradient, rtol=1e-4, atol=1e-6)


def test_trainable_says_more(base: Path) -> None:
    make_adapter(base.parent / "adapter", base, KINDS["lora"]())
    loaded = load(base, "adapter", trainable=["*lora_A*", "*norm.weight"])
    assert all("lora_A" in name or name.endswith("norm.weight") for name in trained(loaded))
    assert any(name.endswith("norm.weight") for name in trained(loaded))


def test_modules_to_save_are_read_and_differentiated(tmp_path: Path) -> None:
    tiny_model("sequence-classification", tmp_path / "base")
    settings = peft.LoraConfig(r=2, target_modules=["query"], task_type="SEQ_CLS")
    expected = make_adapter(tmp_path / "adapter", tmp_path / "base", settings, task="sequence-classification")
    loaded = load(tmp_path / "base", "adapter", task="sequence-classification")

    assert torch.equal(loaded.model(input_ids=IDS).logits, expected(input_ids=IDS).logits)
    assert any("classifier.modules_to_save" in name for name in trained(loaded))
    assert not any("original_module" in name for name in trained(loaded))


# -- The base model ------------------------------------------------------------------------------------------


def rename_base(adapter: Path, name: str) -> None:
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "base_model_name_or_path": name}))


def test_an_adapter_of_a_copy_of_the_base(base: Path) -> None:
    shutil.copytree(base, base.parent / "copy")
    make_adapter(base.parent / "adapter", base.parent / "copy", KINDS["lora"]())
    assert len(load(base, "adapter").notes) == 2


def test_an_adapter_whose_base_is_not_here(base: Path) -> None:
    make_adapter(base.parent / "adapter", base, KINDS["lora"]())
    rename_base(base.parent / "adapter", "someone/large")
    (note,) = load(base, "adapter").notes[:1]
    assert note.endswith("names someone/large as its base, and shapes alone tell that base is that")


def of_another_base(base: Path, settings: Any = None, named: str | None = "base", **options: Any) -> None:
    """An adapter that was made for another base, and names `named` as its base; None for that other one."""
    tiny_model("causal-lm", base.parent / "other", **options)
    make_adapter(base.parent / "adapter", base.parent / "other", settings or KINDS["lora"]())
    if named is not None:
        rename_base(base.parent / "adapter", named)


def damaged(base: Path, name: str, content: str | None) -> None:
    """An adapter of which a file has other content; None for a file that is gone."""
    make_adapter(base.parent / "adapter", base, KINDS["lora"]())
    (base.parent / "adapter" / name).unlink()
    if content is not None:
        (base.parent / "adapter" / name).write_text(content)


SETTINGS, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
REFUSED: dict[str, tuple[Any, type[PsgradError], str]] = {
    "other weights": (
        lambda base: of_another_base(base, named=None, seed=1),
        ConfigError,
        "was made for another base model, ",
    ),
    "another size": (
        lambda base: of_another_base(base, hidden_size=32),
        CheckpointError,
        "does not fit the model: size mismatch",
    ),
    "fewer layers": (
        lambda base: of_another_base(base, num_hidden_layers=1),
        CheckpointError,
        "does not fit the model: 4 missing",
    ),
    "more layers": (
        lambda base: of_another_base(base, num_hidden_layers=3),
        CheckpointError,
        "does not fit the model: 4 without a place",
    ),
    "another architecture": (
        lambda base: of_another_base(base, peft.LoraConfig(target_modules=["c_attn"]), architecture="gpt2"),
        CheckpointError,
        "does not fit the model: Target modules",
    ),
    "a whole model": (
        lambda base: base.rename(base.parent / "adapter") and tiny_model("causal-lm", base),
        ConfigError,
        "it holds a whole model: name it in model.pretrained",
    ),
    "no weights": (lambda base: damaged(base, WEIGHTS, None), CheckpointError, "has no weights"),
    "damaged weights": (lambda base: damaged(base, WEIGHTS, "{"), CheckpointError, "is damaged"),
    "damaged settings": (lambda base: damaged(base, SETTINGS, "{"), CheckpointError, SETTINGS),
    "settings of no kind": (
        lambda base: damaged(base, SETTINGS, '{"peft_type": 3}'),
        CheckpointError,
        "names no peft_type",
    ),
    "prompt tuning": (
        lambda base: make_adapter(
            base.parent / "adapter", base, peft.PromptTuningConfig(num_virtual_tokens=4, **CAUSAL)
        ),
        ModelError,
        "puts positions of its own",
    ),
    "a kind that peft does not know": (
        lambda base: damaged(base, SETTINGS, '{"peft_type": "OF_THE_FUTURE"}'),
        ModelError,
        "peft can't put the adapter",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_adapter_that_does_not_fit_refused(case: str, base: Path) -> None:
    prepare, kind, words = REFUSED[case]
    prepare(base)
    assert words in refusal(kind, base, "adapter")


def test_the_base_is_read_in_the_wanted_type_and_the_adapter_is_not(base: Path) -> None:
    make_adapter(base.parent / "adapter", base, KINDS["lora"]())
    types = {
        name: parameter.dtype
        for name, parameter in load(base, "adapter", dtype="bfloat16").model.named_parameters()
    }
    assert {types[name] for name in types if "lora" not in name} == {torch.bfloat16}
    assert {types[name] for name in types if "lora" in name} == {torch.float32}
