"""Pretrained models whose layers bitsandbytes keeps in 4 or 8 bits. Its modules become plain linear layers,
whose weights are computed anew from the bits for each operator that reads them.

bitsandbytes' own forward of 8 bits rounds the inputs of a layer, too, and picks columns that it does not
round by the largest values of a whole batch: the numbers of a row would depend on the rows beside it. Here
layers of 4 and of 8 bits multiply by the weight that the bits stand for, whatever the inputs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from psgrad.config.model import ModelConfig
from psgrad.engine.execution.placement import is_quantised
from psgrad.engine.execution.stored import Stored
from psgrad.engine.execution.weight_sources import Quantised
from psgrad.errors import ConfigError, ModelError
from psgrad.models.hub import QUANTISED, library

_METHODS = ("bitsandbytes", "bitsandbytes_4bit", "bitsandbytes_8bit")


def in_fewer_bits(settings: Any) -> bool:
    """Whether bitsandbytes keeps layers of a saved model in fewer bits. settings: the config of its folder.
    Raises ModelError without the libraries.
    """
    saved = getattr(settings, "quantization_config", None) or {}
    saved = saved if isinstance(saved, dict) else saved.to_dict()
    if saved.get("quant_method") not in _METHODS:
        return False
    for name in QUANTISED:
        library(name, "quantised")
    return True


def store_weights(model: nn.Module) -> str:
    """Puts plain linear layers with frozen weights in place of bitsandbytes'; returns what was done."""
    modules = library("bitsandbytes", "quantised").nn
    done: Counter[str] = Counter()
    made: dict[int, nn.Linear] = {}
    for name, module in list(model.named_modules(remove_duplicate=False)):
        if id(module) in made:  # under another name, too
            model.set_submodule(name, made[id(module)])
            continue
        if isinstance(module, modules.Linear4bit):
            weight, kind = _of_4_bits(module.weight), f"4 bits ({module.weight.quant_type})"
        elif isinstance(module, modules.Linear8bitLt):
            weight, kind = _of_8_bits(module), "8 bits"
        else:
            continue
        rows, columns = weight.layout.shape
        layer = made[id(module)] = nn.Linear(columns, rows, bias=False, device="meta")
        layer.weight = nn.Parameter(Stored(weight, weight.layout.dtype), requires_grad=False)
        layer.bias = module.bias
        model.set_submodule(name, layer)
        done[kind] += 1
    words = " and ".join(f"{count:,} layers in {kind}" for kind, count in done.items())
    return f"bitsandbytes keeps {words or 'no layer in fewer bits'}"


def require_whole(model: nn.Module, config: ModelConfig) -> None:
    """Raises ConfigError for a model that keeps layers in fewer bits: no checkpoint can be put into those."""
    if any(map(is_quantised, model.parameters())):
        raise ConfigError(
            f"{config.pretrained} keeps layers in fewer bits, and the weights of {config.checkpoint} can't be"
            " put into those",
            hint="save them with the model by save_pretrained, and name the folder in model.pretrained",
        )


def require_frozen(model: nn.Module, config: ModelConfig, chosen: bool) -> None:
    """Raises ConfigError where weights of fewer bits would be trained, or those beside them for want of an
    adapter. chosen: whether the config names what is trained.
    """
    bits = {name: each.requires_grad for name, each in model.named_parameters() if is_quantised(each)}
    trained = next((name for name, requires in bits.items() if requires), None)
    if trained is not None:
        raise ConfigError(
            f"the parameter {trained} would be trained, and it is kept in fewer bits",
            hint="train an adapter (model.adapter), or parameters with all their bits",
        )
    if bits and config.adapter is None and not chosen:
        raise ConfigError(
            f"{len(bits):,} weights of {config.pretrained} are kept in fewer bits and can't be trained, and"
            " there is no adapter",
            hint="set model.adapter, or name what is trained",
        )


def _of_4_bits(weight: Any) -> Quantised:
    """The numbers of a Params4bit."""
    state = weight.quant_state
    parts = {"packed": weight.data.view(torch.uint8).reshape(-1), "scales": state.absmax}
    if state.nested:
        parts |= {"scales of scales": state.state2.absmax, "code": state.state2.code, "offset": state.offset}
    found = _FourBits(state.blocksize, state.quant_type, state.dtype, state.state2)
    return Quantised(parts, found, tuple(state.shape), state.dtype)


class _FourBits:
    """Dequantises weights of 4 bits as bitsandbytes does, in the type that they had before."""

    def __init__(self, block: int, kind: str, dtype: torch.dtype, scales: Any) -> None:
        self.block, self.kind, self.dtype = block, kind, dtype
        self.scales = None if scales is None else (scales.blocksize, scales.dtype)

    def __call__(self, parts: Mapping[str, Tensor], first: int, count: int) -> Tensor:
        block = self.block
        low, high = first // block, -(-(first + count) // block)
        scales = parts["scales"]
        if self.scales is not None:
            size, dtype = self.scales
            scales = torch.ops.bitsandbytes.dequantize_blockwise.default(
                scales, parts["scales of scales"], parts["code"], size, dtype
            )
            scales = (scales + parts["offset"]).float()
        packed = parts["packed"][low * block // 2 : high * block // 2]
        # As one row: where rows are not whole blocks, the kernel for CPUs (0.50) takes other scales.
        numbers: Tensor = torch.ops.bitsandbytes.dequantize_4bit.default(
            packed, scales[low:high], block, self.kind, [1, 2 * len(packed)], self.dtype
        )
        return numbers.reshape(-1)[first - low * block :][:count]


def _of_8_bits(module: Any) -> Quantised:
    """The numbers of a Linear8bitLt: whole numbers, and a scale for each row."""
    weight, state = module.weight, module.state
    scales = weight.SCB if state.SCB is None else state.SCB
    if scales is None:
        raise ModelError("a layer of 8 bits has no scales")
    return Quantised(
        {"packed": weight.data, "scales": scales}, _eight_bits, tuple(weight.shape), torch.float32
    )


def _eight_bits(parts: Mapping[str, Tensor], first: int, count: int) -> Tensor:
    packed, width = parts["packed"], parts["packed"].shape[1]
    low, high = first // width, -(-(first + count) // width)
    rows = packed[low:high].float() * (parts["scales"][low:high].float() / 127).unsqueeze(1)
    return rows.reshape(-1)[first - low * width :][:count]
