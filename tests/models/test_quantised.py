"""Pretrained models whose layers bitsandbytes keeps in 4 or 8 bits."""

from __future__ import annotations

import importlib
import sys
import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from psgrad.commands.setup import Setup, set_up
from psgrad.config import load_config
from psgrad.engine.execution.placement import is_quantised, place
from psgrad.engine.execution.stored import Stored
from psgrad.errors import ConfigError, ModelError, PsgradError
from psgrad.models import hub, quantised
from psgrad.models.factory import load_model
from psgrad.models.hub import library
from psgrad.models.model_folders import precision_of_weights
from tests.hugging_face import quantise, save_lora
from tests.text_tasks import CASES

pytest.importorskip("accelerate", reason="the extra quantised is not installed")
try:
    bnb: Any = library("bitsandbytes", "quantised")
except ModelError:
    pytest.skip("the extra quantised is not installed", allow_module_level=True)

WIDE = {"hidden_size": 64, "intermediate_size": 128}  # rows of whole blocks
CASE = replace(CASES["completion"], config=WIDE)
KINDS: Mapping[str, Mapping[str, Any]] = {
    "nf4, scales quantised": {"quant_type": "nf4", "compress_statistics": True},
    "nf4": {"quant_type": "nf4", "compress_statistics": False},
    "fp4, scales quantised": {"quant_type": "fp4", "compress_statistics": True},
    "fp4, blocks of 128": {"quant_type": "fp4", "compress_statistics": False, "blocksize": 128},
}


def stored(module: nn.Module) -> Stored:
    """The weight of one of bitsandbytes' layers, as psgrad keeps it."""
    model = nn.Sequential(module)
    quantised.store_weights(model)
    weight: Any = model[0].weight
    assert is_quantised(weight)
    return weight  # type: ignore[no-any-return]


def layer(value: Tensor, **options: Any) -> nn.Module:
    rows, columns = value.shape
    made: Any = bnb.nn.Linear4bit(columns, rows, bias=False)
    made.weight = bnb.nn.Params4bit(value, requires_grad=False, **options).to("cpu")
    return made  # type: ignore[no-any-return]


# -- The numbers of a weight ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_four_bits_are_the_numbers_of_bitsandbytes(kind: str, dtype: torch.dtype) -> None:
    made: Any = layer(torch.randn(6, 256).to(dtype), **KINDS[kind])
    expected = bnb.functional.dequantize_4bit(made.weight.data, made.weight.quant_state)
    ours = stored(made)
    assert ours.dtype == dtype
    assert torch.equal(ours.numbers(), expected)
    assert torch.equal(ours.t().numbers(), expected.t())
    assert torch.equal(ours[1:3].numbers(), expected[1:3])
    assert torch.equal(ours[:, 5:70].numbers(), expected[:, 5:70])
    rows = torch.tensor([4, 0, 4])
    assert torch.equal(ours.rows(rows), expected[rows])


@pytest.mark.parametrize("shape", [(32, 16), (10, 100), (7, 33), (5, 3), (1, 1)], ids=str)
def test_four_bits_of_rows_that_are_not_whole_blocks(shape: tuple[int, int]) -> None:
    made: Any = layer(torch.randn(shape), **KINDS["nf4"])
    state, packed = made.weight.quant_state, made.weight.data.view(torch.uint8).reshape(-1)
    places = torch.stack([packed >> 4, packed & 15], 1).reshape(-1)[: shape[0] * shape[1]].long()
    scales = state.absmax.repeat_interleave(state.blocksize)[: len(places)]
    expected = (state.code[places] * scales).reshape(shape)
    ours = stored(made)
    torch.testing.assert_close(ours.numbers(), expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(ours[-1:].numbers(), expected[-1:], rtol=1e-6, atol=0)


def test_eight_bits_are_the_numbers_of_bitsandbytes() -> None:
    made: Any = bnb.nn.Linear8bitLt(40, 30, bias=False, has_fp16_weights=False).to("cpu")
    expected = bnb.functional.int8_vectorwise_dequant(made.weight.data, made.weight.SCB)
    ours = stored(made)
    torch.testing.assert_close(ours.numbers(), expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(ours.t()[3:9].numbers(), expected.t()[3:9], rtol=1e-6, atol=0)


def test_a_layer_under_two_names_stays_one() -> None:
    shared = layer(torch.randn(64, 64), **KINDS["nf4"])
    model = nn.Sequential(shared, nn.Tanh(), shared)
    quantised.store_weights(model)
    assert type(model[0]) is nn.Linear
    assert model[0] is model[2]


def test_quantised_weights_move_as_their_bits() -> None:
    model = nn.Sequential(layer(torch.randn(64, 256), **KINDS["nf4, scales quantised"]), nn.Linear(64, 2))
    quantised.store_weights(model)
    place(model, torch.device("meta"), torch.float32, "as-saved")
    weight: Any = model[0].weight
    assert {part.device.type for part in weight.source.parts.values()} == {"meta"}
    assert weight.device.type == model[1].weight.device.type == "meta"
    assert sum(part.nbytes for part in weight.source.parts.values()) < 0.6 * 64 * 256 + 2048


def test_a_write_to_a_quantised_weight_is_refused() -> None:
    weight = stored(layer(torch.randn(2, 64), **KINDS["nf4"]))
    with pytest.raises(ModelError, match="writes into a quantised weight"):
        weight.mul_(2)


# -- Gradients under an adapter ------------------------------------------------------------------------------


def write(folder: Path, bits: str | None, dtype: str = "float32") -> Path:
    """The config of a folder with a causal language model and a LoRA adapter on layers of fewer bits."""
    path = CASE.write(folder, dtype=dtype)
    save_lora(folder / "lora", folder / "model", ["q_proj", "down_proj"])
    if bits is not None:
        quantise(folder / "model", bits)
    path.write_text(path.read_text().replace("task: causal-lm", "task: causal-lm, adapter: lora"))
    return path


def with_random_adapters(run: Setup) -> Setup:
    """The run with other weights than 0 in its adapters, so that all of them have gradients."""
    generator = torch.Generator().manual_seed(3)
    for value in run.objective.params.values():
        value.copy_(torch.randn(value.shape, generator=generator, dtype=value.dtype) / 10)
    return run


class OneRow(nn.Module):
    """A model with the loss and the rows of a run, for a loop of single rows."""

    def __init__(self, run: Setup, model: nn.Module) -> None:
        super().__init__()
        self.model, self.run = model, run

    def gradients(self, row: int) -> dict[str, Tensor]:
        block = self.run.reader.take(np.array([row]))
        named = {name: each for name, each in self.model.named_parameters() if each.requires_grad}
        loss = self.run.objective.with_model(self.model).plain_loss(block.inputs, block.target)
        return dict(zip(named, torch.autograd.grad(loss, list(named.values())), strict=True))


def of_transformers(run: Setup, folder: Path) -> nn.Module:
    """The model that transformers and peft make of the folder, with the weights of the run's adapters."""
    import peft
    import transformers

    base = transformers.AutoModelForCausalLM.from_pretrained(
        folder / "model", device_map={"": "cpu"}, dtype=torch.float32
    )
    model = peft.PeftModel.from_pretrained(base, folder / "lora", is_trainable=True)
    model.load_state_dict(run.objective.params, strict=False)
    for each in base.modules():
        if isinstance(each, bnb.nn.Linear4bit | bnb.nn.Linear8bitLt):
            each.train()  # in eval mode, on a CPU, inputs are rounded to bfloat16 or to 8 bits
    return model


@pytest.mark.long
@pytest.mark.parametrize("bits", ["4bit", "8bit"])
def test_gradients_of_adapters_are_those_of_bitsandbytes_autograd(bits: str, tmp_path: Path) -> None:
    run = with_random_adapters(set_up(load_config(write(tmp_path, bits))))
    rows = list(range(len(CASE.rows)))
    ours = run.stream(lambda _: None).gradients(rows).materialise()
    loop = OneRow(run, of_transformers(run, tmp_path))
    theirs = [loop.gradients(row) for row in rows]
    assert set(theirs[0]) == set(ours)
    for name, value in ours.items():
        expected = torch.stack([each[name] for each in theirs])
        torch.testing.assert_close(value, expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("bits", ["4bit", "8bit"])
def test_gradients_of_adapters_are_those_of_the_dequantised_model(bits: str, tmp_path: Path) -> None:
    run = with_random_adapters(set_up(load_config(write(tmp_path, bits, "float64"))))
    rows = list(range(len(CASE.rows)))
    ours = run.stream(lambda _: None).gradients(rows).materialise()
    whole = set_up(load_config(write(tmp_path / "whole", None, "float64")))
    numbers = dict(run.model.named_parameters())
    with torch.no_grad():
        for name, parameter in whole.model.named_parameters():
            parameter.copy_(numbers[name] * 1)  # of quantised weights: what they stand for
    loop = OneRow(whole, whole.model)
    theirs = [loop.gradients(row) for row in rows]
    quantised_names = {name for name, each in numbers.items() if is_quantised(each)}
    assert {name.rpartition(".")[0].rpartition(".")[2] for name in quantised_names} == {
        *("base_layer", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj"),
    }
    for name, value in ours.items():
        expected = torch.stack([each[name] for each in theirs])
        torch.testing.assert_close(value, expected, rtol=1e-10, atol=1e-12)


def test_a_row_of_eight_bits_does_not_depend_on_the_rows_beside_it(tmp_path: Path) -> None:
    run = set_up(load_config(write(tmp_path, "8bit", "float64")))
    for name, value in run.model.named_parameters():
        if name.endswith("layernorm.weight"):
            value.data.mul_(torch.where(torch.arange(64) % 7 == 0, 100.0, 1.0))  # large columns
    stream = run.stream(lambda _: None)
    together = stream.gradients([0, 1, 2, 3]).square_norms()
    alone = torch.cat([stream.gradients([row]).square_norms() for row in range(4)])
    torch.testing.assert_close(together, alone, rtol=1e-10, atol=0)


@pytest.fixture
def dequantised(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """How many dequantised weights of 4 bits were in memory at once, at the most since the last call."""
    alive: list[weakref.ref[Any]] = []
    counts = [0]
    own = quantised._FourBits.__call__

    def counted(self: Any, parts: Mapping[str, Tensor], first: int, count: int) -> Tensor:
        numbers = own(self, parts, first, count)
        alive.append(weakref.ref(numbers.untyped_storage()))
        counts.append(sum(each() is not None for each in alive))
        return numbers

    def most() -> int:
        found = max(counts)
        counts[:] = [0]
        return found

    monkeypatch.setattr(quantised._FourBits, "__call__", counted)
    return most


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_layer_at_a_time_is_dequantised(
    dtype: str, tmp_path: Path, dequantised: Callable[[], int]
) -> None:
    run = set_up(load_config(write(tmp_path, "4bit", dtype)))
    dequantised()
    run.stream(lambda _: None).gradients(list(range(len(CASE.rows)))).square_norms()
    assert dequantised() == 1


def test_no_kernel_of_the_hub_is_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    fetching = ModuleType("kernels")
    monkeypatch.setitem(sys.modules, "kernels", fetching)
    with hub._no_fetched_kernels(), pytest.raises(ImportError):
        importlib.import_module("kernels")
    assert sys.modules["kernels"] is fetching
    monkeypatch.delitem(sys.modules, "kernels")
    with hub._no_fetched_kernels():
        pass
    assert "kernels" not in sys.modules


# -- What is refused -----------------------------------------------------------------------------------------


def refusal(kind: type[PsgradError], path: Path) -> str:
    with pytest.raises(kind) as caught:
        set_up(load_config(path))
    return str(caught.value)


def changed(path: Path, old: str, new: str) -> Path:
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))
    return path


def test_fewer_bits_without_an_adapter_are_refused(tmp_path: Path) -> None:
    path = changed(write(tmp_path, "4bit"), ", adapter: lora", "")
    said = refusal(ConfigError, path)
    assert "14 weights of model are kept in fewer bits and can't be trained, and there is no adapter" in said


def test_a_quantised_parameter_is_not_trained(tmp_path: Path) -> None:
    path = write(tmp_path, "8bit")
    path.write_text(path.read_text() + 'analyze: {trainable: ["*k_proj.weight"]}\n')
    assert "layers.0.self_attn.k_proj.weight would be trained, and it is kept" in refusal(ConfigError, path)


def test_whole_weights_are_not_put_into_fewer_bits(tmp_path: Path) -> None:
    path = changed(write(tmp_path, "4bit"), "lora", "lora, checkpoint: model/model.safetensors")
    assert "can't be put into those" in refusal(ConfigError, path)


@pytest.mark.parametrize("name", ["bitsandbytes", "accelerate"])
def test_a_missing_library_is_named_with_its_extra(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path, "4bit")
    config = load_config(path)

    def missing(wanted: str, package: str | None = None) -> Any:
        if wanted == name:
            raise ModuleNotFoundError(name=name)
        return own(wanted, package)

    own = quantised.library.__globals__["importlib"].import_module
    monkeypatch.setattr("importlib.import_module", missing)
    with pytest.raises(ModelError) as caught:
        load_model(config.model, config.base)
    assert f"{name} is not installed, and this config needs it" in str(caught.value)
    assert "pip install 'psgrad[quantised]'" in str(caught.value)


# -- Models that are saved quantised -------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("kind", ["nf4", "fp4", "8bit"])
def test_a_model_that_is_saved_quantised(kind: str, tmp_path: Path) -> None:
    path = write(tmp_path, None, "float64")
    model = quantise(tmp_path / "model", kind, torch.bfloat16)
    run = set_up(load_config(path))
    words = f"bitsandbytes keeps 14 layers in {'8 bits' if kind == '8bit' else f'4 bits ({kind})'}"
    assert any(words in note for note in run.loaded.notes)
    assert run.loaded.pretrained is not None
    assert run.loaded.pretrained.precision == "bfloat16"
    for name, module in model.named_modules():
        if isinstance(module, bnb.nn.Linear4bit | bnb.nn.Linear8bitLt):
            ours: Any = dict(run.model.named_modules())[f"base_model.model.{name}"]
            ours = getattr(ours, "base_layer", ours).weight
            expected = (
                bnb.functional.int8_vectorwise_dequant(module.weight.data, module.weight.SCB)
                if kind == "8bit"
                else bnb.functional.dequantize_4bit(module.weight.data, module.weight.quant_state)
            )
            torch.testing.assert_close(ours * 1, expected.double(), rtol=1e-6, atol=0)


def test_scales_do_not_count_for_the_precision_of_a_model(tmp_path: Path) -> None:
    scales = {f"layer.weight.{name}": torch.ones(9) for name in ("absmax", "nested_absmax", "quant_map")}
    tensors = {**scales, "other.SCB": torch.ones(9), "norm.weight": torch.ones(2, dtype=torch.bfloat16)}
    save_file(tensors, tmp_path / "model.safetensors")
    assert precision_of_weights(tmp_path / "model.safetensors") == "bfloat16"
